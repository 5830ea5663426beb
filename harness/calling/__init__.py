"""One call of a kernel, in any process: its request, and what is seen of it there."""
