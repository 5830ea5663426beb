"""What the bits of a kernel depend on: pairs of calls that must give equal bits if a property holds."""
