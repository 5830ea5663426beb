"""A kernel that kills its process, one that never returns, and one that is right."""

from __future__ import annotations

import os
import signal
import time

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
        time.sleep(3600)
    return right(x, y)
