"""Attention of the rows of a batch to cells that lie in runs.

A token attends to each run by itself, and the results are merged by their logarithms of summed
exponentials. So keys and values are not gathered, except from many short runs, and a run that
several decoding sequences share is read once for all of them. Dao et al., "FlashAttention",
NeurIPS 2022, merge blocks like this; Juravsky et al., "Hydragen", 2024, shared prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from cllm.backends.torch.cells import Run, Runs, cut, index_cells

Numbers: TypeAlias = "slice | Tensor"
# More runs of fewer tokens are gathered: a call takes as long as attention to some tens of tokens.
SHORT_RUN, MAX_SHORT_RUNS = 32, 3


class Chunk(NamedTuple):
    """Several tokens of one sequence: the rows from ``begin`` to ``end`` of the batch.

    ``past`` are the cells of the ``num_past`` tokens before them. With a window, they are one part,
    in order.
    """

    begin: int
    end: int
    past: list[Numbers]
    num_past: int


class Part(NamedTuple):
    """Cells, and the ``readers`` that see them, as numbers of singles. If it is the ``first`` part
    of all of them, there is nothing to merge it with.
    """

    cells: Numbers
    readers: Numbers
    first: bool


class Singles(NamedTuple):
    """Rows with one token each, those with the numbers ``rows`` of the batch. If some part is
    the first one of only some of its readers, it ``is_mixed``.
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
    readers: dict[tuple[Run, ...], list[int]] = {}
    for start, count, runs in rows:
        first = 0 if window is None else max(0, start + 1 - window)
        if count == 1:
            for part in group(cut(runs, first, start + 1) if first else runs):
                readers.setdefault(part, []).append(len(single_rows))
            single_rows.append(at)
        else:
            past = cut(runs, first, start)
            groups = group(past) if window is None or not past else [tuple(past)]
            parts = [index_cells(each, device) for each in groups]
            chunks.append(Chunk(at, at + count, parts, start - first))
        at += count
    if not single_rows:
        return Plan(None, chunks, window)
    shared, seen, is_mixed = [], set[int](), False
    for runs_read, numbers in readers.items():
        known = len(seen.intersection(numbers))
        is_mixed |= 0 < known < len(numbers)
        cells = index_cells(runs_read, device)
        shared.append(Part(cells, index(numbers, device), not known))
        seen.update(numbers)
    return Plan(Singles(index(single_rows, device), shared, is_mixed), chunks, window)


def group(runs: Runs) -> list[tuple[Run, ...]]:
    """Return the runs that attention reads one after the other, and those that it gathers."""
    short = tuple(run for run in runs if run.size < SHORT_RUN)
    if len(short) <= MAX_SHORT_RUNS:
        return [(run,) for run in runs]
    return [*((run,) for run in runs if run.size >= SHORT_RUN), short]


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
    for part_cells, readers, first in singles.parts:
        asking = query[:, readers]
        part, lse = attend_part(asking.flatten(1, 2), part_cells, cells, scale)
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


def attend_part(
    query: Tensor, part: Numbers, cells: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """All of ``query``, shape (heads, queries, head_size), see all cells of the part."""
    return compute(query, cells[0][:, part], cells[1][:, part], scale)


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
    num_past, count = chunk.num_past, query.shape[1]
    if window is not None and num_past + count > window:
        # each token has a first one that it sees, so all keys are joined, with a mask
        keys, values = (
            torch.cat([*(each[:, part] for part in chunk.past), own], dim=1)
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
    for part in chunk.past:
        out, lse = merge(out, lse, *attend_part(query, part, cells, scale))
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
