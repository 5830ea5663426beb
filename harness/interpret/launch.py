"""Launches: the programs of a grid, many together where that is possible."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, interpreter_semantic

from lastbit.interpret.address_ranges import given
from lastbit.interpret.arguments import Arguments, as_parameter, bind
from lastbit.interpret.builder import Builder
from lastbit.interpret.decisions import decisions_of, unseen
from lastbit.interpret.faults import blank_of, masked, noted
from lastbit.interpret.memory import LaunchMemory
from lastbit.interpret.numpy_formats import Array, numpy_dtype
from lastbit.interpret.operations import current
from lastbit.interpret.places import described
from lastbit.interpret.racing import Races
from lastbit.interpret.recorder import Recorder
from lastbit.interpret.replay import Diverged, Replay
from lastbit.interpret.rewrite import Rewriter, compile_rewritten
from lastbit.interpret.speculation import Speculation
from lastbit.interpret.tape import Segment, Tape, Tapes, Trust
from lastbit.interpret.watching import chosen, is_one_by_one, launch, programs, watched_launch, watching_races

_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""The largest grid that CUDA launches, of every compute capability (CUDA C++ Programming Guide, technical
specifications)."""


class Launcher(GridExecutor):  # type: ignore[misc]
    """Runs the programs of one launch on the CPU."""

    def __init__(self, fn: Any, arg_names: list[str], grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks

    @unseen
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
        elsewhere = _any_on_device((*args, *kwargs.values()))
        host_args, host_kwargs = self._init_args_hst(args, kwargs) if elsewhere else (args, kwargs)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        bound = bind(self.fn, host_args, host_kwargs)
        grid = tuple(self.grid(bound) if callable(self.grid) else self.grid)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"a grid has 1 to 3 dimensions, not {grid}")
        if any(n > most for n, most in zip(grid, _MOST_PROGRAMS, strict=False)):
            raise ValueError(f"the grid is {grid}; CUDA takes at most {_MOST_PROGRAMS}: use the first for more")
        with np.errstate(all="ignore"):
            launch(self.fn, bound, tuple(int(n) for n in grid) + (1,) * (3 - len(grid)), self._run_programs)
        if elsewhere:
            self._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def _run_programs(self, bound: Mapping[str, Any], grid: tuple[int, ...]) -> None:
        arguments = Arguments(self.fn, bound)
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        before = builder.memory
        try:
            with watched_launch(self.fn, lambda: arguments.values):
                every = np.array(list(programs(grid)), np.int32).reshape(-1, 3)
                Launch(self.fn, arguments, builder).run(chosen(every))
        except Exception as error:
            raise InterpreterError(described(error)) from error
        finally:
            builder.memory = before


# Arbitrary, of the order of a cache: larger batches go through memory, smaller ones are more work of Python.
BATCH_BYTES = 16 << 20
"""About how much memory the programs of a batch may take."""


