"""A plain test: random tensors, one call of the kernel, one of an eager implementation, `assert_close`.

As a program, `python -m lastbit.bench.plain` times plain tests where lastbit's interpreter is not installed: Triton
interprets as it does by itself. It reads a pickled request from its standard input, and its last line is JSON.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from lastbit.bench.samples import now
from lastbit.calling.performing import under_any_name
from lastbit.case import Case, TensorSpec, parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.inputs import build
from lastbit.kernel import Kernel
from lastbit.verify.processes import environment_for
from lastbit.verify.project import open_project


def plain_test(kernel: Kernel, eager: Kernel, case: Case, device: torch.device) -> Callable[[], None]:
    """Make a function that does one plain test; integers are those of the case, and differing values raise nothing."""
    built = build(case, device).tensors
    integers = {t.name: built[t.name] for t in case.tensors if not t.torch_dtype.is_floating_point}

    def test() -> None:
        tensors = {t.name: _values(t, integers, device) for t in case.tensors}
        actual, expected = (_results(k.call(**tensors, **case.params)) for k in (kernel, eager))
        for name in actual.keys() & expected.keys():
            try:
                assert_close(actual[name], expected[name])
            except AssertionError:
                continue

    return test


def _values(spec: TensorSpec, integers: Mapping[str, Tensor], device: torch.device) -> Tensor:
    if spec.name in integers:
        return integers[spec.name].clone()
    return torch.randn(spec.shape, device=device).to(spec.torch_dtype)


def _results(returned: Any) -> dict[str, Tensor]:
    """Name the results, and convert those of 8 bits to fp32, which `assert_close` can compare."""
    named = under_any_name(returned)
    return {name: t.float() if t.is_floating_point() and t.itemsize == 1 else t for name, t in named.items()}


def seconds_of(tests: Sequence[Callable[[], object]], rounds: int, now: Callable[[], float]) -> tuple[float, ...]:
    """Time each round over the tests, in seconds."""
    taken = []
    for _ in range(rounds):
        start = now()
        for test in tests:
            test()
        taken.append(now() - start)
    return tuple(taken)


@dataclass(frozen=True)
class Plain:
    """Seconds of each round over the `count` plain tests that did not raise, and what the others raised."""

    seconds: tuple[float, ...]
    count: int
    raised: tuple[str, ...] = ()


def plain(kernel: Kernel, eager: Kernel, cases: Sequence[Case], device: torch.device, rounds: int) -> Plain:
    """Time plain tests of the cases, warm: each was done once before."""
    tests, raised = [], []
    for case in cases:
        test = plain_test(kernel, eager, case, device)
        try:
            test()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
        else:
            tests.append(test)
    return Plain(seconds_of(tests, rounds, now(device)), len(tests), tuple(raised))


@dataclass(frozen=True)
class Request:
    """A request for `plain`, to a process that loads the kernels for itself."""

    config: Config
    kernel: str
    eager: str
    lines: tuple[str, ...]
    rounds: int


def plain_under_stock_interpreter(request: Request) -> Plain:
    """Time plain tests on the CPU in a process in which lastbit's interpreter is not installed.

    Raises:
        LastbitError: the process ended early.
    """
    command = [sys.executable, "-W", "ignore", "-m", "lastbit.bench.plain"]
    environment = environment_for("cpu", request.config.site)
    done = subprocess.run(command, env=environment, input=pickle.dumps(request), capture_output=True, check=False)
    if done.returncode:
        raise LastbitError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
    seconds, count, raised = json.loads(done.stdout.splitlines()[-1])
    return Plain(tuple(seconds), count, tuple(raised))


def _answer(request: Request) -> Plain:
    torch.set_num_threads(1)  # as where lastbit's interpreter is installed
    kernels = {kernel.name: kernel for kernel in open_project(request.config).kernels()}
    cases = [parse_case(line) for line in request.lines]
    return plain(kernels[request.kernel], kernels[request.eager], cases, torch.device("cpu"), request.rounds)


if __name__ == "__main__":
    answer = _answer(pickle.load(sys.stdin.buffer))
    print(json.dumps([answer.seconds, answer.count, answer.raised]))
