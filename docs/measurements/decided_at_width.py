"""How much of a correct kernel is decided at the dimensions of real models, and which faults are seen there.

    python3 docs/measurements/decided_at_width.py [--device cuda] [--out FILE]            # shares
    python3 docs/measurements/decided_at_width.py --residues [--workers 4] [--out FILE]   # shares of either oracle
    python3 docs/measurements/decided_at_width.py --faults [--device cuda] [--workers 14]

They ask by kind of input: random, of one sign, and exact; with `--residues`, random with gates of the size that the
forward pass gives. Layers are those of `cases/shapes.toml` with two experts, so
that they fit into memory; faults are those of `tests/faults`, their kernels declared without stages.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("random", "one sign", "exact")
LIKE_FORWARD = "like forward"
"""Random, with saved gates of the size that the forward pass gives of such weights."""
LAYERS = ("moe_lora", "moe_lora_backward")
OPS = (*LAYERS, "layer_norm_gated_backward")
STRANGE = 21  # a seed with which some ids are of no expert, and some experts get no token
PLAIN = ("exact", "balanced", "shards")  # options of the faults that are in no way to store codes
SCALING = {"random": 0.7, LIKE_FORWARD: 0.7, "one sign": 0.7, "exact": 0.75}


def layer(op: str, kind: str, sizes: Any, dtype: str, *, seed: int = 1, hostile: bool = False) -> Any:
    """Make a case of a layer. A hostile one has rows with gaps, experts elsewhere, old gradients, and NaN if random."""
    from lastbit.case import Case, TensorSpec
    from lastbit.cases._experts import BALANCED, EXACT, ONE_SIGN
    from lastbit.cases.moe_lora_backward import _REGIMES, _saved

    balanced = "random", LIKE_FORWARD
    forward = BALANCED if kind in balanced else {"one sign": ONE_SIGN, "exact": EXACT}[kind]
    backward = "balanced" if kind in balanced else kind.replace(" ", "_")
    regimes = forward if op == "moe_lora" else _REGIMES[backward]
    if kind == LIKE_FORWARD:  # `gates` go below -88.7, where exp overflows and a kernel may give 0 in place of 1e-39
        regimes = {**regimes, "saved_gate": ("normal",)}
    shapes = {"x": (sizes.tokens, sizes.hidden), **sizes.matrices(), **sizes.adapters()}
    if op == "moe_lora_backward":
        shapes |= {"grad_output": shapes["x"], **_saved(sizes)}
    known = sizes.experts * (2 if hostile else 1)
    ids = TensorSpec("expert_ids", "int64", sizes.pairs, regime=f"{'experts' if hostile else 'below'}_{known}")
    weights = TensorSpec("routing_weights", "fp32", sizes.pairs, regime=regimes["routing_weights"][0])
    tensors = [TensorSpec(n, dtype, shape, regime=regimes[n][0]) for n, shape in shapes.items()]
    if hostile:
        tensors = [padded(t) for t in tensors]
        if kind == "random":
            tensors[0] = replace(tensors[0], regime="special")
            weights = replace(weights, regime="special")
        if op == "moe_lora_backward":
            old = {f"old_{name}": shape for name, shape in sizes.adapters().items()}
            tensors += [TensorSpec(n, dtype, shape, regime=regimes[n][0]) for n, shape in old.items()]
    params = {"scaling": SCALING[kind]} | ({"first_expert": sizes.experts} if hostile else {})
    return Case(op, (tensors[0], ids, weights, *tensors[1:]), params, seed)


def padded(spec: Any) -> Any:
    """Put a gap behind every row of the tensor, where the op takes it in any layout."""
    if "lora" in spec.name:
        return spec
    strides = [1, spec.shape[-1] + 16]
    for size in reversed(spec.shape[1:-1]):
        strides.append(strides[-1] * size)
    return replace(spec, strides=tuple(reversed(strides)))


def norm(kind: str, shape: Mapping[str, Any], dtype: str, weight: str, *, gate: str = "") -> Any:
    """Make a case of the gradients of a gated norm with a shape of the table."""
    from lastbit.case import Case, TensorSpec
    from lastbit.cases import layer_norm_gated_backward as cases

    gate = gate or ("after" if shape["before"] else "before")
    one_sign = {"rstd": ("scale_random",), "mean": ("small",), **cases.ONE_SIGN[gate]}
    random = {**cases._ANY, "z": ("normal",), "weight": ("near_one",)}
    regimes = {"random": random, LIKE_FORWARD: random, "one sign": one_sign, "exact": cases._EXACT}[kind]
    rows, width = tuple(shape["rows"]), shape["width"]
    names = ("x", "dy") if gate == "none" else ("x", "dy", "z")
    tensors = [TensorSpec(n, dtype, (*rows, width), regime=regimes[n][0]) for n in names]
    vectors = ("weight", "bias") if shape.get("bias") else ("weight",)
    tensors += [TensorSpec(n, weight, (width,), regime=regimes[n][0]) for n in vectors]
    for name in ("rstd",) if shape["rms"] else ("rstd", "mean"):
        tensors.append(cases._statistics(name, (*rows, width), width // shape.get("group", width), regimes[name][0]))
    params = {"norm_before_gate": False} if gate == "before" else {}
    return Case("layer_norm_gated_backward", tuple(tensors), params, 1)


def cases_of(fault: Any, kind: str) -> list[Any]:
    """Return the cases that a fault is hunted with."""
    from lastbit.cases._experts import Sizes

    if fault.op == "layer_norm_gated_backward":
        return [hunted_norm(fault, kind)]
    sizes = Sizes(tokens=40, slots=2, experts=2, hidden=2048, intermediate=768, rank=8)  # more than 32 pairs for one
    sparse = replace(sizes, tokens=8, slots=3, experts=6)
    found = (
        layer(fault.op, kind, sizes, fault.dtypes[0]),
        layer(fault.op, kind, sparse, fault.dtypes[0], seed=STRANGE, hostile=True),
    )
    shards = {"shards": 2} if fault.options == "shards" else {}
    return [replace(case, params={**case.params, **shards}) for case in found]


def hunted_norm(fault: Any, kind: str) -> Any:
    """Spell a case of many rows with gaps between them, with the options that the fault needs."""
    gate = {"after": "after", "before": "before", "exact gated": "after"}.get(fault.options, "none")
    rms = fault.options in ("after", "before", "plain")
    weight = "fp32" if fault.options.startswith("exact") else fault.dtypes[0]
    shape = {"rows": [1200], "width": 512, "rms": rms, "bias": not rms, "group": 128 if gate == "before" else 512}
    case = norm(kind, shape, fault.dtypes[0], weight, gate=gate)
    params = case.params | ({} if gate == "before" else {"recompute_output": True})
    return replace(case, tensors=(*map(padded, case.tensors[:2]), *case.tensors[2:]), params=params)


def measured(case: Any, device: Any) -> dict[str, tuple[str, int, int, int]]:
    """Return result → format, elements, those decided seen from the inputs, those outside, of PyTorch's kernel."""
    from lastbit.judging.verdict import judge

    kernel, problem = problem_of(case, device)
    returned = kernel.call(**problem.tensors, **case.params)
    stages = judge(problem, returned, alternatives=False).stages
    return {
        s.name: (s.dtype, s.cumulative.numel, s.cumulative.decided, s.cumulative.outside) for s in stages if s.result
    }


