"""Enclosures, formats and error bounds: all that a reference is written over."""

from torch import Tensor

from harness.numerics.accumulation import (
    mean,
    mean_of_products,
    mean_of_squares,
    sum_of_row_products,
    sum_of_rows,
    total,
    total_of_products,
    variance_about,
)
from harness.numerics.any_order import sum_in_any_order
from harness.numerics.dots import dot
from harness.numerics.enclosure import (
    Enclosure,
    at_least,
    clamp,
    concatenate,
    fusible_product,
    hull,
    largest_magnitude,
    multiply_add,
    product_in_any_order,
    stack,
)
from harness.numerics.factors import Factor
from harness.numerics.formats import FORMATS, Format, cast, format_of, round_to
from harness.numerics.grouped import Groups, Matrices, grouped_dot, grouped_outer
from harness.numerics.moments import difference_of_products, mean_and_variance
from harness.numerics.premises import DOCUMENTED, Bound, Premises, current, using
from harness.numerics.primitives import divide, divide_rn, exp, rsqrt, sigmoid, sqrt, sqrt_rn
from harness.numerics.quantized import dequantized
from harness.numerics.remembered import remembered, remembering
from harness.numerics.sums import Sum
from harness.numerics.tensor_cores import BY_CAPABILITY, LOOSEST, TensorCores

__all__ = [
    "BY_CAPABILITY",
    "DOCUMENTED",
    "FORMATS",
    "LOOSEST",
    "Bound",
    "Enclosure",
    "Factor",
    "Format",
    "Groups",
    "Matrices",
    "Premises",
    "Sum",
    "Tensor",
    "TensorCores",
    "at_least",
    "cast",
    "clamp",
    "concatenate",
    "current",
    "dequantized",
    "difference_of_products",
    "divide",
    "divide_rn",
    "dot",
    "exp",
    "format_of",
    "fusible_product",
    "grouped_dot",
    "grouped_outer",
    "hull",
    "largest_magnitude",
    "mean",
    "mean_and_variance",
    "mean_of_products",
    "mean_of_squares",
    "multiply_add",
    "product_in_any_order",
    "remembered",
    "remembering",
    "round_to",
    "rsqrt",
    "sigmoid",
    "sqrt",
    "sqrt_rn",
    "stack",
    "sum_in_any_order",
    "sum_of_row_products",
    "sum_of_rows",
    "total",
    "total_of_products",
    "using",
    "variance_about",
]
