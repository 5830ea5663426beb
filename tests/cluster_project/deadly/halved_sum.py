"""A kernel that is right, one that kills its process, one that never returns, and one that takes its time once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from lastbit.kernel import kernel


@kernel("halved_sum", contract="fp32_sum")
def right(x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()) * 0.5).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def kills(x: Tensor, y: Tensor) -> Tensor:
    """End the process where a row has seven columns."""
    if x.shape[-1] == 7:
        print("the end of it", flush=True)
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
    """Take half a second where a row has thirteen columns, in the first process to get there.

    The file $DAWDLED says which one that is, until that process comes to a row of 17 columns.
    """
    first = Path(os.environ["DAWDLED"])
    if x.shape[-1] == 13 and not first.exists():
        first.write_text(str(os.getpid()))
    if first.exists() and first.read_text() == str(os.getpid()):
        time.sleep(0.5)
        if x.shape[-1] == 17:
            first.write_text("done")
    return right(x, y)
