"""What share of each result was decided: how much of it could not have been otherwise under the contract."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from harness.inputs import row_blocks
from harness.numerics import Format, Premises, using
from harness.numerics.formats import ordinals
from harness.op import Contract, Op
from harness.result import StageResult
from harness.verify.evaluate import Params, Tensors, evaluate
from harness.verify.judge import Judgement

_MOST = 1 << 22  # elements of the main input of which the rows are asked how well their latent value is known


def shares(
    op: Op, contract: Contract, tensors: Tensors, params: Params, premises: Premises, judgement: Judgement
) -> dict[str, float]:
    """Result → share of it that is decided, from 0 to 1.

    An element with one legal value counts 1. An element in a row that one latent value explains counts by how well that
    value is known: 1 if the order of the sums behind it makes no difference, less by the share of its bits that the
    order leaves open.
    """
    rows = judgement.rows
    explained = rows is not None and rows.rows > 0 and not rows.unexplained
    known = _known(op, contract, tensors, params, premises) if explained else 0.0
    through = op.latent.through if op.latent is not None else ()
    return {s.name: _share(s, known if s.name in through else 0.0) for s in judgement.stages if s.result}


def _share(stage: StageResult, known: float) -> float:
    numel = stage.cumulative.numel
    exact = max(stage.cumulative.decided, stage.isolated.decided) / numel if numel else 1.0
    return exact + (1 - exact) * known


def _known(op: Op, contract: Contract, tensors: Tensors, params: Params, premises: Premises) -> float:
    """Share of the bits of the latent value that the order of sums leaves no choice about, mean over the first rows."""
    main = tensors[op.inputs[0]]
    blocks = row_blocks(tuple(main.shape[:-1]), main.shape[-1], _MOST) if op.rows and main.ndim > 1 else ()
    index = next(iter(blocks), ())
    some = {n: t[index] if n in op.rows and index else t for n, t in tensors.items()}
    own, sharp = (_possible(op, contract, some, params, p) for p in (premises, replace(premises, depth=_no_height)))
    open_bits, precision = torch.log2(own[0] / sharp[0]).clamp(min=0), own[1]
    return float(torch.where(torch.isfinite(open_bits), 1 - open_bits / precision, 0.0).clamp(min=0).mean())


def _no_height(terms: int) -> int:
    """The height of a sum that is rounded once, whose order makes no difference."""
    return 0


def _possible(op: Op, contract: Contract, tensors: Tensors, params: Params, premises: Premises) -> tuple[Tensor, int]:
    """How many values each row's latent stage may have, NaN where they cannot be counted, and its precision in bits."""
    assert op.latent is not None
    with using(premises):
        trace = evaluate(op, contract, tensors, params)
    stage = op.latent.under(contract)
    fmt, latent = trace.formats[stage], trace.enclosure(stage)
    assert isinstance(fmt, Format)
    finite = torch.isfinite(latent.lo) & torch.isfinite(latent.hi)
    lo, hi = (ordinals(torch.where(finite, end, 0.0), fmt) for end in (latent.lo, latent.hi))
    return torch.where(finite, (hi - lo + 1).to(torch.float64), torch.nan), fmt.precision
