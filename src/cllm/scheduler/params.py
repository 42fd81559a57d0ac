"""The limits of a step."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class SchedulerParams(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step.

    A step computes at most ``max_num_batched_tokens`` tokens and ``max_num_samples`` rows of
    logits, which are enough for one row of each running sequence. ModelInfo explains
    ``row_seconds``.

    The prompts of other requests may lengthen the time between two tokens of a sequence to
    ``target_itl`` seconds, inf for no limit. None means a number of steps of one row on this
    machine, or a second without ``row_seconds``. While sequences decode, prompts get the share
    ``prefill_share`` of the time; 1 means prompts in every step. ``weights`` are the shares of
    accounts. They count for sequences so long that they do not get a row in every step.
    """

    max_num_batched_tokens: int = 512
    max_num_samples: int = 512
    row_seconds: float = 0.0
    target_itl: float | None = 1.0
    prefill_share: float = 1.0
    weights: Mapping[str, float] = {}
