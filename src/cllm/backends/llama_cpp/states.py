"""Saves the state of a sequence in RAM and loads it again, possibly into another layout.

libllama writes a state as a head (a magic number, the seq_id, the number of streams) and then, for
each stream, a count of cells and the cells. All counts but one are zero. Unified cells are one
stream; partitioned cells are one stream per sequence. So the state of plain attention becomes
portable if only the nonzero count and its cells are kept, with a head before them and zeros after
them. (Found in llama_kv_cache::state_write of the version that library.py requires; the contract
test loads states across layouts.)
"""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import last_error
from cllm.backends.llama_cpp.mappings import MAP_NORESERVE
from cllm.backends.llama_cpp.paged_memory import NotPaged, PagedMemory, Rows
from cllm.errors import EngineError

Bytes = npt.NDArray[np.uint8]
Form = tuple[tuple[int, ...], ...]
WORD = 4  # bytes in a count
HEAD = 3 * WORD
CELLS = HEAD + WORD  # where the cells begin
CELL = 3 * WORD  # position, number of owners, owner
LAYERS_HEAD = struct.Struct("<II")  # before all rows: whether values are transposed, and layers
ROWS_HEAD = struct.Struct("<iQ")  # before the rows of a tensor: their type, and bytes in a row
MAX_LAYERS = 10_000
# before transposed values: their type, bytes in an element, and elements of a token
VALUES_HEAD = struct.Struct("<iII")
CHECKPOINT = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
KEYS = b"cache_k"  # prefix of the names of libllama's key tensors


