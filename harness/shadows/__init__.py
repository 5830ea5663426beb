"""Shadows of kernels: the residues of everything they compute, kept beside its values."""
