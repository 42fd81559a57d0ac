"""Gives back the memory in which llama.cpp has written that no cell is in use.

For each cell of each stream, llama.cpp keeps a position, a token, a shift and a set of owners, and
writes them when it creates or clears a context. Shifts and owners, 36 of 52 bytes, are zero until a
cell is used. The system provides zeros without memory for them, if it gets these pages back.

This uses private structures of the version that library.py requires. It checks them, and gives back
nothing that is not zero.
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from cllm.backends.llama_cpp.mappings import renew_pages

WORD = 8
# numbers of words in llama_kv_cache_iswa and llama_kv_cache, see llama-kv-cache-iswa.h and
# llama-kv-cache.h
CACHES, CELLS_OWNER, CELLS = (2, 3), 22, 24
CELLS_WORDS, VECTORS = 1555, 7  # of llama_kv_cells, see llama-kv-cells.h
VECTOR_BYTES = (4, 12, 4, 32)  # for each cell: position, extra (token), shift, owners
ZEROS = (2, 3)  # the vectors that are zero


def release_unused(memory: int, num_caches: int, num_streams: int, num_cells: int) -> int:
    """Give back what is zero in the cells at ``memory``, a llama_memory_t that has no tokens.

    There are ``num_caches`` with ``num_streams`` of ``num_cells`` each. Return the number of bytes,
    0 if the structures are unknown.
    """
    released = 0
    unreadable = suppress(OSError, OverflowError, struct.error)
    with unreadable, Path("/proc/self/mem").open("rb", buffering=0) as file:

        def read(address: int, first: int, count: int) -> tuple[int, ...]:
            data = os.pread(file.fileno(), count * WORD, address + first * WORD)
            return struct.unpack(f"{count}Q", data)

        caches = [memory]
        if num_caches > 1:
            caches = [read(memory, word, 1)[0] for word in CACHES]
        for cache in caches:
            owned, cells = (read(cache, word, 1)[0] for word in (CELLS_OWNER, CELLS))
            begin, end = read(cells, 0, 2)
            if owned != cells or end - begin != num_streams * CELLS_WORDS * WORD:
                return released
            for stream in range(begin, end, CELLS_WORDS * WORD):
                words = read(stream, VECTORS, 3 * len(VECTOR_BYTES))
                sizes = [last - first for first, last in zip(words[::3], words[1::3], strict=True)]
                if sizes != [num_cells * each for each in VECTOR_BYTES]:
                    return released
                for vector in ZEROS:
                    released += release_zeros(words[3 * vector], sizes[vector])
    return released


def release_zeros(address: int, size: int) -> int:
    """Give back pages that are zero; return the number of bytes, 0 if one is not zero."""
    data = np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(address))
    return size if not data.any() and renew_pages(address, size) else 0
