"""Cases in which one dimension after the other is long, or of a size that the kernel's source names.

`cases/sizes/OP.txt` has templates: case lines in which the dimensions of tensors are names.

    rms_norm T=2..2111..70001 N=16..40009 x=bf16[T,N] weight=bf16[N] eps=1e-06
    rotary T=3..1103 D=16..520/2 P=5..5003 q=bf16[T,1,D] cos=fp32[P,D/2] sin=fp32[P,D/2] positions=int64[T]:below_{P}

`T=4..2112..70004/4` is a dimension: 4 where another one is looked at, at most 2112 where a CPU takes part and 70004 on
an accelerator, always a multiple of 4. On a CPU it passes a number of the kernel's source that no dimension reaches, up
to 70004, in narrower tensors. Shapes may have products and quotients of dimensions, and so may the rest of a line in
braces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from lastbit.branches.size_constants import SizeConstants
from lastbit.case import Case, parse_case
from lastbit.errors import UsageError
from lastbit.kernel import Kernel
from lastbit.takes import options_of
from lastbit.verify.case_files import parsed
from lastbit.verify.narrowing import fitted
from lastbit.verify.project import Project

# Measured on one core: 360 cases of the 59 functions of lastbit's kernels take 65 s, 24 of one from 0.5 to 8 s.
# With 96 for four functions they were a quarter of the time of `--op cross_entropy`.
_CASES_OF_A_RUN, _FEWEST, _MOST = 48, 6, 24
"""Sized cases that the functions of a run have together, and how many each has at least and at most."""

# Arbitrary: cases of so many elements take hardly longer than smaller ones; with more, several dimensions are long.
_PACKED = 1 << 15
"""Elements of all tensors up to which another dimension takes a new size in the same case."""

# Arbitrary: 131 queries do not meet 401 keys, whose scores are no tensor of the case; in seven sequences they took 7 s.
_GROWN = 1 << 9
"""How many times all dimensions together become longer than narrow, where several take new sizes."""

# Measured: a Triton kernel takes 65,537 rows of three columns in 2 s on one core, interpreted.
_LARGEST = 1 << 18
"""Elements up to which two dimensions together, or one beyond its longest, reach a number that no dimension reaches."""

# Arbitrary: the next ones are longer still, or shorter by a little.
_TRIES = 6
"""Sizes of a dimension that are tried beside those of another one."""

# Arbitrary: drawn cases have all smaller sizes, and sources have many small numbers that are no sizes.
_SMALL = 8

_DIMENSION = re.compile(r"(?P<name>[A-Z]\w*)=(?P<narrow>\d+)\.\.(?P<long>\d+)(\.\.(?P<longer>\d+))?(/(?P<step>\d+))?")
_SHAPE = re.compile(r"\[([^\]]+)\]")
_BRACES = re.compile(r"\{([^}]+)\}")
_NUMBER = re.compile(r"[\d.e-]+")
_FACTOR = re.compile(r"(?P<sign>^|[*/])(?P<factor>\w+)")

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class _Dimension:
    """The sizes of a dimension: `narrow` where others are long, up to `longest`, in steps, of a kernel `among` some.

    Up to `farthest` in a case that is narrow otherwise, beyond a number that no dimension reaches.
    """

    narrow: int
    longest: int
    step: int = 1
    among: Collection[object] | None = None
    farthest: int = 0

    def has(self, size: int, *, far: bool = False) -> bool:
        inside = 1 <= size <= (self.farthest if far else self.longest) and size % self.step == 0
        return inside and (self.among is None or size in self.among)

    def within(self, among: Collection[object]) -> _Dimension | None:
        """Return the dimension with those of its sizes that are among some; None if there are none."""
        sizes = sorted(size for size in among if isinstance(size, int) and self.has(size))
        if not sizes:
            return None
        narrow = next((size for size in sizes if size >= self.narrow), sizes[-1])
        return replace(self, narrow=narrow, longest=sizes[-1], among=among)


@dataclass(frozen=True)
class Template:
    """A case line whose tensors have named dimensions."""

    line: str
    dimensions: Mapping[str, _Dimension]

    def case(self, sizes: Sizes, seed: int = 0) -> Case:
        """Make the case of some sizes; the other dimensions are narrow."""
        known = {name: sizes.get(name, own.narrow) for name, own in self.dimensions.items()}
        line = _SHAPE.sub(
            lambda found: f"[{','.join(str(_value(part, known)) for part in found[1].split(','))}]", self.line
        )
        line = _BRACES.sub(lambda found: str(_value(found[1], known)), line)
        return parse_case(f"{line} seed={seed}")

    def elements(self, sizes: Sizes) -> int:
        """Return how many elements all tensors of the case of some sizes have."""
        known = {name: sizes.get(name, own.narrow) for name, own in self.dimensions.items()}
        return sum(math.prod(_value(part, known) for part in shape) for shape in self.shapes)

    def is_narrow(self, sizes: Sizes) -> bool:
        """Return whether the case of some sizes is small enough for several of them."""
        grown = math.prod(max(1, size / self.dimensions[name].narrow) for name, size in sizes.items())
        return grown <= _GROWN and self.elements(sizes) <= _PACKED

    def longest(self, name: str) -> int:
        """Return how long a dimension is that is not beyond its longest; 0 if there is none of that name."""
        return self.dimensions[name].longest if name in self.dimensions else 0

    def reached(self, sizes: Sizes) -> dict[str, int]:
        """Return sizes, with less of the other dimensions if one is beyond its longest; none if no case has them."""
        if not all(n in self.dimensions and self.dimensions[n].has(size, far=True) for n, size in sizes.items()):
            return {}
        known = dict(sizes)
        if self.has(sizes):
            return known
        others = [name for name in self.dimensions if name not in sizes]
        for name in sorted(others, key=lambda name: -self.dimensions[name].narrow):
            own, elements = self.dimensions[name], self.elements(known)
            size = max(1, own.narrow * _LARGEST // elements // own.step) * own.step
            if elements > _LARGEST and own.has(size):
                known[name] = size
        return known if self.elements(known) <= _LARGEST else {}

    def has(self, sizes: Sizes) -> bool:
        """Return whether each of the sizes is one of a dimension here."""
        return all(name in self.dimensions and self.dimensions[name].has(size) for name, size in sizes.items())

    def dimension_of(self, tensor: str, place: int) -> str:
        """Return the name of a tensor's dimension; empty where it is not one alone, or there is none."""
        shape = re.search(rf" {tensor}=\w+\[([^\]]+)\]", self.line)
        parts = shape[1].split(",") if shape else []
        return parts[place] if -len(parts) <= place < len(parts) and parts[place] in self.dimensions else ""

    def equal(self, name: str, other: str) -> Template:
        """Return the template with another dimension in the place of one."""
        line = _SHAPE.sub(lambda found: re.sub(rf"\b{name}\b", other, found[0]), self.line)
        line = _BRACES.sub(lambda found: re.sub(rf"\b{name}\b", other, found[0]), line)
        return Template(line, {own: sizes for own, sizes in self.dimensions.items() if own != name})

    @cached_property
    def shapes(self) -> list[list[str]]:
        """The dimensions of each tensor as they are written, the first tensor's first."""
        return [found[1].split(",") for found in _SHAPE.finditer(self.line)]