def followed(case: Any, device: Any) -> dict[str, tuple[str, int, int, int]]:
    """Return result → format, elements, those that residues decide, those that they find of another formula."""
    from lastbit.judging.formula import compare_formulas
    from lastbit.shadows.following import follow

    kernel, problem = problem_of(case, device)
    own = {name: tensor.clone() for name, tensor in problem.tensors.items()}
    seen = follow(kernel, own, case.params, tuple(problem.trace.results), problem.constants)
    found = compare_formulas(problem, seen.results)
    formats = {name: problem.trace.stages[name].finished.format.name for name in found}
    return {name: (formats[name], one.numel, one.equal + one.differs, one.differs) for name, one in found.items()}


def problem_of(case: Any, device: Any) -> tuple[Any, Any]:
    """Return PyTorch's kernel of the op, and what it is to compute in a case."""
    from lastbit.calibrate import load_premises
    from lastbit.inputs import build
    from lastbit.judging.problem import Problem
    from tests.faults.hunt import clean_kernels, op_of

    kernel = next(k for k in clean_kernels() if k.op == case.op and k.name.startswith("eager[") and _fused(k))
    inputs, op = build(case, device).tensors, op_of(case.op)
    return kernel, Problem(op, op.contract(kernel.contract), inputs, case.params, load_premises(device))


def _fused(kernel: Any) -> bool:
    return kernel.contract in ("", "fused")


def layers(tokens: int) -> Iterator[tuple[str, Any]]:
    """Yield the layers of the table with two experts."""
    from lastbit.cases._experts import SHAPES, Sizes

    for shape in SHAPES:
        name = shape["model"].partition(" (")[0]
        slots = min(2, shape["slots"])
        yield (
            name,
            Sizes(min(tokens, shape["tokens"]), slots, 2, shape["hidden"], shape["intermediate"], shape["rank"]),
        )


