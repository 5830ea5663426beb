"""A plain PyTorch function turned into a reference: traced, its roundings found, and written as a file."""
