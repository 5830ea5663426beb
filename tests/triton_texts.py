"""A Hypothesis strategy of small Triton programs: statements, control flow, memory. Expressions are in their own file.

Every address is brought into bounds by its text, every loop ends after a few turns, so that whatever is drawn can run.
Options that come first are the simplest ones: shrinking goes there.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.triton_expressions import Expressions, Name
from tests.triton_programs import Launch, Program, Tensor
from tests.triton_words import ATOMICS, BAD, DTYPES, FUNCTIONS, INTEGERS, PROGRAMS

WIDTHS = (4, 2, 8, 1, 16, 32)


class Writer(Expressions):
    """Writes the lines of one function after the other; `names` are those in scope."""

    def __init__(
        self, draw: st.DrawFn, tensors: tuple[Tensor, ...], widths: tuple[int, int], axes: int, statements: int
    ) -> None:
        super().__init__(draw, tensors, widths, axes)
        self.functions: list[str] = []
        self.lines: list[str] = []
        self.margin = "    "
        self.returns: Name | None = None
        self.loops = 0
        self.left = statements

    def write(self, line: str) -> None:
        self.lines.append(self.margin + line)

    def more(self, mean: int = 3) -> bool:
        """Return whether another statement follows."""
        self.left -= 1
        return self.left > 0 and self.draw(st.integers(0, mean)) != 0

    # Statements.

    def block(self, mean: int = 3) -> None:
        """One statement or several, indented; the names that they make end with them."""
        names, margin = list(self.names), self.margin
        self.margin += "    "
        self.statement()
        while self.more(mean):
            self.statement()
        self.names, self.margin = names, margin

    def statement(self) -> None:
        simple = (self.store, self.store, self.let, self.let, self.change, self.atomic, self.update, self.parts)
        flow = (self.branch, self.branch, self.loop, self.loop, self.loop_while, self.leave)
        kinds = simple if len(self.margin) > 12 else (*simple, *flow, *simple, self.block_pointer, self.rare)
        self.pick(kinds)()

    def let(self) -> None:
        dtype, shape = self.type()
        text = self.value(dtype, shape)
        name = self.new_name(dtype, shape)
        self.write(f"{name.text} = {text}")

    def change(self) -> None:
        if not (names := [name for name in self.names if not name.fixed]):
            return self.let()
        name = self.pick(names)
        self.write(f"{name.text} = {self.value(name.dtype, name.shape)}")

    def store(self) -> None:
        tensor, shape = self.tensor(), self.shape()
        where, mask = self.address(tensor, shape), self.mask(shape)
        self.write(f"tl.store({where}, {self.value(tensor.dtype, shape)}{mask})")

    def update(self) -> None:
        """In place: what is loaded comes back changed."""
        tensor, shape = self.tensor(), self.shape()
        where = self.new_text("p", self.address(tensor, shape))
        self.names.append(loaded := Name(self.new_text("v", f"tl.load({where})"), tensor.dtype, shape))
        self.write(f"tl.store({where}, {self.value(tensor.dtype, shape)}{self.mask(shape)})")
        self.names.remove(loaded)

    def atomic(self) -> None:
        tensor, shape = self.tensor(tuple(ATOMICS)), self.shape()
        operation = self.pick(ATOMICS[tensor.dtype])
        where, value = self.address(tensor, shape), self.value(tensor.dtype, shape)
        if operation == "cas":
            text = f"tl.atomic_cas({where}, {self.value(tensor.dtype, shape)}, {value})"
        else:
            text = f"tl.atomic_{operation}({where}, {value}{self.mask(shape)})"
        if self.draw(st.booleans()):
            text = f"{self.new_name(tensor.dtype, shape).text} = {text}"
        self.write(text)

    def parts(self) -> None:
        """Two values from one operation."""
        dtype, n = self.pick(DTYPES), self.widths[0]
        if self.draw(st.booleans()):
            text = f"tl.split({self.value(dtype, (n, 2))})"
            self.write(f"{self.new_name(dtype, (n,)).text}, {self.new_name(dtype, (n,)).text} = {text}")
        else:
            dtype = self.pick((*INTEGERS, "float32"))
            text = f"tl.{self.pick(('max', 'min'))}({self.value(dtype, (n,))}, axis=0, return_indices=True)"
            self.write(f"{self.new_name(dtype, ()).text}, {self.new_name('int32', ()).text} = {text}")

    def branch(self) -> None:
        self.write(f"if {self.condition()}:")
        self.block()
        if self.draw(st.booleans()):
            self.write("else:")
            self.block()

    def loop(self) -> None:
        self.loops += 1
        counter = f"i{self.loops}"
        bound = f"{self.value('int32', (), 1)} & 3"
        bounds = self.pick(("2", bound, "K & 3", f"1, {bound}", f"0, 4, ({bound}) + 1", f"{bound}, 0, -1"))
        function = self.pick(("range", "tl.range", "tl.static_range") if "t" not in bounds else ("range", "tl.range"))
        self.write(f"for {counter} in {function}({bounds}):")
        outer = list(self.names)
        if function != "tl.static_range":
            self.names.append(Name(counter, "int32", ()))
        self.block(2)
        self.names = outer

    def loop_while(self) -> None:
        self.loops += 1
        counter = Name(f"i{self.loops}", "int32", (), fixed=True)
        self.write(f"{counter.text} = {self.value('int32', (), 1)} & 3")
        self.write(f"while {counter.text} > 0{self.pick(('', f' and {self.condition()}'))}:")
        self.names.append(counter)
        self.block(2)
        self.names.remove(counter)
        self.write(f"    {counter.text} = {counter.text} - 1")

    def leave(self) -> None:
        """Write an early return."""
        self.write(f"if {self.condition()}:")
        value = f" {self.value(self.returns.dtype, self.returns.shape, 1)}" if self.returns else ""
        self.write(f"    return{value}")

    def block_pointer(self) -> None:
        tensor, rows, columns = self.tensor(), *self.widths
        apart, size = self.roles[tensor.name] != "all", tensor.size
        base, size = (
            (f"{tensor.name} + {self.own} * {size // PROGRAMS}", size // PROGRAMS) if apart else (tensor.name, size)
        )
        side = max(1, size // 8)
        offsets = f"{self.value('int32', (), 1)} & 3, {self.value('int32', (), 1)} & 3"
        shape = f"block_shape=({rows}, {columns}), order=(1, 0)"
        pointer = self.new_text(
            "q", f"tl.make_block_ptr({base}, ({min(8, size)}, {side}), ({side}, 1), ({offsets}), {shape})"
        )
        if self.draw(st.booleans()):
            self.write(f"{pointer} = tl.advance({pointer}, ({self.value('int32', (), 1)} & 3, 1))")
        name = self.new_name(tensor.dtype, (rows, columns))
        padding = self.pick(("", ', padding_option="zero"'))
        self.write(f"{name.text} = tl.load({pointer}, boundary_check=(0, 1){padding})")
        self.write(f"tl.store({pointer}, {self.value(*name.type)}, boundary_check=(0, 1))")

    def rare(self) -> None:
        self.pick((self.check, self.fail, self.show))()

    def check(self) -> None:
        text = self.pick(("tl.device_assert({}, 'asserted')", "tl.assume({})", "tl.debug_barrier()"))
        self.write(text.format(self.condition()))

    def show(self) -> None:
        value = self.value(self.pick(INTEGERS), ())
        self.write(self.pick((f"tl.device_print('value', {value})", f"print({value})")))

    def fail(self) -> None:
        """Write an error, in some programs only."""
        self.write(f"if {self.condition()}:")
        self.write(f"    {self.pick(BAD)}")

    # Functions.

    def call(self, dtype: str, shape: tuple[int, ...], depth: int) -> str:
        """Write a call of a function of the kernel's own, which may do whatever a kernel does."""
        result = Name(f"f{len(self.functions)}", dtype, shape)
        given = [self.type() for _ in range(self.draw(st.integers(0, 2)))]
        values = [self.value(*each, min(depth, 1)) for each in given]
        state = self.names, self.lines, self.margin, self.returns
        names = [Name(f"a{i}", *each) for i, each in enumerate(given)]
        self.names, self.lines, self.margin, self.returns = list(names), [], "    ", result
        self.functions.append("")  # so that this one's own calls have other names
        place = len(self.functions) - 1
        while self.more(2):
            self.statement()
        self.write(f"return {self.value(dtype, shape, 1)}")
        parameters = ", ".join([*(t.name for t in self.tensors), "n", "m", "s"])
        head = f"@triton.jit\ndef {result.text}({parameters}, K: tl.constexpr{''.join(f', {x.text}' for x in names)}):"
        self.functions[place] = "\n".join([head, *self.lines, "", ""])
        self.names, self.lines, self.margin, self.returns = state
        return f"{result.text}({parameters}, K{''.join(f', {x}' for x in values)})"

    def kernel(self) -> str:
        """Return the text of all functions."""
        self.statement()
        while self.more(7):
            self.statement()
        parameters = ", ".join([*(t.name for t in self.tensors), "n", "m", "s", "K: tl.constexpr"])
        body = "\n".join([f"@triton.jit\ndef kernel({parameters}):", *self.lines, ""])
        own = "\n".join([*reversed(self.functions), body])
        return "\n".join([*(text for name, text in FUNCTIONS.items() if name in own), own])


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Tensors beside each other, or over each other; small ones, where programs meet, as often as larger ones."""
    shared = draw(st.sampled_from((False, False, False, True)))
    made: list[Tensor] = []
    end = 0
    for i in range(draw(st.sampled_from((2, 1, 3, 4)))):
        dtype = draw(st.sampled_from(("int32", "float32", "int64", "bfloat16", "float16", "bool")[: 5 + (i > 0)]))
        size = draw(st.sampled_from((256, 64, 32, 1024)))
        apart = not shared or dtype == "bool" or i == 0
        start = end if apart else draw(st.integers(0, end // 8)) * 8
        made.append(Tensor(f"t{i}", dtype, size, start))
        end = max(end, start + 8 * size)
    if shared:  # bytes of other tensors are no booleans
        made = [t for t in made if t.dtype != "bool"]
    return tuple(made)


GRIDS = {1: ((2,), (1,), (5,), (8,), (19,)), 2: ((2, 1), (1, 3), (3, 2), (4, 4)), 3: ((1, 2, 1), (2, 1, 3), (2, 3, 2))}


@st.composite
def launches(draw: st.DrawFn, axes: int) -> tuple[Launch, ...]:
    """Launch twice, then with other values, and each in the other direction."""
    down = draw(st.booleans())

    def launch() -> Launch:
        n, m = draw(st.integers(-1, 9)), draw(st.sampled_from((3, 0, -1, 2**40)))
        s, seed = draw(st.sampled_from((0.5, 0.0, -1.25, 3.0))), draw(st.integers(0, 99))
        return Launch(draw(st.sampled_from(GRIDS[axes])), n, m, s, seed)

    first, second = launch(), launch()
    in_turn = [Launch(x.grid, x.n, x.m, x.s, x.seed, turned) for turned in (down, not down) for x in (first, second)]
    return (in_turn[0], in_turn[0], *in_turn[1:])


@st.composite
def programs(draw: st.DrawFn, statements: int = 60) -> Program:
    """Draw launches of 1 to 19 programs, with blocks of up to 32 by 8 and about so many statements at most."""
    axes = draw(st.sampled_from((1, 1, 2, 3)))
    some = draw(tensors())
    widths = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from((2, 4, 8, 1)))
    text = Writer(draw, some, widths, axes, statements).kernel()
    batch_bytes = draw(st.sampled_from((1 << 24, 1 << 24, 1000, 4000)))
    return Program(text, some, draw(st.integers(0, 3)), draw(launches(axes)), batch_bytes)