def problems(tokens: int, ops: tuple[str, ...], wanted: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the op, what is measured, and a case of each kind."""
    from lastbit.cases.layer_norm_gated import SHAPES

    for name, sizes in layers(tokens):
        for op in LAYERS:
            if op in ops and wanted in name:
                where = f"{name}, {sizes.hidden} / {sizes.intermediate}"
                yield op, where, {kind: layer(op, kind, sizes, "bf16") for kind in (*KINDS, LIKE_FORWARD)}
    for shape in SHAPES if "layer_norm_gated_backward" in ops and not wanted else ():
        for weight in ("bf16", "fp32"):
            where = f"{' × '.join(map(str, shape['rows']))} rows, {shape['width']}, weight {weight}"
            yield (
                "layer_norm_gated_backward",
                where,
                {kind: norm(kind, shape, "bf16", weight) for kind in (*KINDS, LIKE_FORWARD)},
            )


COLUMNS: dict[str, tuple[str, Any]] = {kind: (kind, measured) for kind in KINDS}
RESIDUES: dict[str, tuple[str, Any]] = {
    "random": (LIKE_FORWARD, measured),
    "random, by residues": (LIKE_FORWARD, followed),
}


def shares_of(
    device: str, columns: dict[str, tuple[str, Any]], what: tuple[str, str, dict[str, Any]]
) -> tuple[str, str, dict[str, Any]]:
    """Return the op, what is measured, and what was found, by column; or the error."""
    import torch

    op, where, cases = what
    torch.set_num_threads(1)
    try:
        return (
            op,
            where,
            {name: measure(cases[kind], torch.device(device)) for name, (kind, measure) in columns.items()},
        )
    except Exception as error:
        return op, f"{where}: {type(error).__name__}: {error}", {}


def shares(device: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield the table of shares, line by line, and of all layers together."""
    columns = RESIDUES if options.residues else COLUMNS
    yield f"| op, result | layer | dtype | {' | '.join(columns)} |"
    yield "|---|---|---|" + "---|" * len(columns)
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    chosen = list(problems(options.tokens, tuple(options.op or OPS), options.layer))
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for op, where, found in pool.map(partial(shares_of, device, columns), chosen):
            if not found:
                yield f"{op} {where}"
            for result, (fmt, *_) in next(iter(found.values()), {}).items():
                cells = []
                for name in columns:
                    _, numel, decided, outside = found[name].get(result, (fmt, 0, 0, 0))
                    total = sums.setdefault((op, result, fmt, name), [0, 0])
                    total[0] += decided
                    total[1] += numel
                    share = f"{100 * decided / numel:.0f} %" if numel else "–"
                    cells.append(share + (f" {outside} OUTSIDE" if outside else ""))
                yield f"| {op} {result} | {where} | {fmt} | {' | '.join(cells)} |"
    for op, result, fmt in dict.fromkeys(key[:3] for key in sums):
        parts = [sums[op, result, fmt, name] for name in columns]
        cells = [f"**{100 * decided / max(numel, 1):.0f} %**" for decided, numel in parts]
        yield f"| **{op} {result}** | all | {fmt} | {' | '.join(cells)} |"


def seen(name: str, device_name: str) -> tuple[str, dict[str, bool]]:
    """Return which kinds of input show a fault at real width, the kernel's results alone being judged."""
    import torch

    from lastbit.calibrate import load_premises
    from lastbit.result import BAD
    from lastbit.verify.check import verify_case
    from tests.faults import hunt
    from tests.faults.catalogue import FAULTS
    from tests.faults.plant import planted

    torch.set_num_threads(1)
    device = torch.device(device_name)
    if device.type == "cpu":
        from lastbit.interpret import install

        install()
    fault = next(f for f in FAULTS if str(f) == name)
    with planted(fault) as kernel:
        subject = replace(hunt.subject_of(hunt.without_stages(kernel), device), premises=load_premises(device))
        found = {
            kind: any(verify_case(subject, case, repeat=False).verdict in BAD for case in cases_of(fault, kind))
            for kind in KINDS
        }
    return name, found


def faults(device: str, workers: int, ops: tuple[str, ...], part: str, only: list[str]) -> Iterator[str]:
    """Yield the table of faults that some kind misses, and how many each misses."""
    from tests.faults.catalogue import FAULTS

    chosen = [f for f in FAULTS if f.op in ops and not f.equivalent and (f.op not in LAYERS or f.options in PLAIN)]
    first, _, of = part.partition("/")
    names = [str(f) for f in chosen[int(first) :: int(of)] if not only or str(f) in only]
    yield f"| fault | {' | '.join(KINDS)} |"
    yield "|---|" + "---|" * len(KINDS)
    results = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name, found in pool.map(seen, names, [device] * len(names)):
            results.append((name, found))
            if not all(found.values()):
                yield f"| {name} | {' | '.join('seen' if found[kind] else 'missed' for kind in KINDS)} |"
    missed = {kind: sum(not found[kind] for _, found in results) for kind in KINDS}
    nowhere = [name for name, found in results if not any(found.values())]
    yield f"\nOf {len(results)} faults are missed: {', '.join(f'{n} by {kind}' for kind, n in missed.items())}; "
    yield f"by all three: {'; '.join(nowhere) or 'none'}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--residues", action="store_true", help="shares of both oracles, on the CPU")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="every so many faults, from this one on")
    parser.add_argument("--layer", default="", help="only layers whose model has this in its name")
    parser.add_argument("--fault", action="append", default=[], help="only this fault, such as 'moe_lora: NAME'")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT / "harness" / "checkout"), os.environ.get("PYTHONPATH")])
    )
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    ops = tuple(options.op or OPS)
    found = (
        faults(options.device, options.workers, ops, options.part, options.fault)
        if options.faults
        else shares(options.device, options)
    )
    lines = []
    for line in found:
        print(line, flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
