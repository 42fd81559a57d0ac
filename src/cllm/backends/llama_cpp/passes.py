"""Divides the rows of a batch into passes: calls of llama_decode that compute them fastest.

With a stream for each sequence, llama.cpp computes sequences together only if their seq_ids are
consecutive and they have equally many tokens in the call; it divides other calls into several
passes over the weights. So rows are padded to the longest one, as long as that costs less than
another pass.
"""

from __future__ import annotations

from typing import NamedTuple

from cllm.core.batch import Row

MAX_PADDING = 8  # tokens of padding in a pass; they take about as long as another pass
MAX_DECODED = 16  # a row with more tokens belongs to a prompt


class Pass(NamedTuple):
    """Rows with consecutive seq_ids. Each is padded to ``size`` tokens; 0 means no padding."""

    rows: list[Row]
    size: int = 0


def plan_passes(rows: list[Row], max_tokens: int, context_length: int, *, pads: bool) -> list[Pass]:
    """Divide ``rows``, sorted by seq_id, into passes of at most ``max_tokens`` tokens.

    Without ``pads``, rows must not be padded with tokens that are freed afterwards, because of a
    recurrent state.
    """
    if not pads:
        context_length = 0
    passes: list[Pass] = []
    group: list[Row] = []
    size = num_tokens = 0  # of the longest row in the group, and of all of them
    for row in rows:
        if group:
            padded = (len(group) + 1) * max(size, row.size)
            if (
                row.seq.seq_id != group[-1].seq.seq_id + 1
                or (row.size > MAX_DECODED) != (size > MAX_DECODED)
                or padded - num_tokens - row.size > MAX_PADDING
                or padded > max_tokens
            ):
                passes.append(_finish(group, size, context_length))
                group, size, num_tokens = [], 0, 0
        group.append(row)
        size, num_tokens = max(size, row.size), num_tokens + row.size
    passes.append(_finish(group, size, context_length))
    return passes


def _finish(group: list[Row], size: int, context_length: int) -> Pass:
    """Return a pass of ``group``, whose longest row has ``size`` tokens, padded if that helps."""
    equal = all(row.size == size for row in group)
    fits = max(row.start for row in group) + size <= context_length
    return Pass(group, size if fits and not equal else 0)
