"""Verification of kernels: evaluate the reference, compare, judge, and run many cases."""
