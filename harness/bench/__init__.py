"""How fast kernels are: those of the project, and those that nobody trusts."""
