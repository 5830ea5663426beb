"""What the errors of a kernel look like: sentences from the numbers alone, each tested against all wrong elements."""

from lastbit.diagnosing.patterns.diagnose import diagnose

__all__ = ["diagnose"]
