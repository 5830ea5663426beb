"""What the commands besides `verify` found, as data."""
