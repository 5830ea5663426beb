"""Shadows of kernels: the residues of all that they compute, beside the numbers, whatever the order of their sums."""
