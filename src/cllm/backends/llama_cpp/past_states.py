"""Tells llama.cpp in which calls to keep past recurrent states.

If a context is made for them, llama.cpp keeps them in every call. Each step then takes longer, with
a small hybrid 4 % for one sequence and 15 % for 16, and prompts use the memory for them, too. But
only draft tokens are taken back. So this module changes llama.cpp's parameter between two calls. It
uses private structures of the version that library.py requires, and checks them.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as lib


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

    def __init__(self, context: Any) -> None:
        self._count = int(lib.llama_n_rs_seq(context))
        self._start = find_start(context) if self._count else None

    def keep(self, *, on: bool) -> None:
        """Keep past states in the next calls of llama_decode, or not."""
        if self._start is None or self._start.n_rs_seq == (count := self._count * on):
            return
        self._start.n_rs_seq = count
        # Only MTP contexts use this. llama.cpp would otherwise use the graph of the call before.
        self._start.nextn_layer_offset = count


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
