"""Tells llama.cpp in which calls to keep past recurrent states.

If a context is made for them, llama.cpp keeps them in every call. Each step then takes longer, with
a small hybrid 4 % for one sequence and 15 % for 16, and prompts use the memory for them, too. But
only draft tokens are taken back. So this module changes llama.cpp's parameter between two calls. It
uses private structures of the version that library.py requires, and checks them.

Where the memory for past states is taken when it is used, it is given back when more sequences have
had draft tokens than there is memory for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Run
from typing import Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.fit import MAX_DRAFTING
from cllm.backends.llama_cpp.ggml_memory import StateRows
from cllm.backends.llama_cpp.mappings import renew_pages
from cllm.core.batch import Row


class ContextStart(ctypes.Structure):
    """The beginning of llama_context of llama-context.h: the model and llama_cparams."""

    _fields_ = (
        ("model", ctypes.c_void_p),
        ("n_ctx", ctypes.c_uint32),
        ("n_ctx_seq", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("nextn_layer_offset", ctypes.c_int32),
    )


class PastStates:
    """The past states of one context."""

    def __init__(self, context: Any, tensors: Run[StateRows]) -> None:
        """``tensors`` have the states, if their memory is taken when it is used."""
        self._count = int(lib.llama_n_rs_seq(context))
        self._start = find_start(context) if self._count else None
        self._tensors = tensors
        # seq_id -> the most draft tokens since the memory was given back
        self._drafted: dict[int, int] = {}
        self._num_last = 0  # draft tokens in the last step that had any
        # seq_ids whose state may be a past one until their next tokens are computed
        self.went_back: set[int] = set()

    def prepare(self, rows: list[Row]) -> None:
        """Keep past states in the next call of llama_decode if ``rows`` have draft tokens."""
        self.went_back.difference_update(row.seq.seq_id for row in rows)
        num_drafted = sum(len(row.draft) for row in rows)
        self._keep(on=num_drafted > 0)
        if num_drafted:
            self._num_last = num_drafted
            for row in rows:
                count = max(self._drafted.get(row.seq.seq_id, 0), len(row.draft))
                self._drafted[row.seq.seq_id] = count

    def _keep(self, *, on: bool) -> None:
        if self._start is None or self._start.n_rs_seq == (count := self._count * on):
            return
        self._start.n_rs_seq = count
        # Only MTP contexts use this. llama.cpp would otherwise use the graph of the call before.
        self._start.nextn_layer_offset = count

    @property
    def is_too_large(self) -> bool:
        """Whether past states take more memory than there is for them, and than they need."""
        if not self._tensors:
            return False
        most = max(self._count * MAX_DRAFTING, 2 * self._num_last)
        return sum(self._drafted.values()) > most

    def free(self) -> None:
        """Give the memory back. No sequence may need its past states any more."""
        for address, row_bytes, num_rows in self._tensors:
            num_current = num_rows // (1 + self._count)
            renew_pages(address + num_current * row_bytes, (num_rows - num_current) * row_bytes)
        self._drafted.clear()
        self.went_back.clear()


def find_start(context: Any) -> ContextStart | None:
    """Return the beginning of ``context``; None if it is not as expected."""
    start = ContextStart.from_address(ctypes.cast(context, ctypes.c_void_p).value or 0)
    expected = {
        "n_ctx": lib.llama_n_ctx,
        "n_ctx_seq": lib.llama_n_ctx_seq,
        "n_batch": lib.llama_n_batch,
        "n_ubatch": lib.llama_n_ubatch,
        "n_seq_max": lib.llama_n_seq_max,
        "n_rs_seq": lib.llama_n_rs_seq,
        "n_threads": lib.llama_n_threads,
        "n_threads_batch": lib.llama_n_threads_batch,
    }
    if any(getattr(start, name) != read(context) for name, read in expected.items()):
        return None
    return start if start.nextn_layer_offset == 0 else None
