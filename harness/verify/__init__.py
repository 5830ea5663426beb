"""Verification of kernels: the choice of cases, the processes they run in, the calls and checks, the records."""
