"""Kernels in processes of their own, which have no reference, no seeds and no records, and little of the system."""
