"""Compares backends on one model."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from cllm.bench.backend_work import Logits


class LogitsComparison(msgspec.Struct, frozen=True):
    """``max_difference`` is a share of the largest logit, ``mean_kl`` the Kullback-Leibler
    divergence in nats, and ``same_best`` the share of places where both have the same best token.
    """

    max_difference: float
    mean_kl: float
    same_best: float


def compare_logits(expected: Logits, found: Logits) -> LogitsComparison:
    logs, others = log_softmax(expected), log_softmax(found)
    return LogitsComparison(
        max_difference=float(np.abs(found - expected).max() / np.abs(expected).max()),
        mean_kl=float((np.exp(logs) * (logs - others)).sum(axis=1).mean()),
        same_best=float((expected.argmax(axis=1) == found.argmax(axis=1)).mean()),
    )


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    logs: npt.NDArray[np.float64] = shifted - np.log(sums)
    return logs
