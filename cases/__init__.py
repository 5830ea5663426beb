"""Cases of the ops, a module each."""
