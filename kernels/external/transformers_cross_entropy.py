"""The loss of causal language models in Transformers; read and identified for 5.23.0."""

from __future__ import annotations

import torch
from norm_packages import upstream

from lastbit import UnsupportedCase, kernel


@kernel("cross_entropy", contract="from_log_probs", name="transformers[ForCausalLMLoss]", placement="moves")
def causal_lm_loss(logits, labels, *, ignore_index=-100, reduction, count=None):
    """Average over the rows that count, or divide by the number of items in the batch, which a trainer counts."""
    if reduction != "mean":
        raise UnsupportedCase(f"reduction={reduction!r}: upstream gives a mean, or a sum divided by a count")
    items = None if count is None else torch.tensor(count, device=logits.device)
    loss = upstream("transformers.loss.loss_utils", "transformers").ForCausalLMLoss(
        logits, None, logits.shape[1], items, ignore_index, shift_labels=labels.long()
    )
    return {"loss": loss[None]}
