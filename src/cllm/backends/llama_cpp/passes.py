"""Divides the rows of a batch into passes: calls of llama_decode that compute them fastest.

With a stream for each sequence, llama.cpp computes sequences together only if their seq_ids are
consecutive and they have equally many tokens in the call; it divides other calls into several
passes over the weights. In a pass, attention goes over as many cells of each stream as the longest
one has. So a long sequence slows down the others in its pass, by more than a pass of its own costs.
"""

from __future__ import annotations

from typing import NamedTuple

from cllm.core.batch import Row

TILE = 64  # queries of the attention kernel for prompts; fewer are padded if that is faster
# How many times longer an operation of attention takes than one of the weights: first in the kernel
# for few queries, then in a tile. Measured with AVX-512 (0.6B, 2 cores, after 128 to 2,048 tokens):
# 10 and 3. With AMX, which speeds up only the weights, both are larger.
FEW_COST, TILE_COST = 12.0, 4.0
# The costs of a pass and of a prompt token, in cells whose attention takes as long. Measured with
# 32 rows of 100 tokens and one of 4,096 (0.6B, 2 cores with AVX-512): 445 ms in one pass, and 230
# and 92 ms in two, of which 33 ms are for the weights.
PASS_CELLS = 25_000
TOKEN_CELLS = 3_000
MAX_DECODED = 16  # a row with more tokens belongs to a prompt


class Pass(NamedTuple):
    """Rows with consecutive seq_ids. Each is padded to ``size`` tokens; 0 means no padding."""

    rows: list[Row]
    size: int = 0


def plan_passes(
    rows: list[Row], max_tokens: int, context_length: int, equal_cells: float
) -> list[Pass]:
    """Divide ``rows``, sorted by seq_id, into passes of at most ``max_tokens`` tokens.

    Attention to ``equal_cells`` cells takes as many operations as the rest of a token. 0 means that
    rows must not be padded with tokens that are freed afterwards, because of a recurrent state.
    """
    if not equal_cells:
        context_length = 0
    passes: list[Pass] = []
    group: list[Row] = []
    longest = size = 0  # most tokens of a row in the group, with and without those before the step
    for row in rows:
        end = row.start + row.size
        if group:
            is_prompt = row.size > MAX_DECODED
            tallest = max(size, row.size)
            count = len(group)
            cells = (count * size if end > longest else row.size) * abs(end - longest)
            cells += TOKEN_CELLS * (count * (tallest - size) + tallest - row.size)
            if (
                row.seq.seq_id != group[-1].seq.seq_id + 1
                or is_prompt != (size > MAX_DECODED)
                or cells > PASS_CELLS
                or (count + 1) * tallest > max_tokens
            ):
                passes.append(finish(group, size, max_tokens, context_length, equal_cells))
                group, longest, size = [], 0, 0
        group.append(row)
        longest, size = max(longest, end), max(size, row.size)
    passes.append(finish(group, size, max_tokens, context_length, equal_cells))
    return passes


def finish(
    group: list[Row], size: int, max_tokens: int, context_length: int, equal_cells: float
) -> Pass:
    """Return a pass of ``group``, whose largest row has ``size`` tokens, padded if that helps."""
    sizes: tuple[int, ...] = (size,)
    if MAX_DECODED < size < TILE and equal_cells:
        depth = max(row.start for row in group) / equal_cells
        if size * (1 + FEW_COST * depth) > TILE * (1 + TILE_COST * depth):
            sizes = (TILE, size)
    if len({row.size for row in group}) == 1:
        sizes = sizes[:-1]  # they need no padding
    end = max(row.start for row in group)
    for padded in sizes:
        if end + padded <= context_length and len(group) * padded <= max_tokens:
            return Pass(group, padded)
    return Pass(group)
