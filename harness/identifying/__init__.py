"""Identification of what a kernel computes: the contracts that its results keep, and where two kernels part."""
