"""The whole numbers in the source of a kernel that may be sizes on which it branches."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lastbit.branches import size_constants as module
from lastbit.branches.size_constants import SizeConstants, size_constants, with_inner_code
from lastbit.kernel import load_kernels

SOURCE = """\
import triton
import triton.language as tl
from lastbit import kernel

WIDE = 1 << 13
NARROW: tl.constexpr = tl.constexpr(48)


class Plan:
    limit = 24

    def rows(self, n):
        return n // 20


@triton.jit
def program(x_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        if n % NARROW == 0:
            pass


def launch(x, block=384, *, warps=5):
    tiles = 640
    program[(Plan().rows(3),)](x, x.shape[-1], BLOCK=512)
    return x[:, :77] if x.shape[0] > 2 * tiles else x


@kernel("rms_norm")
def norm(x, weight, *, eps):
    if x.shape[-1] > WIDE or x.shape[0] in (30, 31) or Plan.limit < len(x):
        return launch(x)
    return min(x, 1000)


def other(x):
    return x.shape[0] > 12345
"""


def test_numbers_of_the_functions_that_a_kernel_reaches_may_be_sizes(tmp_path: Path) -> None:
    file = tmp_path / "norm.py"
    file.write_text(SOURCE)
    [kernel] = load_kernels(file)
    found = size_constants(kernel.call, kernel.source)
    assert {8192, 30, 31, 24, 1000, 1280, 48, 77} <= set(found.compared)
    assert {384, 5, 512, 20} <= set(found.blocks)
    assert 12345 not in {*found.compared, *found.blocks}
    assert size_constants(len, "") == SizeConstants()


def run(text: str, folder: Path, **known: Any) -> tuple[dict[str, Any], Path]:
    """Write a file, and execute it with what is already known in it."""
    folder.mkdir(exist_ok=True)
    file = folder / "kernel.py"
    file.write_text(text)
    names = dict(known)
    exec(compile(text, str(file), "exec"), names)
    return names, file


def of_text(text: str, folder: Path, **known: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the function `entry`: compared, and blocks."""
    names, file = run(text, folder, **known)
    found = size_constants(names["entry"], f"{file}:1")
    return found.compared, found.blocks


@pytest.mark.parametrize(
    ("expression", "compared", "blocks"),
    [
        ("n > 100", (100,), ()),
        ("100 < n <= 200", (100, 200), ()),
        ("n == 1", (), ()),
        ("n == 2", (2,), ()),
        ("n < 1 << 24", (1 << 24,), ()),
        ("n < (1 << 24) + 1", (), ()),
        ("n < -5", (), ()),
        ("n > True", (), ()),
        ("n > 2.5", (), ()),
        ("n + 30", (), ()),
        ("n % 48", (48,), ()),
        ("48 % n", (), ()),
        ("n // 20", (), (20,)),
        ("n >> 0", (), ()),
        ("n >> 1", (), (2,)),
        ("n >> 5", (), (32,)),
        ("n >> 24", (), (1 << 24,)),
        ("n >> 25", (), ()),
        ("n >> 32", (), ()),
        ("x[3:77:5]", (3, 77), (5,)),
        ("x[:9]", (9,), ()),
        ("f(n, 40, k=50)", (), (40, 50)),
        ("min(n, 1000)", (1000,), ()),
        ("max(1001, n)", (1001,), ()),
        ("x.clamp(max=30)", (30,), ()),
        ("x.minimum(31)", (31,), ()),
        ("x.maximum(32)", (32,), ()),
        ("x.round(33)", (), (33,)),
        ("f(n > 40, 40)", (40,), ()),  # each once, and compared if it is
        ("n in (30, 31)", (30, 31), ()),
        ("n in [32, 33]", (32, 33), ()),
        ("n in {34}", (34,), ()),
        ("n > (5 if x else 6)", (5, 6), ()),
        ("n > 4 * f", (4,), ()),
        ("n > f * (5, 6)", (5, 6), ()),
        ("n > 4 * 128", (512,), ()),
        ("n > 4 + f", (), ()),
        ("n > 10 + 3", (13,), ()),
        ("n > 10 - 3", (7,), ()),
        ("n > 21 // 2", (10,), (2,)),
        ("n > 21 // 0", (), ()),
        ("n > 21 / 2", (), ()),
        ("n > 2 ** 10", (1024,), ()),
        ("n > 3 ** 2", (9,), ()),
        ("n > 16 ** 2", (256,), ()),
        ("n > 17 ** 2", (), ()),
        ("n > 0 ** 0", (), ()),
        ("n > 5 ** 0 + 1", (2,), ()),
        ("n > 2 ** -1", (), ()),
        ("n > 2 ** 32 - 2 ** 32 + 5", (), ()),
        ("n > 2 ** 31 - 2 ** 31 + 5", (5,), ()),
        ("n > 1 << 13", (8192,), ()),
        ("n > 2 << 3", (16,), ()),
        ("n > 3 << 4", (48,), ()),
        ("n > 40 << 2", (160,), ()),
        ("n > 7 << 0", (7,), ()),
        ("n > (1 << 32) - (1 << 32) + 5", (), ()),
        ("n > (1 << 31) - (1 << 31) + 5", (5,), ()),
        ("n > 1 << -1", (), ()),
        ("x[(1, 2, 3, 4, 5, 6, 7)]", (), ()),
        ("x[(1, 2, 3, 4, 5, 6, 7, 8)]", (8,), ()),
        ("[(1, 2)] + [1.5, 2, 3, 4, 5, 6, 7, (8, 9), 10]", (9,), ()),
        ("{1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1}", (10,), ()),
        ("['a', 2, 3, 4, 5, 6, 7, 8]", (), ()),
        ("[n, 2, 3, 4, 5, 6, 7, 8]", (), ()),
    ],
)
def test_numbers_of_an_expression(
    expression: str, compared: tuple[int, ...], blocks: tuple[int, ...], tmp_path: Path
) -> None:
    assert of_text(f"def entry(n, x, f):\n    return {expression}\n", tmp_path) == (compared, blocks)


class constexpr:
    """Stands for Triton's."""

    def __init__(self, value: object) -> None:
        self.value = value


class Sizes:
    """Has a limit."""

    limit = 24
    flag = True


KNOWN = {
    "WIDE": 300,
    "FLAG": True,
    "RATIO": 2.0,
    "HELD": constexpr(48),
    "HELD_FLAG": constexpr(True),
    "Sizes": Sizes,
    "plan": Sizes(),
    "sys": ModuleType("sizes"),
    "TABLE": tuple(range(11)),
    "BY_NAME": dict.fromkeys("abcdefghi", 3),
    "NAMES": list("abcdefghi"),
    "FEW": [1, 2],
}
KNOWN["sys"].MOST = 600  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "compared", "blocks"),
    [
        ("return n > WIDE", (300,), ()),
        ("return n > 2 * WIDE", (600,), ()),
        ("return n > FLAG + 5", (), ()),
        ("return n > RATIO", (), ()),
        ("return n > HELD", (48,), ()),
        ("return n > HELD_FLAG", (), ()),
        ("return n > UNKNOWN", (), ()),
        ("return n > Sizes.limit", (24,), ()),
        ("return n > Sizes.flag", (), ()),
        ("return n > Sizes.other", (), ()),
        ("return n > plan.limit", (), ()),  # of an object nothing is looked at
        ("return n > sys.MOST", (600,), ()),
        ("return n > block", (), (384,)),  # a parameter, whatever its default
        ("return n > x.limit", (), (384,)),
        ("t = 640\n    return n > t", (640,), ()),
        ("WIDE = 7\n    return n > WIDE", (7,), ()),
        ("t = 640\n    return n > 2 * t", (1280,), (640,)),
        ("t = n\n    return n > t", (), ()),
        ("return x[TABLE[n]]", (11,), ()),
        ("return BY_NAME[n]", (9,), ()),
        ("return NAMES[n] + FEW[n]", (), ()),
    ],
)
def test_names_stand_for_numbers(body: str, compared: tuple[int, ...], blocks: tuple[int, ...], tmp_path: Path) -> None:
    parameters = "n, x, block=384" if blocks == (384,) else "n, x"
    assert of_text(f"def entry({parameters}):\n    {body}\n", tmp_path, **KNOWN) == (compared, blocks)


