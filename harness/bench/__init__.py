"""Measurements of lastbit itself: what verifying costs beside the kernel, a copy, and a plain test."""
