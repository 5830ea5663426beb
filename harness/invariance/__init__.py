"""Properties of a kernel's bits: pairs of calls that must give equal bits if the property holds."""
