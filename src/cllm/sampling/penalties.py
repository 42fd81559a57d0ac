"""Changes to individual logits before selection: penalties for tokens seen, and the request's logit
bias.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cllm.core.sequence import Sequence


def penalize(row: npt.NDArray[np.float32], seq: Sequence) -> None:
    """Apply the penalties of ``seq`` to its logits ``row``, shape (vocabulary,)."""
    if not seq.token_counts:
        return
    params = seq.request.params
    ids = np.fromiter(seq.token_counts, np.intp, len(seq.token_counts))
    in_output = np.array([counts[1] for counts in seq.token_counts.values()], np.float32)
    logits = row[ids]
    logits = np.where(
        logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
    )
    logits -= params.frequency_penalty * in_output + params.presence_penalty * (in_output > 0)
    row[ids] = logits


def add_bias(row: npt.NDArray[np.float32], logit_bias: dict[int, float]) -> None:
    """Add the bias of each token to its logit in ``row``, shape (vocabulary,)."""
    ids = np.fromiter(logit_bias, np.intp, len(logit_bias))
    row[ids] += np.fromiter(logit_bias.values(), np.float32, len(logit_bias))
