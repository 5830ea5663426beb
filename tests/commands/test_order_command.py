"""`lastbit order`: orders of kernels, what they declare, and orders that were kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import Group
from lastbit.cli import main
from lastbit.commands import order
from lastbit.commands.options import config_of as options_of
from lastbit.config import Config
from lastbit.errors import KernelError, OpError, UnsupportedCase, UsageError
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, Op, ProbedSum, StageRecorder, op
from lastbit.orders.form import form_of
from lastbit.orders.of_kernel import Probe, named, open_orders, order_of, sums_of
from lastbit.reports.order import Order, difference, from_json, print_order, to_json
from lastbit.reports.paper import make_console
from lastbit.verify.check import Subject
from lastbit.verify.declarations import check_op
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import Project
from lastbit.verify.worker import Workplace
from tests.correct_kernels.known_trees import chain, halves, lanes, neighbours
from tests.nested_trees import tree_of


def place_of(*kernels: str) -> Workplace:
    return open_orders(Config(folder="", kernels=kernels), lambda case: nullcontext(), lambda result: None)


# Kernels of this project


@pytest.mark.parametrize(
    ("kernel", "sum", "terms", "expected"),
    [
        ("triton[native_multiply+rounded_sum]", "squares", 32, neighbours(range(32))),
        ("triton[native_multiply+rounded_sum]", "squares", 21, neighbours(range(21))),
        ("triton[single_rounding]", "mean", 32, neighbours(range(32))),
        ("triton[single_rounding]", "squares", 32, neighbours(range(32))),
        ("eager[moe_lora+fused]", "gate", 32, chain(range(32))),
        ("eager[moe_lora+fused]", "up", 32, chain(range(32))),
        ("eager[moe_lora+fused]", "down", 32, chain(range(32))),
    ],
)
def test_order_is_that_of_the_source(kernel: str, sum: str, terms: int, expected: Any) -> None:
    """The interpreter pairs neighbours in a `tl.sum` over a block, which covers the row here."""
    place = place_of(kernel)
    assert sum in sums_of(place, kernel)
    found = order_of(place, Probe(kernel, sum, terms, 64, "bf16"))
    assert found.tree == tree_of(expected), found.reason
    assert found.exit_code == 0 and all(declared.kept for declared in found.declared)
    assert "bfloat16" in found.read


def test_eager_and_library_agree() -> None:
    names = "eager[fp32_multiply+rounded_sum]", "F.rms_norm"
    place = place_of(*names)
    eager, library = (order_of(place, Probe(name, "squares", 64, 64, "fp32")) for name in names)
    assert eager.tree is not None and eager.tree == library.tree
    assert difference(eager, library) == f"squares, N = 64: the same tree in {names[0]} and {names[1]}."


def test_sums_over_rows() -> None:
    """Of 64 columns: tiles of 8 rows, 4 of them one after the other in a part, and a tree over the parts by halves."""
    name = "triton[gated_backward]"
    place = place_of(name)
    parts = [neighbours([chain(range(part + row, part + 32, 8)) for row in range(8)]) for part in range(0, 128, 32)]
    for of in ("dw", "db"):
        found = order_of(place, Probe(name, of, 128, 64, "bf16"))
        assert found.tree == tree_of(halves(parts)), found.reason


# Kernels of a project


def _terms(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    return {"x": terms}


@op(
    rows=("x",),
    rounds={"output": "x"},
    sums={"total": ProbedSum(_terms, {"output": 0, "whole": 0}, dot=True, about="x of a row")},
)
def totals(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", stage("whole", x), result=True)


def kernel_of(call: Callable[..., Any], **declared: Any) -> Kernel:
    return Kernel("planted", "totals", "", call, **declared)


def found_of(kernel: Kernel, terms: int = 64, of: Op = totals) -> Order:
    subject = Subject(kernel, of, torch.device("cpu"))
    project = Project({of.name: of}, {}, (), (), {})
    place = Workplace(Config(folder=""), project, Plan((Item(subject, Group("g")),), (), 0))
    return order_of(place, Probe(kernel.name, next(iter(of.sums)), terms, 32, "bf16"))


def running(x: Tensor) -> Tensor:
    total, *rest = x.float().unbind(-1)
    for term in rest:
        total = total + term
    return total.to(x.dtype)


def backwards(x: Tensor) -> Tensor:
    return running(x.flip(-1))


@pytest.mark.parametrize(
    ("call", "declared", "kept"),
    [
        (running, {"depth": lambda n: n - 1}, True),
        (running, {"depth": lambda n: n - 2}, False),
        (running, {"order": 1}, True),
        (running, {"order": 16}, True),
        (backwards, {"order": 16}, False),
        (lambda x: running(x[:, :32]) + running(x[:, 32:]), {"order": 32}, True),
        (lambda x: running(x[:, :32]) + running(x[:, 32:]), {"order": 16}, False),
        (lambda x: running(x[:, ::2]) + running(x[:, 1::2]), {"order": 32}, False),
    ],
)
def test_declarations_are_held_against_the_tree(call: Any, declared: Mapping[str, Any], kept: bool) -> None:
    found = found_of(kernel_of(call, **declared))
    assert [d.kept for d in found.declared] == [kept]
    assert found.exit_code == int(not kept)


def test_broken_declaration_says_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_order(found_of(kernel_of(running, depth=lambda n: 6)), make_console())
    printed = " ".join(capsys.readouterr().out.split())
    assert "FAILED: depth= says that no term passes through more than 6 additions; 63 were found" in " ".join(
        printed.split()
    )


def test_order_that_is_not_walked_says_where() -> None:
    [declared] = found_of(kernel_of(backwards, order=16)).declared
    assert declared.said.endswith("none holds the first 16")


def test_a_reason_is_told_once_with_all_results_that_it_holds_for() -> None:
    def silent(x: Tensor, stages: tuple[str, ...] = ()) -> Any:
        nothing = torch.zeros(len(x))
        return {"output": nothing, "whole": nothing} if stages else nothing

    reason = found_of(kernel_of(silent, stages=("whole",))).reason
    assert reason.startswith("output and whole: no result shows") and reason.count("no result shows") == 1


def test_stage_is_read_where_the_result_shows_nothing() -> None:
    def silent(x: Tensor, stages: tuple[str, ...] = ()) -> Any:
        output = torch.zeros(len(x), dtype=x.dtype)
        return {"output": output, "whole": running(x.float())} if stages else output

    found = found_of(kernel_of(silent, stages=("whole",)))
    assert found.tree == tree_of(chain(range(64)))
    assert found.read == "whole (float32)" and any("output: no result shows" in note for note in found.notes)


def test_case_that_the_kernel_does_not_take() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise UnsupportedCase("rows of odd length only")

    found = found_of(kernel_of(refuses))
    assert found.tree is None and "rows of odd length only" in found.reason and found.exit_code == 3


def test_kernel_that_raises() -> None:
    def raises(x: Tensor) -> Tensor:
        raise ValueError("64 columns are too many")

    with pytest.raises(KernelError, match=r"ValueError with 64 terms in 32 rows.*64 columns are too many"):
        found_of(kernel_of(raises))


def test_kernel_that_needs_more() -> None:
    found = found_of(kernel_of(lambda x, scale: running(x)))
    assert "needs scale" in found.reason


def test_sum_that_names_no_stage() -> None:
    wrong = replace(totals, sums={"total": ProbedSum(_terms, {"outputs": 0})})
    with pytest.raises(OpError, match="'outputs' of its sum 'total'"):
        check_op(wrong)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"no kernel is called 'F\.rms_nrom', .*; did you mean 'F\.rms_norm'"):
        place_of("F.rms_nrom")
    with pytest.raises(UsageError, match=r"unknown sum of rms_norm 'square'; did you mean 'squares'"):
        sums_of(place_of("F.rms_norm"), "F.rms_norm", ("square",))
    with pytest.raises(UsageError, match="declares no sums"):
        sums_of(place_of("eager[completion_mask]"), "eager[completion_mask]")


# Kept and compared


def order_with(nested: Any, **changes: Any) -> Order:
    tree = tree_of(nested)
    found = Order("k", "o", "c", "cpu", "total", "x", tree.terms, 8, "bf16", tree=tree, form=form_of(tree))
    return replace(found, **changes)


def test_json_holds_everything_but_the_form() -> None:
    order = found_of(kernel_of(running, depth=lambda n: 6))
    [read] = from_json(to_json([order]), "a file")
    assert replace(read, form=order.form) == order


@pytest.mark.parametrize("text", ["[]", "no", '{"schema": 2}', '{"schema": 1, "orders": [{}]}'])
def test_file_without_orders(text: str) -> None:
    with pytest.raises(UsageError, match=r"bad\.json"):
        from_json(text, "bad.json")


def test_difference_names_the_level() -> None:
    four = order_with(chain([lanes_from(start, 16) for start in range(0, 64, 16)]), device="one")
    eight = order_with(chain([lanes_from(start, 8) for start in range(0, 64, 8)]), device="other")
    assert difference(four, eight) == (
        "total, N = 64: 4 blocks of 16 terms one after the other, at distance 16 (one); "
        "8 blocks of 8 terms one after the other, at distance 8 (other)."
    )
    deeper = order_with(chain([chain(range(start, start + 16)) for start in range(0, 64, 16)]), kernel="other")
    assert ", in each block of 16 terms: 4 lanes" in difference(four, deeper)


def lanes_from(start: int, size: int) -> Any:
    def moved(nested: Any) -> Any:
        return nested + start if isinstance(nested, int) else tuple(map(moved, nested))

    return moved(lanes(size, 4))


@pytest.mark.parametrize(("other", "code"), [(neighbours(range(8)), 0), (chain(range(8)), 1), (chain(range(9)), 3)])
def test_compare(other: Any, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "a.json", tmp_path / "b.json"
    for file, nested in zip(files, (neighbours(range(8)), other), strict=True):
        file.write_text(to_json([order_with(nested)]))
    assert main(["order", "--compare", *map(str, files)]) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert {0: "the same tree", 1: "8 terms one after the other", 3: "no sum of the same name"}[code] in " ".join(
        printed.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "no kernel is named"), (("--compare", "none.json", "none.json"), "No such file")],
)
def test_bad_command_line(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", *words]) == 2
    assert message in capsys.readouterr().err


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """In a worker process, as a user runs it."""
    assert main(["order", "F.rms_norm", "--columns", "16,32", "--rows", "32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [order["terms"] for order in document["orders"]] == [16, 32]
    assert all(order["environment"]["torch"] for order in document["orders"])


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), [("k", "a", 128, 256, "bf16"), ("k", "b", 128, 256, "bf16")]),
        (("--columns", "8,16", "--sum", "b"), [("k", "b", 8, 256, "bf16"), ("k", "b", 16, 256, "bf16")]),
        (("--rows", "3", "--dtype", "fp32", "--sum", "a"), [("k", "a", 128, 3, "fp32")]),
        (("--device", "cuda:0", "--sum", "a"), [("k", "a", 4096, 4096, "bf16")]),
    ],
)
def test_what_is_asked_of_a_kernel(
    words: tuple[str, ...],
    asked: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    probes: list[Probe] = []

    class Answering:
        """Stands in place of a worker, and answers with the names of a kernel and of its sums."""

        def __init__(self, config: Config, opening: object) -> None:
            assert config.kernels == ("k",)

        def __enter__(self) -> Answering:
            return self

        def __exit__(self, *_: object) -> None: ...

        def do(self, work: object, *args: Any) -> object:
            if work is named:
                return ["k"]
            if work is sums_of:
                return [name for name in "ab" if not args[1] or name in args[1]]
            probes.append(args[0])
            kernel, name, *rest = dataclasses.astuple(args[0])
            return Order(kernel, "rms_norm", "fp32_multiply", "cpu", name, "squares", *rest)

    def config_of(options: Any, **more: Any) -> Config:
        """Return a configuration with the device that is asked for, which need not be here."""
        asked_for, options.device = options.device, "cpu"
        made = options_of(options, **more)
        return replace(made, device_plan=replace(made.device_plan, devices=(asked_for,)))

    monkeypatch.setattr(order, "config_of", config_of)
    monkeypatch.setattr(order, "Worker", Answering)
    monkeypatch.setattr(order, "environment_of", lambda config: {"torch": "2"})
    main(["order", "k", "--json", *words])
    assert [dataclasses.astuple(probe) for probe in probes] == asked
    printed = json.loads(capsys.readouterr().out)["orders"]
    assert [(one["sum"], one["terms"], one["environment"]) for one in printed] == [
        (name, terms, {"torch": "2"}) for _, name, terms, _, _ in asked
    ]
