"""`lastbit calibrate`: measure on the device at hand what the error bounds rest on, and keep the figures."""

from harness.calibrate.measure import Measurement, measure
from harness.calibrate.store import load_premises, save

__all__ = ["Measurement", "load_premises", "measure", "save"]
