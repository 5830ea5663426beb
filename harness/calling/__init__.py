"""One call of a kernel, in whatever process it runs: what it is given, and what is seen of it there."""
