"""The loss of causal language models in Transformers; read and identified for 5.23.0."""

from __future__ import annotations

import torch
from norm_packages import upstream

from lastbit import kernel


@kernel(
    "cross_entropy", contract="from_log_probs", name="transformers[ForCausalLMLoss]", placement="moves",
    takes={"reduction": "mean"},
)  # fmt: skip
def causal_lm_loss(logits, labels, *, ignore_index=-100, reduction, count=None):
    """Average over the rows that count, or divide by the number of items in the batch, which a trainer counts."""
    function = upstream("transformers.loss.loss_utils", "transformers").ForCausalLMLoss
    items = None if count is None else torch.tensor(count, device=logits.device)
    return {"loss": function(logits, None, logits.shape[1], items, ignore_index, shift_labels=labels.long())[None]}
