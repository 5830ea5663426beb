"""op_name: what it computes, in a sentence, and who defines it (a paper, or a file of a project and its version).

Here: max(x, 0)² · weight, so that everything runs before you change it (the squared ReLU of Primer, arXiv 2109.08668).
Replace the formula, then the names.
"""

from __future__ import annotations

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, at_least, product_in_any_order


@op(
    # The inputs whose leading dimensions are rows that do not know of each other. All rows share `weight`.
    rows=("x",),
    # Where kernels in use differ. An axis for each independent choice; its options; and for each option the stages
    # that it rounds: stage → the input whose dtype they are rounded to, or a format ("bf16", "e4m3", "int8", …). The
    # first option is the default. If there is only one way to round, leave `axes` out.
    axes={"activation_rule": {"fp32_activation": {}, "rounded_activation": {"activation": "x"}}},
    # What every kernel rounds. A stage that stands nowhere stays in fp32.
    rounds={"output": "x"},
)
def op_name(
    x: Enclosure,
    # None as the default makes an input optional.
    weight: Enclosure | None = None,
    *,
    # Parameters come here, by keyword: `eps: float`, `scale: float = 1.0`. The two below are passed by lastbit.
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y = max(x, 0)² · weight, x [..., N], weight [N]. Say shapes and units, and which parameters exclude each other.

    Raises:
        ValueError: the weight does not fit x.
    """
    if weight is not None and tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; with x {tuple(x.shape)} it must be {x.shape[-1:]}")
    # Each operation stands for one operation of a kernel in fp32. `exp`, `sigmoid`, `divide` and the like know their
    # own errors, sums know their orders. Say with `product_in_any_order`, `multiply_add` or `hull` what a kernel is
    # free to do otherwise, and ask `contract.has("rounded_activation")` where an option changes more than a rounding.
    positive = at_least(x, 0.0)
    activation = stage("activation", positive * positive)
    if weight is None:
        output = activation
    elif contract.has("rounded_activation"):
        output = activation * weight
    else:
        output = product_in_any_order(positive, positive, weight)
    # `result=True` marks what a kernel returns.
    stage("output", output, result=True)
