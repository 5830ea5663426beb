"""What no case reached: branches of Python and of interpreted programs, told by file and line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from lastbit.branches.branch_sites import merged, sites_of, unreached
from lastbit.branches.taken import TakenBranches, traced_call, watching
from lastbit.errors import UsageError
from lastbit.interpret import install
from lastbit.kernel import load_file
from lastbit.reports.coverage import said
from lastbit.run import DEVICE, ERROR, EXTENT, REFUSAL, Unreached

if triton.knobs.runtime.interpret:
    install()

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 was not set")


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    """Nobody traces this process meanwhile: under `nox -s coverage` somebody does."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


PYTHON = """\
import torch

WIDE = 8192


def norm(x, weight=None):
    n = x.shape[-1]
    if not n:
        raise ValueError("no columns")
    if n > WIDE:
        x = x.double()
    if x.is_cuda:
        return fast(x)
    try:
        size = int(n)
    except OverflowError:
        size = 0
    for _ in range(size - 64):
        x = x + 0
    return scaled(x, weight)


def scaled(x, weight):
    if (weight is None and
            x.dim() < 9):
        return x
    match x.dim():
        case 1:
            return x * weight
        case 2:
            return x * weight[None]
    return x


def fast(x):
    if x.dim() > 1:
        return x
    return x
"""


def load(folder: Path, text: str) -> tuple[Any, Path]:
    path = folder / "norms.py"
    path.write_text(text)
    return load_file(path), path


def seen(path: Path, *calls: Callable[[], object], kernel: str = "norm") -> tuple[Unreached, ...]:
    with watching(kernel, path) as taken:
        for call in calls:
            sys.settrace(None)  # whom ours has sent away is back after each call
            with traced_call():
                call()
    found = unreached({kernel: taken.decisions()}, len)
    assert found is not None
    return found


def told(found: tuple[Unreached, ...]) -> dict[str, tuple[str, str]]:
    return {f"{one.line} {one.text}": (one.never, one.why) for one in found}


