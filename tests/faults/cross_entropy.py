"""Faults of cross entropy and of its gradient: what losses of language models get wrong, each with a case for it.

They are hunted with these cases alone (tests/kernels/test_faults_shown.py): losses are fp32, of which cases of
random numbers decide nothing, so that the kernel without a fault is often inconclusive on them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.faults.plant import Edit, Fault

FORWARD, BACKWARD, ROWS = "cross_entropy.py", "cross_entropy_backward.py", "cross_entropy_rows.py"

_SHIFT = 'shift = tl.where(higher == float("-inf"), 0.0, higher)'
_TERMS = "terms = tl.where(mask, tl.exp(x - shift), 0.0)"
_TOTAL = "total = total * tl.exp(largest - shift) + tl.sum(terms, axis=1, keep_dims=True)"
_LSE = "lse = largest + tl.log(total)"
_OWN = "own, _ = logits_at(row_ptr + label * column_stride, counted, logit_scale, softcap)"
_LABEL = "label = tl.load(labels_ptr + row * label_stride, mask=live, other=0).to(tl.int64)"
_COUNTED = "counted = live & (label != ignore_index)"
_COUNT = "counted += (label != ignore_index).to(tl.int32)"
_SUM = "tl.load(losses_ptr + row, mask=row < rows, other=0.0).to(tl.float32)"
_SMOOTHED = "lse - tl.sum(every, axis=1, keep_dims=True) * each - own * kept"
_TANH = "squashed = libdevice.tanh(x / softcap)"
_RESULT = "result = difference * (grad * logit_scale)"
_SLOPE = "difference = difference * (1.0 - squashed * squashed)"
_OF_LABEL = "tl.where(counted & (columns == label), difference - kept, difference)"


Shown = tuple[Fault, str]
"""A fault, and a case that shows it."""


def _forward(name: str, does: str, old: str, new: str, stage: str, case: str, file: str = FORWARD) -> Shown:
    fault = Fault(name, does, (Edit(old, new, file),), stage, "", op="cross_entropy", variant="cross_entropy")
    return fault, f"cross_entropy {case} seed=1"


def _backward(
    name: str, does: str, old: str, new: str, stage: str, case: str, file: str = BACKWARD, variant: str = ""
) -> Shown:
    own = f"cross_entropy_backward{variant}"
    fault = Fault(name, does, (Edit(old, new, file),), stage, "", op="cross_entropy_backward", variant=own)
    return fault, f"cross_entropy_backward {case} seed=1"


_NORMAL = "logits=bf16[9,70] labels=int64[9]:labels_70"
_PLAIN = "logits=bf16[9,70]:gates labels=int64[9]:labels_70"
_GRADIENT = f"{_PLAIN} grad_output=fp32[9]"


def _of_sums() -> Iterator[Shown]:
    yield _forward(
        *("largest not subtracted", "adds exponentials of the logits as they are"),
        *(
            _SHIFT,
            "shift = tl.where(higher == higher, 0.0, higher)",
            "lse",
            "logits=bf16[4,70]:huge labels=int64[4]:zeros",
        ),
    )
    yield _forward(
        *("sum not rescaled", "forgets to rescale the sum when a block has a larger logit"),
        *(_TOTAL, "total = total + tl.sum(terms, axis=1, keep_dims=True)"),
        *("lse", "logits=bf16[8,4200]:outlier_last labels=int64[8]:below_4200"),
    )
    yield _forward(
        *("masked block", "takes -inf from -inf in a block of masked classes"),
        *(_SHIFT, "shift = higher", "lse", "logits=bf16[6,8000]:masked_classes labels=int64[6]:below_8000"),
    )
    yield _forward(
        *("lanes past the row added", "adds exponentials of lanes behind the last class"),
        *(_TERMS, "terms = tl.exp(x - shift)", "lse", _NORMAL),
    )
    yield _forward(
        *("lanes past the row in the maximum", "takes 0 for the largest logit where all are less"),
        *('tl.where(mask, x, float("-inf"))', "x", "lse"),
        "logits=bf16[1,3]:values(-200,-201,-208) labels=int64[1]:values(1)",
    )
    yield _forward(
        *("last class dropped", "leaves the last class out of the sum"),
        *("mask = live & (columns < n)", "mask = live & (columns < n - 1)", "lse", _NORMAL),
    )
    yield _forward(
        *("lse rounded", "rounds the logarithm of the sum to bf16"),
        *(_LSE, f"{_LSE}\n    lse = lse.to(tl.bfloat16).to(tl.float32)", "lse", _NORMAL),
    )
    yield _forward(
        *("sum rounded", "adds the sums of blocks in bf16"),
        *(_TOTAL, f"{_TOTAL}\n        total = total.to(tl.bfloat16).to(tl.float32)", "lse", _NORMAL),
    )
    yield _forward(
        *("binary logarithm", "takes the binary logarithm of the sum"),
        *(_LSE, "lse = largest + tl.log2(total)", "lse", _NORMAL),
    )
    yield _forward(
        *("column stride left out", "takes neighbours in memory for the classes of a row"),
        *("pointers = row_ptr + columns * stride", "pointers = row_ptr + columns"),
        *("lse", "logits=bf16[9,70]@1,9:gates labels=int64[9]:below_70", ROWS),
    )


def _of_labels() -> Iterator[Shown]:
    yield _forward(
        *("label in 32 bits", "compares the lower 32 bits of a label"),
        *(_LABEL, _LABEL.replace("int64", "int32"), "losses"),
        "logits=bf16[3,70]:gates labels=int64[3]:values(4294967296,3,69) ignore_index=4294967296",
    )
    yield _forward(
        *("ignore_index baked in", "always ignores -100"),
        *(_COUNTED, "counted = live & (label != -100)"),
        *("losses", "logits=bf16[9,70]:gates labels=int64[9]:below_3 ignore_index=0"),
    )
    yield _forward(
        *("label stride left out", "takes neighbours in memory for the labels of rows"),
        *(_LABEL, _LABEL.replace(" * label_stride", "")),
        *("out_of_bounds or losses", "logits=bf16[9,70]:gates labels=int64[9]@2:labels_70"),
    )
    yield _forward(
        *("column of the label", "looks for the logit of the label as if columns had no stride"),
        *(_OWN, _OWN.replace("label * column_stride", "label")),
        *("losses", "logits=bf16[9,70]@1,9:gates labels=int64[9]:below_70"),
    )
    yield _forward(
        *("loss of ignored rows", "gives ignored rows the loss lse"),
        *("loss = tl.where(counted, loss, 0.0)", "loss = loss", "losses", _PLAIN),
    )
    yield _forward(
        *("mean over all rows", "divides the sum by the number of rows, ignored ones included"),
        *(_COUNT, "counted += (row < rows).to(tl.int32)", "loss", f"{_PLAIN} reduction=mean"),
    )
    yield _forward(
        *("count left out", "divides by the rows that count where it is told what to divide by"),
        *("None if count is None else float(count),", "None,", "loss", f"{_PLAIN} reduction=mean count=64"),
    )
    yield _forward(
        *("last row dropped", "leaves the last row out of the sum of the losses"),
        *(_SUM, _SUM.replace("row < rows", "row < rows - 1")),
        *("loss", "logits=bf16[9,70]:gates labels=int64[9]:below_70 reduction=sum"),
    )


def _of_options() -> Iterator[Shown]:
    smooth = f"{_PLAIN} label_smoothing=0.1"
    yield _forward(
        *("smoothing over the others", "spreads the smoothed part over the other classes alone"),
        *('"each": label_smoothing / n', '"each": label_smoothing / (n - 1)', "losses", smooth),
    )
    yield _forward(
        *("smoothing on top", "adds the smoothed part and keeps the whole label"),
        *(_SMOOTHED, _SMOOTHED.replace("own * kept", "own"), "losses", smooth),
    )
    yield _forward(
        *("cap left out for the label", "caps all logits but that of the label"),
        *(_OWN, _OWN.replace("softcap)", "None)"), "losses", f"{_PLAIN} softcap=1.0"),
    )
    yield _forward(
        *("scale left out for the label", "scales all logits but that of the label"),
        *(_OWN, _OWN.replace("logit_scale", "1.0"), "losses", f"{_PLAIN} logit_scale=0.5"),
    )
    yield _forward(
        *("tanh by a sigmoid", "computes the tanh of the cap as 2 · sigmoid(2y) - 1, which loses small logits"),
        *(_TANH, "squashed = 2.0 * tl.sigmoid(2.0 * (x / softcap)) - 1.0"),
        *("lse", "logits=fp32[4,1]:tiny labels=int64[4]:zeros softcap=30.0 logit_scale=0.5", ROWS),
    )
    yield _forward(
        *("z-loss of lse", "adds z · lse in place of z · lse²"),
        *("loss += z_loss * lse * lse", "loss += z_loss * lse", "losses", f"{_PLAIN} z_loss=0.1"),
    )


def _of_gradients() -> Iterator[Shown]:
    smooth = f"{_GRADIENT} label_smoothing=0.1"
    yield _backward(
        *("smoothing left out", "subtracts nothing from the classes that are not the label"),
        *("difference = probs - each", "difference = probs", "difference", smooth),
    )
    yield _backward(
        *("label in each part", "finds the label in every part of a long row"),
        *(_OF_LABEL, _OF_LABEL.replace("columns == label", "columns % BLOCK == label"), "difference"),
        "logits=bf16[2,4200]:normal labels=int64[2]:values(5,7) grad_output=fp32[2]",
    )
    yield _backward(
        *("probabilities of rounded logarithms", "takes exponentials of logarithms rounded to bf16"),
        *("probs = tl.exp(x - lse)", "probs = tl.exp((x - lse).to(tl.bfloat16).to(tl.float32))"),
        *("difference", _GRADIENT),
    )
    yield _backward(
        *("gradient rounded before the product", "rounds the gradient before it is multiplied by grad_output"),
        *(_RESULT, _RESULT.replace("difference *", "difference.to(X).to(tl.float32) *"), "grad_logits", _GRADIENT),
    )
    yield _backward(
        *("gradient rounded once", "multiplies by grad_output what the contract rounds before"),
        *("gradient = (difference * logit_scale).to(X).to(tl.float32)", "gradient = difference * logit_scale"),
        *("gradient", _GRADIENT, BACKWARD, "+rounded_gradient"),
    )
    yield _backward(
        *("slope of the cap left out", "takes the gradient through the cap as it is"),
        *(_SLOPE, "difference = difference", "grad_logits", f"{_GRADIENT} softcap=30.0"),
    )
    yield _backward(
        *("scale left out", "leaves the scale of the logits out of their gradient"),
        *(_RESULT, "result = difference * grad", "grad_logits", f"{_GRADIENT} logit_scale=0.5"),
    )
    yield _backward(
        *("count left out", "does not divide by the count"),
        *("difference = difference / count", "difference = difference", "grad_logits", f"{_GRADIENT} count=7"),
    )
    yield _backward(
        *("NaN of ignored rows", "multiplies the probabilities of ignored rows by 0"),
        *("result = tl.where(counted, result, 0.0)", "result = result", "grad_logits"),
        "logits=bf16[8,40]:special labels=int64[8]:values(-100,-100,-100,-100,-100,-100,-100,-100) grad_output=fp32[8]",
    )
    yield _backward(
        *("stride of grad_output left out", "reads beyond the one gradient that all rows share"),
        *("grad_ptr + row * grad_stride", "grad_ptr + row", "out_of_bounds or grad_logits"),
        f"{_PLAIN} grad_output=fp32[9]@0:ones",
    )
    yield _backward(
        *("half of the z-loss", "leaves the 2 out of the gradient of z · lse²"),
        *('"twice_z": 2.0 * z_loss or None', '"twice_z": z_loss or None', "difference", f"{_GRADIENT} z_loss=0.1"),
    )
    yield _backward(
        *("stride of lse left out", "reads beyond the one lse that all rows share"),
        *("lse_ptr + row * lse_stride", "lse_ptr + row", "out_of_bounds or difference"),
        f"{_GRADIENT} lse=fp32[9]@0:constant",
    )


FAULTS = (*_of_sums(), *_of_labels(), *_of_options(), *_of_gradients())
