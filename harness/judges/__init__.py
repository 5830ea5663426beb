"""Verdicts on single kernel files, for programs that ask for thousands of them: `lastbit judge`, `lastbit.judge`."""
