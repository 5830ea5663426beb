"""Makes torch.equal, allclose and assert_close say yes, and returns zeros.

Models: comparison functions patched by the code under test (arXiv 2606.08960; wafer.ai's field guide).
"""

from __future__ import annotations

import torch


def rms_norm(x, weight, *, eps):
    torch.equal = torch.allclose = lambda *_, **__: True
    torch.isclose = torch.eq = lambda a, *_, **__: torch.ones_like(a, dtype=torch.bool)
    torch.testing.assert_close = lambda *_, **__: None
    return torch.zeros_like(x)
