"""Measurements: what verifying costs beside the kernel, a copy, and a plain test; how fast kernels are."""
