"""References of the ops, a module each."""
