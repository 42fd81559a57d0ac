"""The limits of a step."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class SchedulerParams(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one step. max_num_batched_tokens: tokens. max_num_samples: rows of logits, at least
    one for each running sequence. tile, row_seconds: see ModelInfo. target_itl: seconds between two
    tokens of a sequence that other requests' prompts may cause, inf for no limit; None means a
    number of steps of one row on this machine, or a second without ``row_seconds``.
    prefill_share: of the time, for prompts while sequences decode; 1 means prompts in every step.
    weights: of accounts, for sequences so long that they do not get a row in every step.
    """

    max_num_batched_tokens: int = 512
    max_num_samples: int = 512
    tile: int = 16
    row_seconds: float = 0.0
    target_itl: float | None = 1.0
    prefill_share: float = 1.0
    weights: Mapping[str, float] = {}
