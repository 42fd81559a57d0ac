"""Logprobs of tokens, computed from the model's logits before any sampling step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cllm.core.output import Logprobs
from cllm.sampling.top_k import Ids, LogitRow, top_k


class TopTokens(NamedTuple):
    """The best tokens of a row, saved before the row is modified.

    ``norm`` is the logarithm of the sum of exp(logit) over the whole row.
    """

    norm: float
    ids: Ids
    logits: LogitRow

    def compute_logprobs(self, logit: float) -> Logprobs:
        """Return the Logprobs of a token with this logit."""
        values = (self.logits.astype(np.float64) - self.norm).tolist()
        return Logprobs(float(logit) - self.norm, list(zip(self.ids.tolist(), values, strict=True)))


def find_top_tokens(row: LogitRow, num_top: int) -> TopTokens:
    """Return the ``num_top`` best tokens of the logits ``row``, shape (vocabulary,)."""
    largest = row.max()
    norm = float(largest) + float(np.log(np.exp(row - largest).sum(dtype=np.float64)))
    return TopTokens(
        norm, *(top_k(row, num_top) if num_top else (row[:0].astype(np.intp), row[:0]))
    )