def test_a_branch_of_python_that_no_call_took_is_told(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    found = seen(path, lambda: module.norm(torch.ones(2, 8)), lambda: module.norm(torch.ones(8), torch.ones(8)))
    assert told(found) == {
        "8 if not n": ("true", REFUSAL),
        "10 if n > WIDE": ("true", ""),
        "12 if x.is_cuda": ("true", DEVICE),
        "16 except OverflowError": ("caught", ERROR),
        "18 for _ in range(size - 64)": ("ran", ""),
        "30 case 2": ("matched", ""),
    }, "what is in `fast` is behind a branch that is told"
    assert {one.function for one in found} == {"norm", "scaled"}
    assert said(found[1]).endswith("norms.py:10 `if n > WIDE` was never true (1 case)")


def test_a_branch_that_some_call_took_is_not_told(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    wide, matrix = torch.ones(1, 8193), torch.ones(2, 70)
    with pytest.raises(ValueError, match="no columns"):
        seen(path, lambda: module.norm(torch.ones(2, 0)))
    found = seen(path, lambda: module.norm(wide), lambda: module.norm(matrix, matrix[0]))
    lines = {one.line for one in found}
    assert lines == {12, 16, 28}, "what raised is one of this kernel's calls, too"


def test_only_what_handles_inputs_decides(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    with watching("strict", path) as taken, traced_call():
        module.norm(torch.ones(2, 8))
    found = unreached({"strict": taken.decisions()}, len, decides=True)
    assert {one.line for one in found or () if one.decides} == {10, 18, 24}


def test_what_a_case_must_have_to_reach_a_branch(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    found = {one.line: one.wanted for one in seen(path, lambda: module.norm(torch.ones(2, 8)), kernel="wanted")}
    assert found[10] == "n > WIDE, where n = x.shape[-1]"
    assert found[24] == "not (weight is None and x.dim() < 9)"
    assert found[18] == ""


def test_a_case_that_matches_nothing_and_a_condition_of_two_lines(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    found = told(seen(path, lambda: module.norm(torch.ones(2, 8)), kernel="other"))
    assert found["24 if weight is None and x.dim() < 9"] == ("false", "")
    assert "28 case 1" not in found, "nobody came to the match"


PROGRAMS = """\
import torch
import triton
import triton.language as tl


@triton.jit
def doubled(x, TWICE: tl.constexpr):
    if TWICE:
        x = x * 2
    return x


@triton.jit
def program(x_ptr, y_ptr, n, BLOCK: tl.constexpr, TWICE: tl.constexpr, WIDE: tl.constexpr):
    total = 0.0
    for start in range(BLOCK, n, BLOCK):
        total += tl.load(x_ptr + start)
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    largest = tl.max(x, 0)
    if largest > 100:
        x = x * 0.5
    if WIDE and \\
            n > 64:
        x = x + 1
    x = x * (2.0 if WIDE else 1.0)
    tl.store(y_ptr + tl.arange(0, BLOCK), doubled(x, TWICE) + total)


def norm(x, twice=False):
    y = torch.empty_like(x)
    program[(1,)](x, y, x.numel(), BLOCK=8, TWICE=twice, WIDE=False)
    if twice:
        return y
    return y * 1
"""


@interpreted
def test_a_branch_of_a_program_that_no_launch_took_is_told(tmp_path: Path) -> None:
    module, path = load(tmp_path, PROGRAMS)
    x = torch.ones(8)
    found = seen(path, lambda: module.norm(x), lambda: module.norm(x))
    constexpr = {"8 if TWICE": ("true", ""), "23 if WIDE": ("true", "")}
    never = {"16 for start in range(BLOCK, n, BLOCK)": ("ran", ""), "20 if largest > 100": ("true", "")}
    assert {key: told(found)[key] for key in never} == never
    assert told(found) == never | {
        "8 if TWICE": ("true", ""),
        "22 if WIDE and \\ n > 64": ("true", ""),
        "25 if WIDE": ("true", ""),
        "32 if twice": ("true", ""),
    }, constexpr
    wide, large = torch.ones(16), torch.full((8,), 200.0)
    reached = seen(path, *(lambda x=x: module.norm(x, twice=True) for x in (wide, large)), kernel="wide")
    assert {one.line for one in reached if not one.why} == {8, 22, 25, 32}
    assert {one.line: one.never for one in reached}[8] == "false"


MASKED = """\
import torch
import triton
import triton.language as tl


@triton.jit
def program(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < n
        x = tl.load(x_ptr + i, mask=inside, other=0.0)
        x += tl.load(x_ptr, start >= 0, 0.0)
        tl.store(y_ptr + tl.program_id(0) * n + i, x, inside & (tl.program_id(0) < 2))


def norm(x):
    y = torch.empty(3, x.numel())
    program[(3,)](x, y, x.numel(), BLOCK=8)
    return y
"""


@interpreted
@pytest.mark.parametrize("early", [False, True])
def test_masks_and_loops_of_programs_are_told_besides(tmp_path: Path, early: bool) -> None:
    """They are looked at in every program, also in many that run together from a tape that is there already."""
    module, path = load(tmp_path, MASKED)
    x = torch.ones(200)
    if early:
        module.norm(x[:8])
        module.norm(x[:20])
    found = {one.text: (one.never, one.why) for one in seen(path, lambda: module.norm(x[:8]), kernel="8")}
    once = {"mask=inside": ("false", EXTENT)}
    if not early:  # of a tape, all that its programs did counts
        once["for start in range(0, n, BLOCK)"] = ("ran twice", EXTENT)
    partly = {"mask=inside & (tl.program_id(0) < 2)": ("partly true", EXTENT)}
    assert found == once | partly | {"mask=start >= 0": ("false", EXTENT)}
    found = {one.text: (one.never, one.why) for one in seen(path, lambda: module.norm(x[:20]), kernel="20")}
    assert found == {"mask=start >= 0": ("false", EXTENT)}


@interpreted
def test_a_launch_from_a_tape_goes_the_ways_of_its_tape(tmp_path: Path) -> None:
    """Python runs a program of a kind once, perhaps where nobody watched, and for another kernel."""
    module, path = load(tmp_path, PROGRAMS)
    module.norm(torch.full((16,), 200.0), twice=True)
    found = seen(path, lambda: module.norm(torch.full((16,), 200.0), twice=True), kernel="second")
    assert {one.line: one.never for one in found if one.function == "program" and not one.why}.keys() == {20, 22, 25}
    assert {one.never for one in found if one.line == 20} == {"false"}


@interpreted
def test_programs_are_not_traced_and_python_after_them_is(tmp_path: Path) -> None:
    module, path = load(tmp_path, PROGRAMS)
    tracers: list[object] = []
    module.program.add_pre_run_hook(lambda *_, **__: tracers.append(sys.gettrace()))
    found = seen(path, lambda: module.norm(torch.ones(8), twice=True))
    assert tracers == [None]
    assert {one.line: one.never for one in found}[32] == "false"


def test_another_tracer_is_left_alone_and_nothing_is_known(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    lines: list[int] = []

    def other(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename == str(path):
            lines.append(frame.f_lineno)
        return other

    with watching("norm", path) as taken:
        sys.settrace(other)
        try:
            with traced_call():
                module.norm(torch.ones(2, 8))
            assert sys.gettrace() is other
        finally:
            sys.settrace(None)
    assert 10 in lines
    assert not taken.known
    told = merged([("other", []), ("norm", None)])
    assert told is None
    assert unreached(told, len) is None


def test_what_workers_tell_is_merged(tmp_path: Path) -> None:
    module, path = load(tmp_path, PYTHON)
    told: list[tuple[str, list[Any]]] = []
    for worker, shape in (("a", (2, 8)), ("b", (1, 8193))):
        sys.settrace(None)
        with watching(worker, path) as taken, traced_call():
            module.norm(torch.ones(shape))
        told += [(worker, [list(one) for one in taken.decisions()]), (worker, [])]
    found = unreached(merged(told), len)
    assert found is not None
    assert 10 not in {one.line for one in found}
    assert {one.kernels for one in found if one.line == 8} == {("a", "b")}


def test_files_of_others_are_not_the_kernels(tmp_path: Path) -> None:
    own = TakenBranches("norm", tmp_path / "kernels" / "norms.py")
    beside, installed = tmp_path / "kernels" / "a.py", tmp_path / "kernels" / "site-packages" / "b.py"
    harness = Path(sys.modules[TakenBranches.__module__].__file__ or "")
    own.add((str(path), 1, 0, 1) for path in (beside, installed, tmp_path / "c.py", harness))
    assert {Path(file) for file, *_ in own.decisions()} == {beside}


def test_a_package_that_is_named_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    for name in ("adapted", "other"):
        (installed / name).mkdir(parents=True)
        text = f"def {name}(n):\n    if n > 8192:\n        n = 1\n    return n\n"
        (installed / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(installed)
    own = tmp_path / "kernels"
    own.mkdir()
    module, path = load(own, "import adapted, other\n\n\ndef norm(n):\n    return other.other(adapted.adapted(n))\n")
    seen_in = {}
    for packages in ((), ("adapted",)):
        sys.settrace(None)
        with watching("norm", path, packages) as taken, traced_call():
            module.norm(64)
        seen_in[packages] = [Path(one.file) for one in unreached({"norm": taken.decisions()}, len) or ()]
    assert seen_in == {(): [], ("adapted",): [installed / "adapted" / "__init__.py"]}
    with pytest.raises(UsageError, match="there is no installed package 'adaptad' to watch"):
        TakenBranches("norm", path, ("adaptad",))


def test_sites_are_in_functions_and_have_ways() -> None:
    sites = sites_of(__file__)
    assert any(site.function == "test_another_tracer_is_left_alone_and_nothing_is_known.other" for site in sites)
    assert not [site for site in sites if site.text.startswith("if triton.knobs")], "of the module itself"
    assert sites_of("no such file") == ()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_compiler_is_imported_before_the_calls_of_kernels_that_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """The import takes seconds, and more in a call that is traced; a kernel beside one that is compiled needs none."""
    imported: list[str] = []
    monkeypatch.setattr("lastbit.branches.taken.import_module", imported.append)
    _, path = load(tmp_path, f"{PYTHON}\n\ncompiled = torch.compile(norm)\n")
    with watching("norm", path, compiles=compiles):
        assert bool(imported) is compiles
