"""Diagnosis of kernels: which contract one keeps, and the stage, line and arithmetic at which one fails."""
