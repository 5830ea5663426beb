"""A folder of goldens and kernels whose text is changed, for the tests of `lastbit golden`."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import pytest
from in_this_process import InThisProcess

from lastbit.commands import golden, parsers

ROOT = Path(__file__).resolve().parent.parent
TRITON = "triton[native_multiply+rounded_sum]"
LINES = """
rms_norm x=bf16[6,200] weight=bf16[200] eps=1e-06 seed=3
rms_norm x=fp32[5,300] weight=fp32[300] eps=1e-06 seed=3
"""
PLAIN = """
import torch
from lastbit.kernel import UnsupportedCase, kernel

@kernel("rms_norm", contract="fp32_multiply", name="mine")
def mine(x, weight=None, *, eps):
    xf = x.float()
    inverse = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    product = xf * inverse if weight is None else xf * inverse * weight.float()
    return product.to(x.dtype)
"""
SAME_SUM = ".mean(-1, keepdim=True)"
OTHER_SUM = ".flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]"

FP32_MULTIPLY = (
    """        normalized = normalized.to(weight.dtype).to(tl.float32)
        product = (normalized * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)""",
    "        product = normalized * weight.to(tl.float32)",
)


def lastbit(*words: object) -> int:
    """Run `lastbit golden WORDS`, with kernels in this process, and return its exit code."""
    parser = argparse.ArgumentParser()
    parsers.add_golden(parser)
    options = parser.parse_args([*map(str, words)])
    with patch.object(golden, "Worker", InThisProcess):
        return int(resolve_name(options.command)(options, ()))


class Bench:
    """A folder of goldens, and kernels that are changed by replacing text, each in a folder of its own."""

    def __init__(self, folder: Path, kernel: str) -> None:
        self.folder, self.kernel, self.lines = folder, kernel, folder / "lines.txt"
        self.lines.write_text(LINES)

    def kernels(self, old: str = "", new: str = "") -> Path:
        """Replace `old` by `new` in the kernels."""
        made = self.folder / f"kernels_{len(list(self.folder.iterdir()))}"
        made.mkdir()
        if self.kernel == TRITON:
            for name in ("described.py", "rms_norm_arguments.py", "rms_norm_launch.py", "row_layout.py"):
                shutil.copy(ROOT / "kernels" / name, made)
        source = (ROOT / "kernels" / "rms_norm.py").read_text() if self.kernel == TRITON else PLAIN
        assert source.count(old) == 1 or not old, "what the test replaces is there, once"
        (made / "rms_norm.py").write_text(source.replace(old, new) if old else source)
        return made

    def __call__(self, action: str, kernels: Path, *words: object) -> int:
        chosen = (self.kernel,) if self.kernel == TRITON else ()
        return lastbit(action, kernels, *chosen, "--folder", self.folder / "goldens", *words)

    def record(self) -> Path:
        """Record the golden of the unchanged kernel."""
        assert self("record", self.kernels(), "--cases", self.lines) == 0
        return self.file

    @property
    def file(self) -> Path:
        [path] = (self.folder / "goldens" / "cpu").iterdir()
        return path


def output(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed since the last time, on one line, so that it does not matter where lines were broken."""
    return " ".join(capsys.readouterr().out.split())
