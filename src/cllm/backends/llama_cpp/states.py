"""Saves the state of a sequence in RAM and loads it again, maybe into another layout.

libllama writes a state as a head (a magic number, the seq_id, the number of streams) and then, for
each stream, a count of cells and the cells. All counts but one are zero. Unified cells are one
stream; partitioned cells are one stream per sequence. So the state of plain attention becomes
portable if only the nonzero count and its cells are kept, with a head before them and zeros after
them. (Found in llama_kv_cache::state_write of the version that library.py requires; the contract
test loads states across layouts.)
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import last_error
from cllm.errors import EngineError

Bytes = npt.NDArray[np.uint8]
WORD = 4  # bytes of a count
HEAD = 3 * WORD


class States:
    """Saves and loads the states of one context.

    A portable saved state is one array: a head, the sequence's count and cells, and zeros for the
    other streams. Any other saved state is what libllama wrote.
    """

    def __init__(self, context: Any, max_num_seqs: int, layout: str, *, portable: bool) -> None:
        """``portable``: the model's only memory is plain attention."""
        self._context = context
        self._num_seqs = max_num_seqs
        self._num_streams = 1 if layout == "unified" else max_num_seqs
        self._tail = WORD * (max_num_seqs - 1) if portable else 0
        self._portable = portable
        size = int(lib.llama_state_seq_get_size(context, 0))
        empty = np.empty(size, np.uint8)
        lib.llama_state_seq_get_data(context, pointer_to(empty), size, 0)
        self._head = empty[:HEAD]

    def save(self, seq_id: int) -> Bytes:
        """Return the state of ``seq_id``. Raises EngineError if libllama does not save it."""
        size = int(lib.llama_state_seq_get_size(self._context, seq_id))
        # zeros of the streams before
        before = WORD * seq_id if self._portable and self._num_streams > 1 else 0
        # and of those after
        behind = WORD * (self._num_streams - 1) - before if self._portable else 0
        state = np.empty(size - behind + self._tail, np.uint8)
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
            state[:HEAD] = self._head
            size -= self._tail - WORD * (self._num_streams - 1)
        if lib.llama_state_seq_set_data(self._context, pointer_to(state), size, seq_id) != size:
            raise EngineError(
                f"the state for sequence id {seq_id} cannot be loaded: "
                f"{last_error('no reason given')}"
            )

    def saved_part(self, state: Bytes) -> memoryview:
        """Return the part of ``state`` that is saved to a file, which never changes."""
        return state[HEAD : len(state) - self._tail].data if self._portable else state.data

    def new_state_buffer(self, num_bytes: int) -> Bytes:
        """Return a state with an unfilled ``saved_part`` of ``num_bytes`` bytes."""
        state = np.empty((HEAD if self._portable else 0) + num_bytes + self._tail, np.uint8)
        state[len(state) - self._tail :] = 0
        return state


def pointer_to(state: Bytes) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
