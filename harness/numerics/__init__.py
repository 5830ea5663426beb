"""Enclosures, formats and error bounds: the vocabulary of references."""

from torch import Tensor

from lastbit.numerics.dots import Factor, dot
from lastbit.numerics.enclosure import (
    Enclosure,
    at_least,
    clamp,
    concatenate,
    fusible_product,
    hull,
    in_reals,
    largest_magnitude,
    multiply_add,
    product_in_any_order,
    stack,
)
from lastbit.numerics.formats import CODES, FORMATS, TARGETS, Format, cast, format_of, round_to
from lastbit.numerics.grouped import Groups, Matrices, grouped_dot, grouped_outer
from lastbit.numerics.integers import (
    ceil,
    floor,
    power_of_two_from,
    power_of_two_to,
    round_half_away,
    round_half_even,
    trunc,
    two_to_the,
)
from lastbit.numerics.moments import (
    difference_of_products,
    mean,
    mean_and_variance,
    mean_of_products,
    mean_of_squares,
    sum_of_row_products,
    sum_of_rows,
    total,
    total_of_products,
    variance_about,
)
from lastbit.numerics.premises import DOCUMENTED, Bound, Premises, current, using
from lastbit.numerics.primitives import (
    Primitive,
    cos,
    divide,
    divide_rn,
    erf,
    exp,
    exp2,
    expm1,
    log,
    log1p,
    log2,
    primitive,
    rsqrt,
    sigmoid,
    sin,
    sqrt,
    sqrt_rn,
    tanh,
)
from lastbit.numerics.quantized import dequantized
from lastbit.numerics.remembered import remembered, remembering
from lastbit.numerics.selection import Indices, Truth, abs, amax, amin, argmax, gather, maximum, minimum, where
from lastbit.numerics.softmax import (
    Exponentials,
    exponentials,
    log_softmax,
    log_sum_exp,
    of_base_two,
    rescaled,
    rescaled_accumulation,
    rescaled_dot,
    shifted_exponential,
    softmax,
)
from lastbit.numerics.sums import AfterSums, Sum, cumsum, sum_in_any_order
from lastbit.numerics.tensor_cores import BY_CAPABILITY, LOOSEST, TensorCores

__all__ = [
    "BY_CAPABILITY", "CODES", "DOCUMENTED", "FORMATS", "LOOSEST", "TARGETS", "AfterSums", "Bound", "Enclosure",
    "Exponentials", "Factor", "Format", "Groups", "Indices", "Matrices", "Premises", "Primitive", "Sum", "Tensor",
    "TensorCores", "Truth", "abs", "amax", "amin", "argmax", "at_least", "cast", "ceil", "clamp", "concatenate", "cos",
    "cumsum", "current", "dequantized", "difference_of_products", "divide", "divide_rn", "dot", "erf", "exp", "exp2",
    "expm1", "exponentials", "floor", "format_of", "fusible_product", "gather", "grouped_dot", "grouped_outer", "hull",
    "in_reals", "largest_magnitude", "log", "log1p", "log2", "log_softmax", "log_sum_exp", "maximum", "mean",
    "mean_and_variance", "mean_of_products", "mean_of_squares", "minimum", "multiply_add", "of_base_two",
    "power_of_two_from", "power_of_two_to", "primitive", "product_in_any_order", "remembered", "remembering",
    "rescaled", "rescaled_accumulation", "rescaled_dot", "round_half_away", "round_half_even", "round_to", "rsqrt",
    "shifted_exponential", "sigmoid", "sin", "softmax", "sqrt", "sqrt_rn", "stack", "sum_in_any_order",
    "sum_of_row_products", "sum_of_rows", "tanh", "total", "total_of_products", "trunc", "two_to_the", "using",
    "variance_about", "where",
]  # fmt: skip
