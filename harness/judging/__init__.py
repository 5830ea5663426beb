"""The judge: the values that every stage must have, and how a kernel's tensors differ from them. It calls no kernel.

A GPU is asked little. Python starts an operation in 20 to 40 µs, and while the host waits for an answer, nothing runs
that could. With several workers on one device, a wait also costs a turn of the others. So the figures of all
comparisons of a block come back in one transfer, and whatever must ask whether all numbers are finite is for the CPU
alone.
"""