def templates_of(project: Project, op: str, *, small: bool) -> list[Template]:
    """Return the templates of an op, for runs that a CPU takes part in or for others; none of one without a file."""
    files = [folder / "cases" / "sizes" / f"{op}.txt" for folder in project.folders]
    return [one for file in files if file.is_file() for one in read_templates(file, small=small)]


def read_templates(path: Path, *, small: bool) -> list[Template]:
    """Read the templates of a file.

    Raises:
        UsageError: a line is no template; the message has its number.
    """

    def template(line: str) -> Template:
        words, dimensions = [], {}
        for word in line.split():
            if (found := _DIMENSION.fullmatch(word)) is None:
                words.append(word)
                continue
            narrow, step = int(found["narrow"]), int(found["step"] or 1)
            far = int(found["longer"] or found["long"])
            longest = int(found["long"]) if small else far
            own = _Dimension(narrow, longest // step * step, step, farthest=far // step * step)
            if not own.has(narrow):
                raise UsageError(f"{word!r} must begin with a multiple of {step} from 1 to {longest}")
            dimensions[found["name"]] = own
        made = Template(" ".join(words), dimensions)
        made.case({})
        return made

    return parsed(path.read_text(encoding="utf-8"), path, template)


def _value(expression: str, sizes: Sizes) -> int:
    """Compute products and quotients of dimensions and numbers: `G*W`, `2*N`, `D/2`."""
    if expression in sizes:
        return sizes[expression]
    parts = list(_FACTOR.finditer(expression))
    if "".join(part[0] for part in parts) != expression:
        raise UsageError(f"cannot read {expression!r}: expected dimensions and numbers with * or / between them")
    value = 1
    for part in parts:
        name = part["factor"]
        if not name.isdigit() and name not in sizes:
            raise UsageError(f"dimension {name!r} is not declared; write {name}=NARROW..LONGEST before the tensors")
        factor = int(name) if name.isdigit() else sizes[name]
        value = value // factor if part["sign"] == "/" else value * factor
    return value


@dataclass(frozen=True)
class Sized:
    """The sized cases of a kernel, and the numbers of its comparisons beside which no dimension has a case."""

    cases: tuple[Case, ...] = ()
    left: tuple[int, ...] = ()


def cases_of_each(functions: int, *, share: float = 1.0) -> int:
    """Return how many sized cases each function of a run has; `share` is that of a run of profile `ci`."""
    return round(min(_MOST, max(_FEWEST, _CASES_OF_A_RUN // max(functions, 1))) * share)


def sized_cases(templates: Sequence[Template], kernel: Kernel, constants: SizeConstants, most: int) -> Sized:
    """Choose the sized cases of a kernel, at most so many.

    Each dimension is at its longest in one of them. Then come the numbers of the kernel's comparisons, its blocks, and
    powers of two, with one less and one more. Dimensions take new sizes together where the tensors stay narrow, and the
    templates take turns; beyond a number of a comparison, and where one dimension is all, each has a case, up to
    half of all cases: what is wrong there may be so with one option alone.
    """
    fitting = [narrow for template in templates if (narrow := _narrowed(template, kernel)) is not None]
    own = list({template.line: template for template in fitting}.values())
    left = _rungs(own, constants)
    numbers = {number for number in left.values() if number}
    cases: list[Case] = []
    while left and len(cases) < most:
        first, turn = next(iter(left)), len(cases) % len(own)
        number = left.pop(first)
        is_far = len(first) == 1 and all(first[0][1] > template.longest(first[0][0]) for template in own)
        above = (first[0][1] > number > 0 or len(first) > 1) and len(cases) < most // 2 and not is_far
        tried = (_packed(template, dict(first), left, kernel) for template in own[turn:] + own[:turn])
        for case, sizes in islice(filter(None, tried), min(len(own), most - len(cases)) if above else 1):
            numbers.discard(number)
            cases.append(replace(case, seed=len(cases) + 1))
            for rung in [rung for rung in left if all(sizes.get(name) == size for name, size in rung)]:
                numbers.discard(left.pop(rung))
    return Sized(tuple(cases), tuple(sorted(numbers)))


def _narrowed(template: Template, kernel: Kernel) -> Template | None:
    """Return the template with the sizes that a kernel declares it takes; None if it does not take such cases.

    Parameters that it does not accept are left out, and numbers such as eps are those that it takes.
    """
    first, *words = template.line.split()
    known = [word for word in words if "[" in word or word.partition("=")[0] in kernel.accepts]
    for place, (name, _, value) in enumerate(word.partition("=") for word in known):
        numbers = [n for n in options_of(kernel.takes, name) or () if isinstance(n, float)]
        if _NUMBER.fullmatch(value) and numbers and float(value) not in numbers:
            known[place] = f"{name}={numbers[0]!r}"
    template = replace(template, line=" ".join([first, *known]))
    for key in kernel.takes:
        name, sizes = _dimension_of(template, key), options_of(kernel.takes, key)
        if name and sizes is not None:
            within = template.dimensions[name].within(sizes)
            if within is None:
                return None
            template = replace(template, dimensions={**template.dimensions, name: within})
    for key, options in kernel.takes.items():
        name, other = _dimension_of(template, key), _dimension_of(template, str(options[0]))
        if name and other and name != other:
            template = template.equal(name, other)
    return template if fitted(kernel, template.case({})) else None


def _dimension_of(template: Template, key: str) -> str:
    """Return the name of the dimension that a key of `takes` is about; empty for any other key."""
    tensor, _, what = key.partition(" ")
    place = -1 if what == "columns" else int(what.removeprefix("size ")) if what.startswith("size ") else None
    return "" if place is None else template.dimension_of(tensor, place)


Rung = tuple[tuple[str, int], ...]
"""Sizes of one dimension, of two that reach a number together, or of all of a tensor."""


def _rungs(templates: Sequence[Template], constants: SizeConstants) -> dict[Rung, int]:
    """Map sizes to look at, the worthiest first, to the number of the kernel's comparisons that they reach, or 0."""
    longest: dict[str, int] = {}
    farthest: dict[str, int] = {}
    for template in templates:
        for name, own in template.dimensions.items():
            longest[name] = max(own.longest, longest.get(name, 0))
            farthest[name] = max(own.farthest, farthest.get(name, 0))
    steps = {name: own.step for template in templates for name, own in template.dimensions.items()}
    compared = [number for number in constants.compared if number >= _SMALL]
    few = [number for number in constants.compared if number < _SMALL]
    found: dict[Rung, int] = {((name, size),): 0 for name, size in longest.items()}
    far = {number for number in compared if number > max(longest.values(), default=0)}

    def add(size: int, number: int = 0, *, up: bool = True) -> None:
        for name, most in (farthest if number in far else longest).items():
            own = (-(-size // steps[name]) if up else size // steps[name]) * steps[name]
            if 2 <= own <= most:
                found.setdefault(((name, own),), number)

    for number in compared:
        add(number + 1, number)
        if number in far:  # of so many terms of a sum, one more is no difference that is seen
            add(2 * number + 1, number)
    for number in compared:
        if together := _together(number, templates, longest):
            found.setdefault(together, number)
    for number in compared:
        add(number)
        add(number - 1, up=False)
    for number in constants.blocks:
        add(number + 1)
    names = [part for part in templates[0].shapes[0] if part in longest] if templates else []
    for number in constants.blocks if len(names) > 1 else ():
        # The first tensor's last dimension is all, as of two rows no number of elements is odd.
        size = -(-(number + 1) // steps[names[-1]]) * steps[names[-1]]
        if size <= longest[names[-1]]:
            found.setdefault(((names[-1], size), *((name, 1) for name in names[:-1])), 0)
    for number in (*compared, *constants.blocks):
        add(2 * number + 1)
    for number in (*constants.blocks, *few):
        add(number)
        add(number - 1, up=False)
        add(2 * number)
    powers = [1 << power for power in range(max(longest.values(), default=0).bit_length(), 2, -1)]
    for power in powers:
        add(power + 1)
    for power in powers:
        add(3 * power // 2)
        add(power - 1, up=False)
        add(power)
    return found


def _together(number: int, templates: Sequence[Template], longest: Mapping[str, int]) -> Rung:
    """Return sizes of the first tensor's dimensions whose product is above a number that none of them reaches."""
    first = templates[0] if templates else None
    names = [name for name in longest if first and any(name in part.split("*") for part in first.shapes[0])]
    if len(names) < 2 or not max(longest[name] for name in names) < number < _LARGEST:
        return ()
    names = sorted(names, key=lambda name: -longest[name])[:2]
    short = min(longest[names[1]], math.isqrt(number) + 1)
    return ((names[0], number // short + 1), (names[1], short))


def _packed(
    template: Template, sizes: dict[str, int], left: Mapping[Rung, int], kernel: Kernel
) -> tuple[Case, Sizes] | None:
    """Return the case of some sizes, with further ones of other dimensions; None if the kernel does not take it."""
    if not (sizes := template.reached(sizes)):
        return None
    if (case := fitted(kernel, template.case(sizes))) is None:
        return None
    tried: dict[str, int] = {}
    for (name, size), *others in left:
        if others or name in sizes or tried.get(name, 0) == _TRIES or not template.has({name: size}):
            continue
        tried[name] = tried.get(name, 0) + 1
        together = sizes | {name: size}
        if template.is_narrow(together) and (more := fitted(kernel, template.case(together))) is not None:
            sizes, case = together, more
    return case, sizes
