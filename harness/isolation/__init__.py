"""Kernels in processes of their own, which have inputs and give results, and never the reference, seeds or records.

A *kernel process* loads the file of a kernel and calls it. The *judge* asks it, by messages of JSON through a socket,
and by memory that is the judge's and that both have mapped. Nothing that a kernel process says is unpickled, evaluated
or used as a path: see `answers`. The *fork server* of a judge has imported what kernels need, and forks kernel
processes.
"""
