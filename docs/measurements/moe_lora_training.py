"""Twenty steps of AdamW on a small MoE-LoRA layer, by the Triton kernels and exactly in fp64: loss and errors per step.

Run `python docs/measurements/moe_lora_training.py [--device cuda]`; it prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Training a mixture of experts with LoRA

`{command}`, {date}: {versions}, {device}.

{steps} steps of AdamW, learning rate {rate}, on the six adapters of one layer: H {hidden}, I {width},
{experts} experts, {slots} per token, rank {rank}, {tokens} tokens. The loss is the mean squared error to a fixed random
target. Parameters are bf16. AdamW holds master copies in fp32, which are rounded into the parameters after each step. B
starts at zero. *Exact* starts from the same numbers and is fp64 throughout, with gradients by automatic
differentiation. `tests/moe_lora_training.py` is both.

*M23* is the Triton training without the down adapter's part of `grad_intermediate`, *M18* the one in two shards whose
slices of the adapters are copied once and never again.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def relative(error: float, size: float) -> str:
    return f"{error / size:.2e}"


def errors(step: Any, exact: Any, start: Any) -> list[str]:
    """Compute relative errors of loss, output and adapters; of adapters also relative to the way they went."""
    from tests.moe_lora_training import distance

    apart = distance(step.masters, exact.masters)
    nothing = {name: 0 * value for name, value in exact.masters.items()}
    moved = distance(exact.masters, start.masters)
    output = float((step.output.double() - exact.output).norm()), float(exact.output.norm())
    return [
        relative(abs(step.loss - exact.loss), exact.loss),
        relative(*output),
        relative(apart, distance(exact.masters, nothing)),
        relative(apart, moved) if moved else "",
    ]


def refused(steps: Sequence[Any]) -> str:
    """Find the first step that breaks the contract, and how many do."""
    from tests.moe_lora_training import verdict

    found = {number: verdict(step) for number, step in enumerate(steps)}
    wrong = {number: ops for number, ops in found.items() if ops}
    if not wrong:
        return f"none of {len(steps)}"
    first, ops = next(iter(wrong.items()))
    return f"{len(wrong)} of {len(steps)}, the first is {first}: {', '.join(ops)}"


def trainings() -> dict[str, list[Any]]:
    """Name → steps, of the Triton kernels as they are and with faults."""
    from lastbit.kernel import load_kernels
    from tests.moe_lora_training import StaleShards, api_of_last_load, problem, train, without_adapter_in_gradient
    from tests.rms_norm_contract import FOLDER

    load_kernels(FOLDER)
    api = api_of_last_load()
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        "Triton": (lambda: nullcontext(api), 1),
        "Triton, 2 shards": (lambda: nullcontext(api), 2),
        "M23": (without_adapter_in_gradient, 1),
        "M18": (lambda: nullcontext(StaleShards(api)), 2),
    }
    found = {}
    for name, (opened, shards) in ways.items():
        with opened() as used:
            found[name] = list(train(used, problem(), shards=shards))
    return found


def report() -> None:
    from tests.moe_lora_training import problem, train_exactly

    exact, runs = list(train_exactly(problem())), trainings()
    losses = [
        [str(number), f"{step.loss:.6f}", *(f"{steps[number].loss:.6f}" for steps in runs.values())]
        for number, step in enumerate(exact)
    ]
    print("## Loss\n\n" + table(["step", "exact", *runs], losses))
    grown = [[str(n), *errors(step, exact[n], exact[0])] for n, step in enumerate(runs["Triton"])]
    head = ["loss", "output", "adapters", "adapters, of the way they went"]
    print("## Relative error of the Triton training\n\n" + table(["step", *head], grown))
    ends = [[name, *errors(steps[-1], exact[-1], exact[0]), refused(steps)] for name, steps in runs.items()]
    print("## Relative error at the last step, and steps that break the contract\n")
    print(table(["training", *head, "refused"], ends), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1" if options.device == "cpu" else "0"
    sys.path[:0] = [str(ROOT / "harness" / "checkout"), str(ROOT)]
    import torch
    import triton

    from tests import moe_lora_training as sizes

    on_cpu = options.device == "cpu"
    text = HEAD.format(
        command=shlex.join(["python", "docs/measurements/moe_lora_training.py", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        versions=f"triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        device="Triton interpreted on the CPU" if on_cpu else torch.cuda.get_device_name(),
        steps=sizes.STEPS, rate=sizes.LEARNING_RATE, hidden=sizes.HIDDEN, width=sizes.WIDTH, experts=sizes.EXPERTS,
        slots=sizes.SLOTS, rank=sizes.RANK, tokens=sizes.TOKENS,
    )  # fmt: skip
    print(text)
    report()


if __name__ == "__main__":
    main()
