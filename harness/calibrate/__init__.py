"""`lastbit calibrate`: measure on the device at hand what the error bounds rest on, and keep the figures."""

from lastbit.calibrate.store import load_premises

__all__ = ["load_premises"]
