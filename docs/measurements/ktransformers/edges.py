"""What kt-kernel does at the edges: one process per class and probe, because some of them end it.

`python docs/measurements/ktransformers/edges.py CLASS PROBE...` says in a sentence each what was seen. kt_kernel.py
runs all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from problem import ADAPTERS, KtProblem, both, errors, expected, named, problem, relative
from torch import Tensor

RIGHT = {"AMXInt4_SFT_MOE": 0.35}
"""Largest relative error that rounding explains, where it is not 0.1."""
NAN, INFINITY = float("nan"), float("inf")
SOME_EXPERTS = [[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]]


def seen(p: KtProblem, actual: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None = None) -> str:
    """Say which results are wrong, beyond what the rounding of the class explains."""
    limit = RIGHT.get(p.name, 0.1)
    found = errors(actual, expected(p) if exact is None else exact)
    wrong = [f"{key} {value:.2g}" for key, value in found.items() if not value <= limit]
    return f"wrong, relative error: {', '.join(wrong)}" if wrong else "right"


def relative_errors(name: str) -> str:
    """Return the error of every result, as JSON."""
    p = problem(name)
    return json.dumps(errors(both(p.layer(), p), expected(p)))


def ids_outside(name: str) -> str:
    p = problem(name, ids=[[0, -1], [4, 2], [-7, 99], [3, 3], [1, -1]], tokens=5)
    actual = both(p.layer(), p)
    zeros = [float(actual[key][2].abs().max()) for key in ("output", "grad_input", "grad_routing_weights")]
    return seen(p, actual) if not any(zeros) else "a row without experts is not zero"


def duplicates(name: str) -> str:
    p = problem(name, ids=[[1, 1, 1, 1]] * 40, tokens=40, slots=4)
    return seen(p, both(p.layer(), p))


def skipped_nan(name: str) -> str:
    p = problem(name, ids=[[0, 1], [-1, 1], [2, 3], [-1, -1], [3, 0]], tokens=5)
    weights, x, gradient = p.weights.clone(), p.x.clone(), p.grad_output.clone()
    weights[1, 0], weights[3], x[3], gradient[3] = NAN, NAN, NAN, NAN
    clean, dirty = both(p.layer(), p), both(p.layer(), replace(p, weights=weights, x=x, grad_output=gradient))
    changed = [key for key in clean if not torch.equal(clean[key], dirty[key])]
    return f"changes {', '.join(changed)}" if changed else "right"


def no_tokens(name: str) -> str:
    p = problem(name).first(0)
    return seen(p, both(p.layer(), p))


def experts_without_tokens(name: str) -> str:
    p = problem(name, ids=SOME_EXPERTS, tokens=5)
    actual = both(p.layer(), p, {key: torch.full_like(t, 7.0) for key, t in p.adapters.items()})
    left = [key for key in ADAPTERS if actual[f"grad_{key}"][[1, 3]].any()]
    return f"not zero: {', '.join(left)}; {seen(p, actual)}" if left else seen(p, actual)


def accumulate_first(name: str) -> str:
    p = problem(name)
    before = {key: torch.full_like(t, 3.0) for key, t in p.adapters.items()}
    return _accumulated(p, both(p.layer(), p, before, accumulate=True), {f"grad_{key}": 3.0 for key in before})


def accumulate_later(name: str) -> str:
    p = problem(name)
    layer, written = p.layer(), {key: torch.zeros_like(t) for key, t in p.adapters.items()}
    first = {key: t.clone() for key, t in both(layer, p, written).items()}
    return _accumulated(p, both(layer, p, written, accumulate=True), first)


def _accumulated(p: KtProblem, actual: Mapping[str, Tensor], before: Mapping[str, Tensor | float]) -> str:
    limit, exact = RIGHT.get(p.name, 0.1), {key: t for key, t in expected(p).items() if "lora" in key}
    added = [key for key, t in exact.items() if relative(actual[key], t + before[key]) < limit]
    replaced = [key for key, t in exact.items() if relative(actual[key], t) < limit]
    if len(added) == len(exact):
        return "right"
    return f"replaced instead of added: {', '.join(replaced) if len(replaced) < len(exact) else 'all six gradients'}"


def two_forwards(name: str, depth: int = 1) -> str:
    p = problem(name)
    other, layer = replace(p, x=-p.x), p.layer(cache_depth=depth)
    for each in (p, other):
        layer.forward(each.x, each.ids, each.weights, save=True)
    last = f"of the second: {seen(other, named(None, layer.backward(p.grad_output)))}"
    try:
        return f"{last}; of the first: {seen(p, named(None, layer.backward(p.grad_output)))}"
    except RuntimeError as error:
        return f"{last}; of the first: RuntimeError ({error})"


def two_forwards_depth_2(name: str) -> str:
    return two_forwards(name, 2)


def no_forward(name: str) -> str:
    p = problem(name)
    layer = p.layer()
    layer.forward(p.x, p.ids, p.weights)
    layer.backward(p.grad_output)
    return "no error"


def two_layers(name: str) -> str:
    one, two = problem(name, seed=1), problem(name, seed=2)
    first, second = one.layer(), two.layer()
    outputs = [layer.forward(p.x, p.ids, p.weights, save=True) for layer, p in ((first, one), (second, two))]
    texts = [
        seen(p, named(output, layer.backward(p.grad_output)))
        for layer, p, output in ((first, one, outputs[0]), (second, two, outputs[1]))
    ]
    return "right" if texts == ["right", "right"] else str(texts)


def fewer_and_more_tokens(name: str) -> str:
    p = problem(name, tokens=80)
    layer = p.layer()
    texts = {tokens: seen(p.first(tokens), both(layer, p.first(tokens))) for tokens in (3, 80, 1, 40)}
    return "right" if set(texts.values()) == {"right"} else str(texts)


def threads(name: str) -> str:
    p = problem(name, tokens=64)
    one, two = (both(p.layer(threads=n), p) for n in (1, 2))
    changed = [key for key in one if not torch.equal(one[key], two[key])]
    return f"other bits: {', '.join(changed)}" if changed else "the same bits"


def updated_a(name: str) -> str:
    return _updated(name, "a")


def updated_b(name: str) -> str:
    return _updated(name, "b")


def _updated(name: str, part: str) -> str:
    p = problem(name)
    layer, before = p.layer(), expected(p)
    layer.forward(p.x, p.ids, p.weights)
    for key, tensor in p.adapters.items():
        if key.endswith(part):
            tensor.mul_(-1.5)
    output = layer.forward(p.x, p.ids, p.weights)
    which = [word for word, e in (("old", before), ("new", expected(p))) if seen(p, {"output": output}, e) == "right"]
    layer.update_adapters()
    updated = seen(p, {"output": layer.forward(p.x, p.ids, p.weights)})
    return f"{f'the {which[0]} output' if which else 'neither the old nor the new output'}; after the call {updated}"


def not_finite(name: str, value: float = NAN) -> str:
    p = problem(name)
    p.x[0, 0] = value
    actual, exact = both(p.layer(), p), expected(p)
    lost = [key for key in exact if (actual[key].isfinite() & ~exact[key].isfinite()).any()]
    return f"finite numbers instead of NaN: {', '.join(lost)}" if lost else "right"


def infinite(name: str) -> str:
    return not_finite(name, INFINITY)


def scaling_zero(name: str) -> str:
    p = replace(problem(name), scaling=0.0)
    return seen(p, both(p.layer(), p, {key: torch.full_like(t, 7.0) for key, t in p.adapters.items()}))


def nan_scale(name: str) -> str:
    p = problem(name)
    if "gate_scale" not in p.base:
        return "has no scales"
    p.base["gate_scale"][:, 0, 0] = NAN
    return (
        f"accepted; {int(both(p.layer(), p)['output'].isnan().any(1).sum())} of {len(p.x)} rows of the output are NaN"
    )


def odd_scale(name: str) -> str:
    p = problem(name)
    if name != "MXFP4_SFT_MOE":
        return "takes them, or has no scales"
    p.base["gate_scale"].mul_(1.4140625)
    p.dense["gate"].mul_(1.4140625)
    return f"accepted; {seen(p, both(p.layer(), p))}"


def too_many_tokens(name: str) -> str:
    p = problem(name, tokens=80)
    return f"no error; {seen(p, both(p.layer(tokens=32), p))}"


def hidden_48(name: str) -> str:
    return _odd_size(name, hidden=48)


def low_gate(name: str) -> str:
    p = problem(name).first(1)
    a, b = (p.adapters[f"gate_lora_{part}"].double() for part in "ab")
    gates = (p.dense["gate"] + p.scaling * b @ a)[p.ids[0]] @ p.x[0].double()
    scaled = {low: replace(p, x=(p.x.double() * (low / gates.min())).bfloat16()) for low in (-80, -95)}
    return "; ".join(f"{low}: {seen(q, both(q.layer(), q))}" for low, q in scaled.items())


def width_48(name: str) -> str:
    return _odd_size(name, width=48)


def _odd_size(name: str, **size: int) -> str:
    if name in ("MXFP4_SFT_MOE", "AMXInt4_KGroup_SFT_MOE", "AMXInt4_SFT_MOE"):
        return "has groups of 32"
    p = problem(name, **size)
    return f"no error; {seen(p, both(p.layer(), p))}"


def sizes_64(name: str) -> str:
    p = problem(name) if "Int4" not in name else _small_int4(name)
    return seen(p, both(p.layer(), p))


def _small_int4(name: str) -> KtProblem:
    from unittest.mock import patch

    with patch.dict("problem.WIDER", clear=True):
        return problem(name)


TITLES: Mapping[Callable[[str], str], str] = {
    ids_outside: "Ids -1, -7, E and 99; a row of them alone",
    duplicates: "One expert in all four slots of 40 tokens",
    skipped_nan: "NaN in the weights, the x and the gradients of pairs that are skipped",
    no_tokens: "T = 0",
    experts_without_tokens: "Gradients of experts without tokens, written over sevens",
    accumulate_first: "accumulate=True in the first backward of a layer, gradients of 3 being there",
    accumulate_later: "accumulate=True after a backward that wrote to the same tensors",
    two_forwards: "Two forwards that save, then two backwards",
    two_forwards_depth_2: "Two forwards that save, then two backwards, with max_cache_depth=2",
    no_forward: "A backward without a forward that saved",
    two_layers: "Two layers that take turns: forward, forward, backward, backward",
    fewer_and_more_tokens: "T = 3, 80, 1 and 40 through one layer",
    threads: "One worker or two",
    updated_a: "All A multiplied by -1.5 in place, no call of update_lora_weights",
    updated_b: "All B multiplied by -1.5 in place, no call of update_lora_weights",
    not_finite: "NaN in one element of x",
    infinite: "Infinity in one element of x",
    scaling_zero: "scaling = 0",
    nan_scale: "NaN as a scale",
    odd_scale: "Scales that are no powers of two, 1.4140625 times one",
    too_many_tokens: "80 tokens where max_len is 32",
    hidden_48: "H = 48",
    low_gate: "One token whose lowest gate is -80, or -95",
    width_48: "I = 48",
    sizes_64: "H = I = 64",
}
"""Probe → what it looks at, as the table of kt_kernel.md says it."""
PROBES = {probe.__name__: probe for probe in (relative_errors, *TITLES)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *probes = sys.argv[1:]
    for probe in probes:
        print(f"\nseen: {PROBES[probe](name)}", flush=True)
