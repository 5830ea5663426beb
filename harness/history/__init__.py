"""Comparison with what was before: golden files, other revisions and other versions of packages."""
