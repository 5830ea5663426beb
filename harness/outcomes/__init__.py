"""Results of the commands besides `verify`, as data."""