class Launch:
    """One launch of a kernel.

    Args:
        function: the rewritten kernel.
        arguments: what it gets.
        builder: the interpreter's.
    """

    def __init__(self, function: Any, arguments: Arguments, builder: Builder) -> None:
        self._function, self._arguments, self._builder = function, arguments, builder
        self._memory = builder.memory = LaunchMemory(given(arguments.bound.items(), blank_of))
        by_python = arguments.key is None or is_one_by_one()
        key = (function, arguments.key)
        self._tape = Tape([], [], refused=True) if by_python else _tapes.find(key, arguments.dtypes)
        self._replay = Replay(self._tape, arguments.arrays, self._memory)
        self._first: Segment | None = None
        self._memory.stored |= {tensor.region for tensor in self._memory.tensors if tensor.name in self._tape.stored}

    def run(self, grid_indices: Array) -> None:
        """Run the programs with these indices, in this order, a row each."""
        with decisions_of(self._tape.taken):
            if watching_races():
                # Look for races, too; and run again for each place with masked lanes: does what they hold reach memory?
                memory, before = self._memory, self._memory.copies()
                memory.races, memory.refilled = Races(noted), None
                self._run(grid_indices)
                memory.races, after = None, memory.copies()
                for place in sorted(memory.unfilled - {None}, key=str):
                    memory.restore(before)
                    memory.refilled = place
                    self._run(grid_indices)
                    if (tensor := memory.differing(after)) is not None:
                        noted(masked(place, tensor))
                memory.refilled = None
                memory.restore(after)
            else:
                self._run(grid_indices)

    def _run(self, grid_indices: Array) -> None:
        done = 0
        while done < len(grid_indices):
            together = 1
            if self._memory.races is None and not self._tape.refused and self._tape.trust is not Trust.NEVER:
                self._first = self._first or self._replay.begin()
                if self._first is not None:
                    together = BATCH_BYTES // max(1, self._first.together.bytes + self._tape.later_bytes)
            batch = grid_indices[done : done + max(1, together)]
            if len(batch) == 1:
                self._memory.ids = tuple(batch.reshape(3, 1))
                self._builder.grid_idx = tuple(batch[0].tolist())
                if self._tape.refused:
                    self._function(**self._arguments.values)
                else:
                    self._replay.alone(self._explore)
            elif not self._together(batch):
                continue
            done += len(batch)
        self._tape.stored |= {tensor.name for tensor in self._memory.tensors if tensor.region in self._memory.stored}

    def _together(self, grid_indices: Array) -> bool:
        """Run programs together; False if nothing has happened, and another attempt is to be made in another way."""
        assert self._first is not None
        how, count = self._tape.trust, len(grid_indices)
        stored = set(self._memory.stored)
        self._memory.speculation = speculation = Speculation(count, how is Trust.BYTES, np.arange(count))
        try:
            self._replay.together(self._first, grid_indices, self._explore)
        except Exception:
            speculation.undo()
            if self._memory.stored == stored:
                self._tape.trust = max(self._tape.trust, Trust(how + 1))
            return False
        finally:
            self._memory.speculation = None
        return True

    def _explore(self, diverged: Diverged) -> None:
        """Run a program by Python, and add what it does to the tape."""
        # Python looks for unreachable cycles the more often the more objects are made; recording makes no cycles.
        collects = gc.isenabled()
        gc.disable()
        try:
            recorder = Recorder(self._builder, self._tape, self._arguments.handles, diverged, current(self._builder))
            recorder.entered(self._function)
            interpreter_semantic.builder = recorder
            try:
                self._function(**self._arguments.values)
            finally:
                interpreter_semantic.builder = self._builder
            recorder.finish()
        finally:
            if collects:
                gc.enable()


_tapes = Tapes(limit=128 << 20)


def _any_on_device(values: tuple[Any, ...]) -> bool:
    for value in values:
        if isinstance(value, tuple):
            if _any_on_device(value):
                return True
        elif str(getattr(getattr(value, "base", value), "device", "cpu")) != "cpu":
            return True
    return False


def replace_launcher() -> None:
    """Put this module's launcher, the rewriter and the builder into Triton's interpreter.

    The builder object stays the one that Triton made, since functions hold on to it; it changes its class.
    """
    interpreter.InterpreterBuilder = Builder
    interpreter.interpreter_builder.__class__ = Builder
    interpreter.interpreter_builder.__dict__.pop("options", None)
    interpreter._get_np_dtype = numpy_dtype
    interpreter._implicit_cvt = as_parameter
    interpreter.GridExecutor = Launcher
    interpreter.FunctionRewriter.ast_transformer = Rewriter()
    interpreter.FunctionRewriter._compile_and_exec = compile_rewritten
    InterpretedFunction.rewritten_fn.clear()
    InterpretedFunction.__call__ = _call_from_kernel


def _call_from_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel function from another one: a plain call of the rewritten function."""
    function = self.rewrite()
    interpreter_semantic.builder.entered(function)
    result = function(*args, **kwargs)
    interpreter_semantic.builder.returned(function, args, kwargs, result)
    return result
