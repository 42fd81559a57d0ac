"""Saves the state of a sequence in RAM and loads it again, possibly into another layout.

The state of attention becomes portable if only the nonzero counts and their cells are kept, with
the same head before them and the same zeros after them (see state_format.py). If there are two
caches, what is between their cells is removed, and inserted for libllama again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import last_error
from cllm.backends.llama_cpp.mappings import MAP_NORESERVE
from cllm.backends.llama_cpp.paged_memory import NotPaged, PagedMemory, Rows
from cllm.backends.llama_cpp.state_format import (
    CELL,
    DAMAGED,
    HEAD,
    LAYERS_HEAD,
    ROWS_HEAD,
    WORD,
    Bytes,
    Cache,
    as_bytes,
    join_caches,
    read_cache,
)
from cllm.errors import EngineError

CHECKPOINT = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
KEYS = b"cache_k"  # prefix of the names of libllama's key tensors


class States:
    """Saves and loads the states of one context.

    A portable saved state is one array: a head, the sequence's count and cells in each cache, and
    zeros for the other streams. Any other saved state is what libllama wrote. ``head`` is that
    head, ``tail`` the number of bytes of these zeros, and ``between`` what libllama needs between
    the cells of two caches.
    """

    def __init__(self, context: Any, max_num_seqs: int, layout: str, *, portable: bool) -> None:
        """``portable`` is true if the model's only memory is attention."""
        self._context = context
        self._num_seqs = max_num_seqs
        self._num_streams = 1 if layout == "unified" else max_num_seqs
        self.tail = WORD * (max_num_seqs - 1) if portable else 0
        self._portable = portable
        size = int(lib.llama_state_seq_get_size(context, 0))
        empty = np.empty(size, np.uint8)
        lib.llama_state_seq_get_data(context, pointer_to(empty), size, 0)
        self.head = empty[:HEAD].tobytes()
        self.between = bytes(self.tail) + self.head[-WORD:]
        self._has_windows = False

    def measure_checkpoint(self) -> int:
        """Return the size of a checkpoint of seq_id 0, which has tokens."""
        return int(lib.llama_state_seq_get_size_ext(self._context, 0, CHECKPOINT))

    def save_checkpoint(self, seq_id: int) -> Bytes:
        """Return the part of the state of ``seq_id`` that cannot be trimmed. Raises EngineError."""
        size = int(lib.llama_state_seq_get_size_ext(self._context, seq_id, CHECKPOINT))
        state = np.empty(size, np.uint8)
        saved = lib.llama_state_seq_get_data_ext(
            self._context, pointer_to(state), size, seq_id, CHECKPOINT
        )
        if not size or saved != size:
            raise EngineError(f"the state of sequence id {seq_id} cannot be saved")
        return state

    def load_checkpoint(self, seq_id: int, state: Bytes) -> None:
        """Replace the part of the state of ``seq_id`` that cannot be trimmed.

        Raises EngineError if libllama rejects it; ``seq_id`` may then contain anything.
        """
        size = len(state)
        loaded = lib.llama_state_seq_set_data_ext(
            self._context, pointer_to(state), size, seq_id, CHECKPOINT
        )
        if loaded != size:
            raise EngineError(
                f"the state for sequence id {seq_id} cannot be loaded: "
                f"{last_error('no reason given')}"
            )

    def save(self, seq_id: int) -> Bytes:
        """Return the state of ``seq_id``. Raises EngineError if libllama does not save it."""
        size = int(lib.llama_state_seq_get_size(self._context, seq_id))
        # zeros of the streams before
        before = self._count_zeros(seq_id) if self._portable else 0
        # and of those after
        behind = WORD * (self._num_streams - 1) - before if self._portable else 0
        state = np.empty(size - behind + self.tail, np.uint8)
        if lib.llama_state_seq_get_data(self._context, pointer_to(state), size, seq_id) != size:
            raise EngineError(f"the state of sequence id {seq_id} cannot be saved")
        state[size - behind :] = 0
        return self._complete(seq_id, state[before:]) if self._has_windows else state[before:]

    def _count_zeros(self, seq_id: int) -> int:
        """Return the bytes of the counts of the streams before that of ``seq_id``."""
        return WORD * seq_id if self._num_streams > 1 else 0

    def _complete(self, seq_id: int, state: Bytes) -> Bytes:
        """Return a saved state with the cells of both caches, from one that libllama has written.

        In the layers with a window, libllama leaves out the tokens before that of the next token.
        If later tokens are removed, it saves these, too.
        """
        first = read_cache(state, HEAD)
        parts = [read_cache(state, first.end + len(self.between))]
        is_complete = len(parts[0].cells) == len(first.cells)
        while (keep := int(parts[0].cells[:, 0].min(initial=len(first.cells)))) > 0:
            lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), seq_id, keep, -1)
            part = read_cache(self.save_checkpoint(seq_id), HEAD + self._count_zeros(seq_id))
            parts.insert(0, part)
        zeros = np.zeros(self.tail, np.uint8)
        state = np.concatenate([state[: first.end], *join_caches(parts), zeros])
        if not is_complete:
            self.load(seq_id, state)  # with the tokens that were removed
        return state

    def load(self, seq_id: int, state: Bytes) -> None:
        """Load ``state`` into ``seq_id``.

        Raises EngineError if libllama rejects it; ``seq_id`` may then contain anything.
        """
        size = len(state)
        if self._portable:
            state[:HEAD] = np.frombuffer(self.head, np.uint8)
            size -= self.tail - WORD * (self._num_streams - 1)
        if self._has_windows:
            end = read_cache(state, HEAD).end
            state = np.concatenate([state[:end], as_bytes(self.between), state[end:]])
            size += len(self.between)
        if lib.llama_state_seq_set_data(self._context, pointer_to(state), size, seq_id) != size:
            raise EngineError(
                f"the state for sequence id {seq_id} cannot be loaded: "
                f"{last_error('no reason given')}"
            )

    def saved_part(self, state: Bytes) -> memoryview:
        """Return the part of ``state`` that is saved to a file, which never changes."""
        return state[HEAD : len(state) - self.tail].data if self._portable else state.data

    def new_state_buffer(self, num_bytes: int) -> Bytes:
        """Return a state with an unfilled ``saved_part`` of ``num_bytes`` bytes."""
        state = np.empty((HEAD if self._portable else 0) + num_bytes + self.tail, np.uint8)
        state[len(state) - self.tail :] = 0
        return state

    def learn(self, *, windowed: bool) -> list[Cache]:
        """Return the caches in the state of seq_id 0, which has one token; none if states are not
        portable, or of an unknown format.

        Those of a model with sliding windows are portable only if it has two caches.
        """
        caches: list[Cache] = []
        if self._portable:
            with suppress(EngineError):
                caches = self.read(self.save(0), gap=len(self.between))
        self._has_windows = len(caches) > 1
        if windowed and not self._has_windows:
            self._portable, self.tail = False, 0
            return []
        return caches

    def read(self, state: Bytes, gap: int = 0) -> list[Cache]:
        """Return the caches of a portable ``state``, with ``gap`` bytes between them.

        Raises EngineError if it is damaged.
        """
        end = len(state) - self.tail
        caches = [read_cache(state[:end], HEAD)]
        if caches[0].end < end:
            caches.append(read_cache(state[:end], caches[0].end + gap))
        if caches[-1].end < end:
            raise EngineError(DAMAGED)
        return caches


