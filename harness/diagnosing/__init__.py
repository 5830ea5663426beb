"""Diagnosis of a kernel that fails: the stage, line and arithmetic at which it goes wrong."""
