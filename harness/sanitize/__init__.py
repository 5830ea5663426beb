"""Kernels called under NVIDIA's compute-sanitizer, and what it says about their memory accesses as findings."""