def test_a_parameter_hides_a_number_of_the_module(tmp_path: Path) -> None:
    for parameters in ("n, WIDE, TABLE", "n, WIDE, TABLE, /", "n, *, WIDE, TABLE"):
        text = f"def entry({parameters}):\n    return n > WIDE or TABLE[n]\n"
        assert of_text(text, tmp_path, **KNOWN) == ((), ())
        size_constants.cache_clear()
        module._functions.cache_clear()


def test_defaults_are_blocks(tmp_path: Path) -> None:
    text = "def entry(n, block=128, *, warps=4, stages, other=None):\n    return n\n"
    assert of_text(text, tmp_path) == ((), (128, 4))


# Which functions are read

REACHED = """\
import functools


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args) if args[0] > 1001 else None

    return inner


def plain(n):
    return n > 1002


@decorated
def wrapped(n):
    return n > 1003


class Plan:
    def method(self, n):
        return n > 1004

    @staticmethod
    def static(n):
        return n > 1005

    @classmethod
    def of(cls, n):
        return n > 1006

    @property
    def size(self):
        return self.n > 1007


async def later(n):
    return n > 1008


part = functools.partial(plain)


def make(closed):
    def closing(n):
        return closed(n) and n > 1009

    return closing


def unnamed(n):
    return n > 1010


def recursive(n):
    return recursive(n - 1) or n > 1011
"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return n", ()),
        ("return plain(n)", (1002,)),
        ("return wrapped(n)", (1001, 1003)),
        ("return Plan()", (1004, 1005, 1006, 1007)),
        ("return later(n)", (1008,)),
        ("return part(n)", (1002,)),
        ("return made(n)", (1002, 1009)),
        ("return recursive(n)", (1011,)),
        ("return [plain(one) for one in n]", (1002,)),
        ("return lambda: plain(n)", (1002,)),
        ("return here.later(n)", (1008,)),
        ("return outside(n)", ()),
    ],
)
def test_functions_that_are_reached_by_name(body: str, found: tuple[int, ...], tmp_path: Path) -> None:
    outside, _ = run("def outside(n):\n    return n > 2000\n", tmp_path / "elsewhere")
    text = f"{REACHED}\nmade = make(plain)\n\n\ndef entry(n):\n    {body}\n"
    names, file = run(text, tmp_path / "own", outside=outside["outside"], __name__="own")
    here = ModuleType("here")
    vars(here).update(names)
    names["here"] = here
    constants = size_constants(names["entry"], f"{file}:1")
    assert (sorted(constants.compared), constants.blocks) == (sorted(found), ())


@pytest.mark.parametrize("name", ["func", "fn", "__wrapped__", "_torchdynamo_orig_callable"])
def test_what_wraps_a_function_is_looked_through(name: str, tmp_path: Path) -> None:
    class Wrapper:
        def __call__(self, n: int) -> int:
            return n

    names, file = run("def entry(n):\n    return n > 77\n", tmp_path)
    wrapper = Wrapper()
    setattr(wrapper, name, names["entry"])
    assert size_constants(wrapper, f"{file}:1") == SizeConstants((77,))
    setattr(wrapper, name, 5)
    assert size_constants(functools.partial(wrapper), f"{file}:1") == SizeConstants()


def test_without_source_nothing_is_known(tmp_path: Path) -> None:
    names, file = run("def entry(n):\n    return n > 77\n", tmp_path)
    assert size_constants(names["entry"], "") == SizeConstants()
    assert size_constants(len, f"{file}:1") == SizeConstants()
    file.unlink()
    assert size_constants(names["entry"], f"{file}:2") == SizeConstants()
    module._functions.cache_clear()
    file.write_text("def entry(n:")
    assert size_constants(names["entry"], f"{file}:3") == SizeConstants()


def test_a_cell_that_is_still_empty_is_nothing() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return later, known

        known = 5
        found = module._cells(inner)
        later = 6
        return found, module._cells(inner), later

    assert outer() == ({"known": 5}, {"known": 5, "later": 6}, 6)
    assert module._cells(len) == {}


def test_code_within_code() -> None:
    def outer() -> Any:
        def inner() -> Any:
            return lambda: None

        return inner

    assert [code.co_name for code in with_inner_code(outer.__code__)] == ["outer", "inner", "<lambda>"]
