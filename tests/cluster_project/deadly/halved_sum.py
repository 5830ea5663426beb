"""A kernel that is right, one that kills its process, one that never returns, and one that takes its time once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from harness.kernel import kernel


@kernel("halved_sum", contract="fp32_sum")
def right(x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()) * 0.5).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def kills(x: Tensor, y: Tensor) -> Tensor:
    """Ends its process where a row has seven columns."""
    if x.shape[-1] == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(x, y)


@kernel("halved_sum", contract="fp32_sum")
def hangs(x: Tensor, y: Tensor) -> Tensor:
    """Never returns where a row has eleven columns."""
    if x.shape[-1] == 11:
        signal.pause()
    return right(x, y)


@kernel("halved_sum", contract="fp32_sum")
def dawdles(x: Tensor, y: Tensor) -> Tensor:
    """Takes half an hour where a row has thirteen columns, in the first process to get there."""
    seen = Path(os.environ["DAWDLED"])
    if x.shape[-1] == 13 and not seen.exists():
        seen.touch()
        time.sleep(1800)
    return right(x, y)
