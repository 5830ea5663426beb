"""A git repository with a long history of one kernel, in which one commit makes its results worse."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMMITS = 40
UNBUILDABLE = 5

KERNEL = """\
import torch

from lastbit.kernel import kernel
from settings import BLOCK


def total(squares, block):
{total}


{decorator}
def norm(x, weight, *, eps):
    xf = x.float()
    inverse = torch.rsqrt(total(xf.square(), BLOCK) / x.shape[-1] + eps)
    {product}
"""

SUMS = {
    "whole": "    return squares.sum(-1, keepdim=True)",
    "blocks": "    return sum(part.sum(-1, keepdim=True) for part in squares.split(block, -1))",
    "chain": "    return sum(squares[..., i : i + 1] for i in range(squares.shape[-1]))",
}
"""Orders of summation; the last one is so long that in fp32 the relative error is four times that of the others."""

DECORATOR = '@kernel("rms_norm", contract="native_multiply")'
ROUNDED = "return (xf * inverse).to(x.dtype) * weight"
NOT_ROUNDED = "return (xf * inverse * weight.float()).to(x.dtype)"

BREAKAGES: tuple[Callable[[str], str], ...] = (
    lambda text: text.replace("def norm(", "def norm("[:-1]),
    lambda text: f"import a_module_that_is_missing\n{text}",
    lambda text: text.replace(f"{DECORATOR}\n", ""),
)
"""What makes a file one that does not build: a SyntaxError, an ImportError, no kernel."""


@dataclass(frozen=True)
class Demo:
    """The repository; `commits` are hashes from the oldest on, the other fields say which is what."""

    folder: Path
    commits: list[str]
    culprit: str
    unbuildable: frozenset[str]
    harmless: str


def git(folder: Path, *arguments: str, text: str | None = None, date: str = "2024-06-01T12:00:00Z") -> str:
    """Output of a git command, with a user and a date of its own, so that hashes are the same in every run."""
    identity = ("-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    environment = dict(os.environ, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)
    done = subprocess.run(command, input=text, check=True, capture_output=True, text=True, env=environment)
    return done.stdout.strip()


def make_demo(folder: Path, seed: int, *, drifts: bool, kernels: str = "kernels") -> Demo:
    """40 commits to one kernel of RMSNorm, of which one, drawn by the seed, is the culprit.

    The culprit multiplies by the weight in fp32, where the contract rounds before; or, if it only `drifts`, adds in one
    chain. Another commit changes the order of the sum and harms nothing, several do not build.
    """
    draw = random.Random(seed)
    culprit = draw.randrange(2, COMMITS - 1)
    others = [i for i in range(1, COMMITS - 1) if abs(i - culprit) > 1]
    harmless, *unbuildable = draw.sample(others, 1 + UNBUILDABLE)
    (folder / kernels).mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commits = []
    for i in range(COMMITS):
        done = i >= culprit
        order = "chain" if done and drifts else "blocks" if i >= harmless else "whole"
        product = NOT_ROUNDED if done and not drifts else ROUNDED
        text = KERNEL.format(total=SUMS[order], decorator=DECORATOR, product=product)
        if i in unbuildable:
            text = BREAKAGES[unbuildable.index(i) % len(BREAKAGES)](text)
        title = "Change the sum" if i in (culprit, harmless) else f"Change {i}"
        commits.append(_commit(folder / kernels, i, text, title))
    named = frozenset(commits[i] for i in unbuildable)
    return Demo(folder, commits, commits[culprit], named, commits[harmless])


def _commit(kernels: Path, number: int, text: str, title: str) -> str:
    """Every commit also changes a comment, the size of a block, or adds a file."""
    (kernels / "norms.py").write_text(f"# Revision {number - number % 3}.\n{text}")
    (kernels / "settings.py").write_text(f"BLOCK = {64 << number % 2}\n")
    if number % 5 == 0:
        (kernels / f"notes_{number}.md").write_text("A note.\n")
    git(kernels, "add", "--all", ".")
    git(kernels, "commit", "--quiet", "--message", title, date=f"2024-05-{1 + number // 2:02}T12:00:00Z")
    return git(kernels, "rev-parse", "HEAD")