class CachePlace(NamedTuple):
    """Where a cache is in a state: its beginning and end, and those of the rows of each tensor."""

    begin: int
    end: int
    rows: list[tuple[int, int, Rows]]


class PagedStates:
    """Makes the states of a context whose cells are in paged memory, without libllama's help.

    libllama finds a token's cell by the positions that it keeps for each stream. When paged memory
    gives a stream a prefix, libllama loads the positions from a state whose rows it does not read.
    """

    def __init__(self, context: Any, states: States, memory: PagedMemory, max_tokens: int) -> None:
        """Raises NotPaged if the system refuses the addresses for the longest state."""
        self._context = context
        self._states = states
        self._memory = memory
        self._max_tokens = max_tokens
        self._caches: list[list[Rows]] = [
            [] for _ in range(1 + max(rows.cache for rows in memory.tensors))
        ]
        for rows in sorted(memory.tensors, key=lambda rows: not rows.name.startswith(KEYS)):
            self._caches[rows.cache].append(rows)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:  # only the pages that are written take memory
            size = self._compute_size(max_tokens, states.between)
            self._scratch = mmap.mmap(-1, size, flags)
        except OSError as error:
            raise NotPaged(f"the system refuses addresses: {error.strerror}") from None
        self._pointer = ctypes.pointer(ctypes.c_uint8.from_buffer(self._scratch))

    def _compute_size(self, num_tokens: int, between: bytes = b"") -> int:
        """Return the size of a saved state, or of the longer one that libllama gets."""
        return self._find_caches(num_tokens, between)[-1].end + self._states.tail

    def _find_caches(self, num_tokens: int, between: bytes = b"") -> list[CachePlace]:
        """Return where the caches are in a state of ``num_tokens``."""
        caches: list[CachePlace] = []
        begin = HEAD
        for tensors in self._caches:
            end = begin + WORD + num_tokens * CELL + (LAYERS_HEAD.size if num_tokens else 0)
            places: list[tuple[int, int, Rows]] = []
            for rows in tensors if num_tokens else ():
                first = end + ROWS_HEAD.size
                end = first + num_tokens * rows.row_bytes
                places.append((first, end, rows))
            caches.append(CachePlace(begin, end, places))
            begin = end + len(between)
        return caches

    def _describe(self, num_tokens: int, between: bytes = b"") -> Iterator[tuple[int, bytes]]:
        """Yield the parts of a state that are neither rows nor zeros: the place and the bytes."""
        cells = np.zeros((num_tokens, 3), np.int32)
        cells[:, 0], cells[:, 1] = np.arange(num_tokens), 1
        described = num_tokens.to_bytes(WORD, "little") + cells.tobytes()
        before = self._states.head
        for cache in self._find_caches(num_tokens, between):
            yield cache.begin - len(before), before + described
            before = between
            if num_tokens:
                num_layers = sum(rows.name.startswith(KEYS) for _, _, rows in cache.rows)
                # the values are not transposed
                yield cache.begin + len(described), LAYERS_HEAD.pack(0, num_layers)
            for begin, _, rows in cache.rows:
                yield begin - ROWS_HEAD.size, ROWS_HEAD.pack(rows.type, rows.row_bytes)

    def set_positions(self, seq_id: int, num_tokens: int) -> None:
        """Give ``seq_id`` the positions 0 to ``num_tokens`` - 1. Its memory does not change."""
        between = self._states.between
        for at, data in self._describe(num_tokens, between):
            self._scratch[at : at + len(data)] = data
        size = self._compute_size(num_tokens, between)
        done = lib.llama_state_seq_set_data(self._context, self._pointer, size, seq_id)
        self._scratch.madvise(mmap.MADV_DONTNEED)  # all zeros again
        if done != size:
            raise EngineError(f"cannot set the positions of sequence id {seq_id}: {last_error('')}")

    def make(self, key: int) -> Bytes:
        """Return the state of the snapshot ``key`` of the memory, as ``States.save`` would."""
        num_tokens = self._memory.count_saved(key) or 0
        state = np.zeros(self._compute_size(num_tokens), np.uint8)
        for at, data in self._describe(num_tokens):
            state[at : at + len(data)] = np.frombuffer(data, np.uint8)
        for cache in self._find_caches(num_tokens):
            for begin, end, rows in cache.rows:
                self._memory.read(key, rows, state[begin:end].data)
        return state

    def install(self, key: int, state: Bytes) -> None:
        """Make ``state``, a state of this context, the snapshot ``key`` of the memory.

        Its cells may be in any order. Raises EngineError if there are too many.
        """
        caches = self._states.read(state)
        count = len(caches[0].cells)
        if count > self._max_tokens:
            raise EngineError(f"a saved state of {count} tokens is too long")
        self._memory.install(key, count, self._sort(caches))

    def _sort(self, caches: list[Cache]) -> Iterator[tuple[Rows, memoryview]]:
        """Yield each tensor with its rows, sorted by position."""
        for tensors, cache in zip(self._caches, caches, strict=True):
            order = np.argsort(cache.cells[:, 0])
            for rows, (_, data) in zip(tensors, cache.rows, strict=True):
                yield rows, data[0, order].data.cast("B")


def pointer_to(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
