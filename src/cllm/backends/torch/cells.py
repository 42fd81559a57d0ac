"""The keys and values of all sequences in one pool of cells, a cell for each token.

A sequence's cells are a list of runs, cells with consecutive numbers. A copy lists the same runs,
so that a shared prefix is in memory once and no cell is ever moved. Attention reads a run where it
lies: sequences grow behind their last cell while that is free, so most have one run, or a shared
one and their own.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, share blocks of tokens by a table. Here a block is a token, as in TokenAttention of
LightLLM, and the table has runs instead of entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cllm.errors import EngineError


class Run(NamedTuple):
    """``size`` cells from ``begin`` on."""

    begin: int
    size: int


Runs = list[Run]


def cut(runs: Runs, start: int, end: int) -> Runs:
    """Return the part of ``runs`` from token ``start`` to token ``end``."""
    part, at = [], 0
    for begin, count in runs:
        first, last = max(start - at, 0), min(end - at, count)
        if first < last:
            part.append(Run(begin + first, last - first))
        at += count
        if at >= end:
            break
    return part


def index_cells(runs: Sequence[Run], device: torch.device) -> Tensor | slice:
    """Return the numbers of the cells of ``runs``."""
    if len(runs) == 1:
        return slice(runs[0].begin, sum(runs[0]))
    numbers = [np.arange(begin, begin + size) for begin, size in runs]
    return torch.from_numpy(np.concatenate(numbers)).to(device)


class Cells:
    """The cells of ``num_ids`` sequences.

    ``keys[layer]`` and ``values[layer]`` have the shape (kv_heads, num_cells, head_size): attention
    takes 0.7 to 0.9 of the time that it takes with the heads of a cell side by side.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        num_cells: int,
        num_ids: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``shape`` is the number of layers and of key-value heads, and the size of a head.

        On CPUs, the memory of a cell is taken when it is first written.
        """
        num_layers, num_heads, head_size = shape
        size = (num_layers, num_heads, num_cells, head_size)
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)
        self.num_cells, self.num_free = num_cells, num_cells
        self._uses = np.zeros(num_cells + 1, np.int32)  # how many sequences use a cell
        self._uses[-1] = 1  # ends the last gap
        self._runs: list[Runs] = [[] for _ in range(num_ids)]
        self._lengths = [0] * num_ids

    def length(self, seq_id: int) -> int:
        """Return the number of tokens of ``seq_id``. Raises EngineError for an unknown one."""
        if not 0 <= seq_id < len(self._lengths):
            raise EngineError(f"sequence id {seq_id} is not below {len(self._lengths)}")
        return self._lengths[seq_id]

    def runs(self, seq_id: int, start: int, end: int) -> Runs:
        """Return the cells of some tokens of a sequence."""
        runs = self._runs[seq_id]
        if start == 0 and end == self._lengths[seq_id]:
            return runs
        return cut(runs, start, end)

    def trim(self, seq_id: int, keep: int) -> None:
        length = self.length(seq_id)
        if not 0 <= keep < length:
            return
        for begin, count in cut(self._runs[seq_id], keep, length):
            uses = self._uses[begin : begin + count]
            uses -= 1
            self.num_free += count - int(np.count_nonzero(uses))
        self._runs[seq_id] = cut(self._runs[seq_id], 0, keep)
        self._lengths[seq_id] = keep

    def copy(self, source: int, target: int, count: int) -> None:
        """Let ``target`` use the first cells of ``source``, too."""
        if not 0 <= count <= self.length(source):
            raise EngineError(f"{count} tokens of sequence id {source} cannot be copied")
        if source == target:
            raise EngineError(f"sequence id {source} cannot be copied to itself")
        self.trim(target, 0)
        runs = cut(self._runs[source], 0, count)
        for begin, size in runs:
            self._uses[begin : begin + size] += 1
        self._runs[target], self._lengths[target] = runs, count

    def grow(self, seq_id: int, count: int) -> Runs:
        """Give a sequence ``count`` more cells, and return them.

        Raises EngineError if there are not so many.
        """
        if count > self.num_free:
            raise EngineError(f"{count} cells are needed, but only {self.num_free} are free")
        self.num_free -= count
        self._lengths[seq_id] += count
        runs, added = self._runs[seq_id], []
        while count:
            begin = sum(runs[-1]) if runs else self.num_cells
            size = self._measure_gap(begin, count)
            if not size:
                begin = self._find_gap(count)
                size = self._measure_gap(begin, count)
            self._uses[begin : begin + size] = 1
            if runs and sum(runs[-1]) == begin:
                runs = [*runs[:-1], Run(runs[-1].begin, runs[-1].size + size)]
            else:
                runs = [*runs, Run(begin, size)]
            added.append(Run(begin, size))
            count -= size
        self._runs[seq_id] = runs
        return added

    def _measure_gap(self, begin: int, most: int) -> int:
        """Return how many cells from ``begin`` on are free, up to ``most``."""
        uses = self._uses[begin : begin + most]
        used = uses.nonzero()[0]
        return int(used[0]) if len(used) else len(uses)

    def _find_gap(self, count: int) -> int:
        """Return where a new run begins: in the largest gap. Its first half, if that suffices, is
        left to the sequence before it.
        """
        is_free = np.concatenate(([False], self._uses == 0))
        edges = np.flatnonzero(is_free[1:] != is_free[:-1])
        begins, ends = edges[::2], edges[1::2]
        sizes = ends - begins
        i = int(sizes.argmax())
        begin, size = int(begins[i]), int(sizes[i])
        half = size // 2
        is_behind_a_sequence = begin > 0
        return begin + half if is_behind_a_sequence and size - half >= count else begin

    # --- states ----------------------------------------------------------------------------------

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * int(self.keys[:, :, 0].numel()) * int(self.keys.element_size())

    def read(self, seq_id: int) -> Tensor:
        """Return the bytes of a sequence's keys and values, on the CPU."""
        runs = self._runs[seq_id]
        parts = [
            torch.stack(
                (self.keys[:, :, begin : begin + count], self.values[:, :, begin : begin + count])
            )
            for begin, count in runs
        ]
        whole = torch.cat(parts, dim=3) if parts else self.keys[:, :0].new_empty(0)
        return whole.cpu().contiguous().view(torch.uint8).reshape(-1)

    def write(self, seq_id: int, state: Tensor, num_tokens: int, count: int) -> None:
        """Replace a sequence's tokens by the first ``count`` of the ``num_tokens`` in ``state``.

        Raises EngineError if there are not enough cells for all of them.
        """
        self.trim(seq_id, 0)
        if num_tokens > self.num_free:
            raise EngineError(f"{num_tokens} cells are needed, but {self.num_free} are free")
        num_layers, num_heads, _, head_size = self.keys.shape
        shape = (2, num_layers, num_heads, num_tokens, head_size)
        whole = state.view(self.keys.dtype).view(shape)
        at = 0
        for begin, size in self.grow(seq_id, count):
            part = whole[:, :, :, at : at + size].to(self.keys.device)
            self.keys[:, :, begin : begin + size], self.values[:, :, begin : begin + size] = part
            at += size

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        uses = np.zeros_like(self._uses)
        uses[-1] = 1
        for runs, length in zip(self._runs, self._lengths, strict=True):
            assert sum(run.size for run in runs) == length, (runs, length)
            for begin, count in runs:
                assert count > 0, runs
                uses[begin : begin + count] += 1
        assert (uses == self._uses).all(), "stale uses"
        assert self.num_free == int((self._uses == 0).sum()), "stale number of free cells"
