"""Branches of a kernel's own files: which ways its calls went, and which ways no case of a run did."""
