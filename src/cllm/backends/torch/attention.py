"""Attention of the rows of a batch to cells that lie in runs.

A token attends to each run by itself, and the results are merged by their logarithms of summed
exponentials. So keys and values are never gathered, and a run that several decoding sequences share
is read once for all of them. Dao et al., "FlashAttention", NeurIPS 2022, merge blocks like this;
Juravsky et al., "Hydragen", 2024, shared prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from cllm.backends.torch.cells import Run, Runs, cut


class Chunk(NamedTuple):
    """Several tokens of one sequence: the rows from ``begin`` to ``end`` of the batch. ``past``
    are the cells of the tokens before them.
    """

    begin: int
    end: int
    past: Runs


Numbers: TypeAlias = "slice | Tensor"


class Part(NamedTuple):
    """A run, and the ``readers`` that see it, as numbers of singles. If it is the ``first`` run of
    all of them, there is nothing to merge it with.
    """

    run: Run
    readers: Numbers
    first: bool


class Singles(NamedTuple):
    """Rows with one token each, those with the numbers ``rows`` of the batch. If some run is the
    first one of only some of its readers, it ``is_mixed``.
    """

    rows: Numbers
    parts: list[Part]
    is_mixed: bool


class Plan(NamedTuple):
    """What the rows of a batch attend to in layers with one window."""

    singles: Singles | None
    chunks: list[Chunk]
    window: int | None


def make_plan(
    rows: Iterable[tuple[int, int, Runs]], window: int | None, device: torch.device
) -> Plan:
    """``rows`` are the number of tokens before a row, its number of tokens, and their cells,
    those of the row included.
    """
    at, chunks = 0, []
    single_rows: list[int] = []
    readers: dict[Run, list[int]] = {}
    for start, count, runs in rows:
        first = 0 if window is None else max(0, start + 1 - window)
        if count == 1:
            for run in cut(runs, first, start + 1) if first else runs:
                readers.setdefault(run, []).append(len(single_rows))
            single_rows.append(at)
        else:
            chunks.append(Chunk(at, at + count, cut(runs, first, start)))
        at += count
    if not single_rows:
        return Plan(None, chunks, window)
    parts, seen, is_mixed = [], set[int](), False
    for run, numbers in readers.items():
        known = len(seen.intersection(numbers))
        is_mixed |= 0 < known < len(numbers)
        parts.append(Part(run, index(numbers, device), not known))
        seen.update(numbers)
    return Plan(Singles(index(single_rows, device), parts, is_mixed), chunks, window)


def index(numbers: list[int], device: torch.device) -> Numbers:
    """Return what selects rows; a slice costs less than a tensor."""
    first, end = numbers[0], numbers[-1] + 1
    if end - first == len(numbers):  # they are in order
        return slice(first, end)
    return torch.tensor(numbers, device=device)


def attend(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cells: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Return the outputs of all rows, shape (tokens, heads, head_size).

    ``query`` has this shape, too; ``key`` and ``value`` are those of the rows, (tokens, kv_heads,
    head_size), and ``cells`` those of the layer, with the rows' own, (kv_heads, cells, head_size).
    """
    singles = plan.singles
    if singles is not None and not plan.chunks:
        return attend_singles(singles, query, cells, scale)
    out = torch.empty_like(query)
    if singles is not None:
        out[singles.rows] = attend_singles(singles, query[singles.rows], cells, scale)
    for chunk in plan.chunks:
        part = slice(chunk.begin, chunk.end)
        out[part] = attend_chunk(
            chunk, plan.window, query[part], key[part], value[part], cells, scale
        )
    return out


def attend_singles(
    singles: Singles, query: Tensor, cells: tuple[Tensor, Tensor], scale: float
) -> Tensor:
    num_heads, size = query.shape[1:]
    kv_heads = cells[0].shape[0]
    # (kv_heads, singles, heads of a kv_head, head_size): a kv_head's queries are its rows
    query = query.view(-1, kv_heads, num_heads // kv_heads, size).transpose(0, 1)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if singles.is_mixed:  # all have seen nothing yet
        out.zero_()
        sums.fill_(-torch.inf)
    for run, readers, first in singles.parts:
        asking = query[:, readers]
        part, lse = attend_run(asking.flatten(1, 2), run, cells, scale)
        part, lse = part.view(asking.shape), lse.view(asking.shape[:3])
        if not first or singles.is_mixed:
            part, lse = merge(out[:, readers], sums[:, readers], part, lse)
        out[:, readers], sums[:, readers] = part, lse
    return out.transpose(0, 1).reshape(-1, num_heads, size)


def merge(one: Tensor, one_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge what the same queries found in two sets of keys."""
    lse = torch.logaddexp(one_lse, other_lse)
    share = (one_lse - lse).exp().unsqueeze(-1).to(one.dtype)
    return other.lerp(one, share), lse


def attend_run(
    query: Tensor, run: Run, cells: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """All of ``query``, shape (heads, queries, head_size), see the whole run."""
    begin, count = run
    keys, values = (each[:, begin : begin + count] for each in cells)
    return compute(query, keys, values, scale)


def attend_chunk(
    chunk: Chunk,
    window: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cells: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    num_past, count = sum(run.size for run in chunk.past), query.shape[1]
    if window is not None and num_past + count > window:
        # each token has a first one that it sees, so all keys are joined, with a mask
        keys, values = (
            torch.cat([*(each[:, begin : begin + n] for begin, n in chunk.past), own], dim=1)
            for each, own in zip(cells, (key, value), strict=True)
        )
        ends = torch.arange(num_past, num_past + count, device=query.device).unsqueeze(1)
        places = torch.arange(num_past + count, device=query.device)
        hidden = (places > ends) | (places <= ends - window)
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        return compute(query, keys, values, scale, mask.masked_fill_(hidden, -torch.inf))[
            0
        ].transpose(0, 1)
    out, lse = compute(query, key, value, scale, is_causal=True)
    for run in chunk.past:
        out, lse = merge(out, lse, *attend_run(query, run, cells, scale))
    return out.transpose(0, 1)


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, of the shape (heads, queries, head_size) of ``query``, and their
    logarithms of summed exponentials, (heads, queries), float32.

    Keys and values have fewer heads, of which each serves as many heads of queries.
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001  # the public function returns no sums
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            0.0,
            is_causal,
            attn_mask=mask,
            scale=scale,
        )
        return out[0], lse[0]
    num_heads, num_queries, size = query.shape
    grouped = query.reshape(key.shape[0], -1, size)
    scores = (grouped @ key.transpose(1, 2)).float().mul_(scale)
    scores = scores.view(num_heads, num_queries, -1)
    if is_causal:
        hidden = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device)
        scores.masked_fill_(hidden.triu(1), -torch.inf)
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().to(value.dtype)
    out = weights.view(key.shape[0], -1, key.shape[1]) @ value
    return out.view(num_heads, num_queries, size), lse
