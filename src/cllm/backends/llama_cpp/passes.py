"""Divides the rows of a batch into passes: calls of llama_decode that compute them fastest.

With a stream for each sequence, llama.cpp computes sequences together only if their seq_ids are
consecutive and they have equally many tokens in the call; it divides other calls into several
passes over the weights. So rows are padded to the longest one, as long as that costs less than
another pass.
"""

from __future__ import annotations

from typing import NamedTuple

from cllm.core.batch import Row
from cllm.errors import EngineError

MAX_PADDING = 8  # tokens of padding in a pass; they take about as long as another pass
MAX_DECODED = 16  # a row with more tokens belongs to a prompt


class Pass(NamedTuple):
    """Rows with consecutive seq_ids. Each is padded to ``size`` tokens; 0 means no padding."""

    rows: list[Row]
    size: int = 0


def plan_passes(
    rows: list[Row],
    max_tokens: int,
    context_length: int,
    *,
    pads: bool,
    has_streams: bool = True,
) -> list[Pass]:
    """Divide ``rows``, sorted by seq_id, into passes of at most ``max_tokens`` tokens.

    Without ``pads``, rows must not be padded with tokens that are freed afterwards. Without
    streams, seq_ids need not be consecutive.
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
                (has_streams and row.seq.seq_id != group[-1].seq.seq_id + 1)
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


def plan_with_drafts(
    rows: list[Row],
    max_tokens: int,
    context_length: int,
    max_taken_back: int,
    *,
    has_streams: bool,
) -> list[Pass]:
    """Divide ``rows`` as ``plan_passes`` does, for a recurrent model that can take back
    ``max_taken_back`` tokens of a row.

    llama.cpp keeps the past states only of sequences that it has computed in its last pass over the
    weights. So all draft tokens are in the last pass, and its rows are padded to the longest one,
    even beyond the context. Raises EngineError if that is not possible.
    """
    drafting = [i for i, row in enumerate(rows) if row.draft]
    size = max((rows[i].size for i in drafting), default=0)
    if not drafting:
        together = []
    elif has_streams:
        together = rows[drafting[0] : drafting[-1] + 1]
        size = max(row.size for row in together)
    elif all(row.size <= size for row in rows) and _count_padding(rows, size) <= MAX_PADDING:
        together = rows
    else:
        together = [rows[i] for i in drafting]
    others = [row for row in rows if row not in together]
    passes: list[Pass] = []
    if others:
        passes = plan_passes(
            others, max_tokens, context_length, pads=False, has_streams=has_streams
        )
    if not together:
        return passes
    last = _finish(together, size, context_length + max_taken_back)
    is_one_pass = last.size or all(row.size == size for row in together)
    num_between = together[-1].seq.seq_id - together[0].seq.seq_id - len(together)
    takes_back = max(size - row.size + len(row.draft) for row in together)
    if (
        not is_one_pass
        or (has_streams and num_between >= 0)
        or takes_back > max_taken_back
        or len(together) * size > max_tokens
    ):
        raise EngineError("the rows with draft tokens cannot be computed in one pass")
    return [*passes, last]


def _count_padding(rows: list[Row], size: int) -> int:
    return len(rows) * size - sum(row.size for row in rows)


def _finish(group: list[Row], size: int, context_length: int) -> Pass:
    """Return a pass of ``group``, whose longest row has ``size`` tokens, padded if that helps."""
    equal = all(row.size == size for row in group)
    fits = max(row.start for row in group) + size <= context_length
    return Pass(group, size if fits and not equal else 0)