class States:
    """Saves and loads the states of one context.

    A portable saved state is one array: a head, the sequence's count and cells, and zeros for the
    other streams. Any other saved state is what libllama wrote. ``head`` is that head, and ``tail``
    the number of bytes of these zeros.
    """

    def __init__(self, context: Any, max_num_seqs: int, layout: str, *, portable: bool) -> None:
        """``portable`` is true if the model's only memory is plain attention."""
        self._context = context
        self._num_seqs = max_num_seqs
        self._num_streams = 1 if layout == "unified" else max_num_seqs
        self.tail = WORD * (max_num_seqs - 1) if portable else 0
        self._portable = portable
        size = int(lib.llama_state_seq_get_size(context, 0))
        empty = np.empty(size, np.uint8)
        lib.llama_state_seq_get_data(context, pointer_to(empty), size, 0)
        self.head = empty[:HEAD].tobytes()

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
        before = WORD * seq_id if self._portable and self._num_streams > 1 else 0
        # and of those after
        behind = WORD * (self._num_streams - 1) - before if self._portable else 0
        state = np.empty(size - behind + self.tail, np.uint8)
        if lib.llama_state_seq_get_data(self._context, pointer_to(state), size, seq_id) != size:
            raise EngineError(f"the state of sequence id {seq_id} cannot be saved")
        state[size - behind :] = 0
        return state[before:]

    def load(self, seq_id: int, state: Bytes) -> None:
        """Load ``state`` into ``seq_id``.

        Raises EngineError if libllama rejects it; ``seq_id`` may then contain anything.
        """
        size = len(state)
        if self._portable:
            state[:HEAD] = np.frombuffer(self.head, np.uint8)
            size -= self.tail - WORD * (self._num_streams - 1)
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

    def read_form(self, state: Bytes, num_tokens: int) -> Form | None:
        """Return the types and sizes of the rows of a portable ``state``; None if it is not one of
        ``num_tokens``.

        libllama can load a state whose form is that of a state it has saved.
        """
        if not self._portable or len(state) < CELLS + self.tail:
            return None
        end = len(state) - self.tail
        count = int.from_bytes(state[HEAD:CELLS].tobytes(), "little")
        at = CELLS + count * CELL
        if count != num_tokens or at + LAYERS_HEAD.size > end or not has_positions(state, count):
            return None
        is_transposed, num_layers = LAYERS_HEAD.unpack_from(state.data, at)
        if num_layers > MAX_LAYERS:
            return None
        at += LAYERS_HEAD.size
        form: list[tuple[int, ...]] = [(is_transposed,)]
        for part in range(2 * num_layers):
            head = VALUES_HEAD if is_transposed and part >= num_layers else ROWS_HEAD
            if at + head.size > end:
                return None
            kind, *sizes = head.unpack_from(state.data, at)
            form.append((kind, *sizes))
            at += head.size + count * math.prod(sizes)
        return tuple(form) if at == end else None


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
        keys = [rows for rows in memory.tensors if rows.name.startswith(KEYS)]
        self._tensors = [*keys, *(rows for rows in memory.tensors if rows not in keys)]
        self._before_rows = struct.pack("<II", 0, len(keys))  # the values are not transposed
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:  # only the pages that are written take memory
            self._scratch = mmap.mmap(-1, self._compute_size(max_tokens), flags)
        except OSError as error:
            raise NotPaged(f"the system refuses addresses: {error.strerror}") from None
        self._pointer = ctypes.pointer(ctypes.c_uint8.from_buffer(self._scratch))

    def _compute_size(self, num_tokens: int) -> int:
        rows = self._find_rows(num_tokens)
        return (rows[-1][1] if rows else CELLS) + self._states.tail

    def _find_rows(self, num_tokens: int) -> list[tuple[int, int, Rows]]:
        """Return each tensor with the places in a state where its rows begin and end."""
        end = CELLS + num_tokens * CELL + len(self._before_rows)
        places: list[tuple[int, int, Rows]] = []
        for rows in self._tensors if num_tokens else ():
            begin = end + ROWS_HEAD.size
            end = begin + num_tokens * rows.row_bytes
            places.append((begin, end, rows))
        return places

    def _describe(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of a state that are neither rows nor zeros: the place and the bytes."""
        yield 0, self._states.head + struct.pack("<I", num_tokens)
        cells = np.zeros((num_tokens, 3), np.int32)
        cells[:, 0], cells[:, 1] = np.arange(num_tokens), 1
        yield CELLS, cells.tobytes()
        yield from self._describe_rows(num_tokens)

    def _describe_rows(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of a state that precede rows: the place and the bytes."""
        if num_tokens:
            yield CELLS + num_tokens * CELL, self._before_rows
        for begin, _, rows in self._find_rows(num_tokens):
            yield begin - ROWS_HEAD.size, ROWS_HEAD.pack(rows.type, rows.row_bytes)

    def set_positions(self, seq_id: int, num_tokens: int) -> None:
        """Give ``seq_id`` the positions 0 to ``num_tokens`` - 1. Its memory does not change."""
        for at, data in self._describe(num_tokens):
            self._scratch[at : at + len(data)] = data
        size = self._compute_size(num_tokens)
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
        for begin, end, rows in self._find_rows(num_tokens):
            self._memory.read(key, rows, state[begin:end].data)
        return state

    def install(self, key: int, state: Bytes) -> None:
        """Make ``state`` the snapshot ``key`` of the memory.

        Its cells may be in any order. Raises EngineError if it is not a state of this context.
        """
        count = int.from_bytes(state[HEAD:CELLS].tobytes(), "little")
        if len(state) < CELLS or not self._fits(state, count):
            raise EngineError("a saved state is damaged, or of another model or type of cells")
        order = np.argsort(read_cells(state, count)[:, 0])

        def sort(begin: int, end: int, rows: Rows) -> tuple[Rows, memoryview]:
            data = state[begin:end].reshape(count, rows.row_bytes)
            return rows, data[order].data.cast("B")

        self._memory.install(key, count, (sort(*place) for place in self._find_rows(count)))

    def _fits(self, state: Bytes, count: int) -> bool:
        """Return whether ``state`` is a state of ``count`` tokens of this context."""
        if count > self._max_tokens or len(state) != self._compute_size(count):
            return False
        return has_positions(state, count) and all(
            state[at : at + len(data)].tobytes() == data for at, data in self._describe_rows(count)
        )


def read_cells(state: Bytes, count: int) -> npt.NDArray[np.int32]:
    """Return the position, the number of owners and the owner of each of ``count`` cells."""
    return state[CELLS : CELLS + count * CELL].view(np.int32).reshape(count, 3)


def has_positions(state: Bytes, count: int) -> bool:
    """Return whether the cells of a state have the positions 0 to ``count`` - 1, in any order, and
    one owner each.
    """
    cells = read_cells(state, count)
    return bool((cells[:, 1] == 1).all()) and bool((np.sort(cells[:, 0]) == np.arange(count)).all())


def pointer_to(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
