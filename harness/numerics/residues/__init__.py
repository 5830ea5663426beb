"""Numbers as residues modulo two primes, which show whether two formulas are equal, whatever the order of sums."""

from lastbit.numerics.residues.constants import constant, is_recognised, products_of, recognised_parameters
from lastbit.numerics.residues.numbers import Residues, concatenated, zeros_like

__all__ = [
    "Residues",
    "concatenated",
    "constant",
    "is_recognised",
    "products_of",
    "recognised_parameters",
    "zeros_like",
]
