"""Enclosures, formats and error bounds: all that a reference is written over."""

from harness.numerics.accumulation import (
    Sum,
    dot,
    mean,
    mean_of_products,
    mean_of_squares,
    sum_of_row_products,
    sum_of_rows,
    total,
    variance_about,
)
from harness.numerics.enclosure import (
    Enclosure,
    at_least,
    clamp,
    fusible_product,
    hull,
    largest_magnitude,
    multiply_add,
    product_in_any_order,
)
from harness.numerics.formats import FORMATS, Format, cast, format_of, round_to
from harness.numerics.premises import DOCUMENTED, Bound, Premises, current, using
from harness.numerics.primitives import divide, divide_rn, exp, rsqrt, sigmoid, sqrt, sqrt_rn

__all__ = [
    "DOCUMENTED",
    "FORMATS",
    "Bound",
    "Enclosure",
    "Format",
    "Premises",
    "Sum",
    "at_least",
    "cast",
    "clamp",
    "current",
    "divide",
    "divide_rn",
    "dot",
    "exp",
    "format_of",
    "fusible_product",
    "hull",
    "largest_magnitude",
    "mean",
    "mean_of_products",
    "mean_of_squares",
    "multiply_add",
    "product_in_any_order",
    "round_to",
    "rsqrt",
    "sigmoid",
    "sqrt",
    "sqrt_rn",
    "sum_of_row_products",
    "sum_of_rows",
    "total",
    "using",
    "variance_about",
]
