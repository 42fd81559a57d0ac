"""The arrays of a llama_batch.

They live as long as their owner and are written through numpy views.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.passes import Pass


class BatchArrays:
    """The token, position and wants_logits of ``size`` tokens, and a pointer to the seq_id of each.

    The pointers are addresses in ``ids``, which is 0, 1, 2 and so on: ids_address + 4 * seq_id.
    """

    def __init__(self, size: int, num_ids: int) -> None:
        self.size = size
        self.token = np.zeros(size, np.int32)
        self.position = np.zeros(size, np.int32)
        self.wants_logits = np.zeros(size, np.int8)
        self._num_seq_ids = np.ones(size, np.int32)
        # llama_batch needs a pointer to the seq_id of each token
        self.ids = np.arange(num_ids, dtype=np.int32)
        self.ids_address: int = self.ids.ctypes.data
        self.seq_id_pointers = np.zeros(size, np.uint64)
        self.batch: Any = lib.llama_batch(
            n_tokens=0,
            token=self.token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self.position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._num_seq_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self.seq_id_pointers.ctypes.data_as(
                ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
            ),
            logits=self.wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill_plain(self, start: int, count: int) -> None:
        """Write ``count`` tokens 0 of the first sequence, from position ``start`` on. Their logits
        are wanted.
        """
        self.token[:count], self.wants_logits[:count] = 0, 1
        self.seq_id_pointers[:count] = self.ids_address
        self.position[:count] = range(start, start + count)
        self.batch.n_tokens = count

    def fill(self, rows: Pass) -> None:
        """Write the rows into the arrays.

        Padding comes after all needed tokens, so it changes no result.
        """
        at = 0
        for row in rows.rows:
            address, start, count = self.ids_address + 4 * row.seq.seq_id, row.start, row.size
            if max(count, rows.size) == 1:
                self.token[at] = row.seq.tokens[start]
                self.position[at] = start
                self.seq_id_pointers[at] = address
                self.wants_logits[at] = row.num_samples
                at += 1
                continue
            end = at + count
            stop = at + max(count, rows.size)
            self.token[at:end] = row.tokens
            self.token[end:stop] = 0
            self.position[at:stop] = range(start, start + stop - at)
            self.seq_id_pointers[at:stop] = address
            self.wants_logits[at:stop] = 0
            self.wants_logits[end - row.num_samples : end] = 1
            at = stop
        self.batch.n_tokens = at
