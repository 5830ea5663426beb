"""Running kernels: which cases, in which processes, what the kernel does in one, and what is kept of it."""
