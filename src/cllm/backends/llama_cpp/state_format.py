"""The format of a sequence's state, as libllama saves it.

A state is a head (a magic number, the seq_id, the number of streams) and then, for each stream, a
count of cells and the cells: their positions and owners, and the rows of each layer. All counts but
one are zero. Unified cells are one stream; partitioned cells are one stream per sequence. If some
layers have a sliding window, their cells are a second cache. It follows the first one in the same
form: the number of streams, counts, cells.

(Found in llama_kv_cache::state_write and llama_kv_cache_iswa::state_write of the version that
library.py requires; the contract test loads states across layouts.)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.errors import EngineError

Bytes = npt.NDArray[np.uint8]
Form = tuple[tuple[bytes, ...], ...]  # for each cache
WORD = 4  # bytes in a count
HEAD = 3 * WORD
CELL = 3 * WORD  # position, number of owners, owner
LAYERS_HEAD = struct.Struct("<II")  # before all rows: whether values are transposed, and layers
ROWS_HEAD = struct.Struct("<iQ")  # before the rows of a tensor: their type, and bytes in a row
MAX_LAYERS = 10_000
# before transposed values: their type, bytes in an element, and elements of a token
VALUES_HEAD = struct.Struct("<iII")
DAMAGED = "a saved state is damaged, or of another model or type of cells"


class Cache(NamedTuple):
    """The cells that a sequence has in one of libllama's caches.

    ``cells`` has the position, the number of owners and the owner of each one. ``layers`` is what
    precedes all rows. ``rows`` has the head and the bytes of each tensor; the second axis of the
    bytes is that of the cells. ``end`` is where the cache ends in the state.
    """

    cells: npt.NDArray[np.int32]
    layers: bytes
    rows: list[tuple[bytes, Bytes]]
    end: int

    @property
    def row_bytes(self) -> int:
        """The size of the rows of all cells."""
        return sum(data.size for _, data in self.rows)

    def has_positions(self, count: int) -> bool:
        """Return whether the cells have the positions 0 to ``count`` - 1, in any order, and one
        owner each.
        """
        positions, owners, _ = self.cells.T
        return np.array_equal(np.sort(positions), np.arange(count)) and bool((owners == 1).all())


def get_form(caches: list[Cache]) -> Form:
    """Return what all states of a context have in common: the types and sizes of the rows."""
    return tuple((cache.layers, *(head for head, _ in cache.rows)) for cache in caches)


def read_cache(state: Bytes, at: int) -> Cache:
    """Read the cache whose count is at ``at``. Raises EngineError if there is none."""

    def take(size: int) -> Bytes:
        nonlocal at
        at += size
        if at > len(state):
            raise EngineError(DAMAGED)
        return state[at - size : at]

    count = int.from_bytes(take(WORD).tobytes(), "little")
    cells = take(count * CELL).view(np.int32).reshape(count, 3)
    if not count:
        return Cache(cells, b"", [], at)
    layers = take(LAYERS_HEAD.size).tobytes()
    is_transposed, num_layers = LAYERS_HEAD.unpack(layers)
    rows: list[tuple[bytes, Bytes]] = []
    for part in range(2 * min(num_layers, MAX_LAYERS)):
        if part >= num_layers and at == len(state):
            break  # the values are a part of the keys
        if is_transposed and part >= num_layers:
            head = take(VALUES_HEAD.size).tobytes()
            _, size, num_elements = VALUES_HEAD.unpack(head)
        else:
            head = take(ROWS_HEAD.size).tobytes()
            (_, size), num_elements = ROWS_HEAD.unpack(head), 1
        data = take(num_elements * count * size).reshape(num_elements, count, size)
        rows.append((head, data))
    return Cache(cells, layers, rows, at)


def join_caches(parts: list[Cache]) -> list[Bytes]:
    """Return the bytes of a cache with the cells of all ``parts``, which have the same form."""
    cells = np.concatenate([part.cells for part in parts])
    joined = [as_bytes(len(cells).to_bytes(WORD, "little")), as_bytes(cells.tobytes())]
    joined.append(as_bytes(parts[0].layers))
    for tensor in zip(*(part.rows for part in parts), strict=True):
        joined.append(as_bytes(tensor[0][0]))
        joined.append(np.concatenate([data for _, data in tensor], axis=1).ravel())
    return joined


def as_bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)
