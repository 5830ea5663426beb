"""Verification of kernels: the choice of cases, the processes they run in, the calls and checks, the records.

Workers of a run do not talk to each other. Each makes the same plan from the run's `config.json`, so that an item is
known by its place. A worker appends a line per result, and writes down the case that is about to run: if its process
ends, that case is known. To import torch takes longer than a small case, so that processes which call no kernel do it
only when the workers have begun.
"""
