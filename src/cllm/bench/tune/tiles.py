"""From how many rows on the CPU kernels compute a matrix product in tiles of 16 rows, as
native/products.cpp decides it, and as this machine's times say it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import msgspec

from cllm.backends.llama_cpp.variants import bind
from cllm.models.gguf import TENSOR_TYPES

TILE = 16


class Tiles(msgspec.Struct, frozen=True):
    """The least rows that are computed in tiles, with weights of ``type``: ``alone`` in a product,
    and ``after`` full tiles. ``faster_alone`` and ``faster_after``: from where on a tile took less
    time than the rows one by one.
    """

    type: str
    alone: int
    after: int
    faster_alone: int
    faster_after: int


def measure_tiles(types: Iterable[str]) -> list[Tiles]:
    """Measure those of the weights' types that have tiles on this CPU, some 50 ms for each.

    A build without cLLM's kernels has none.
    """
    from cllm.backends.llama_cpp.library import own_kernels

    library = own_kernels()
    numbers = {name: number for number, (name, *_) in TENSOR_TYPES.items()}
    if library is None or not hasattr(library, "cllm_time_products"):
        return []
    count_tiled = bind(library, "cllm_tiled_rows", ctypes.c_int, ctypes.c_int, ctypes.c_int)
    measure = bind(library, "cllm_time_products", ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    found = []
    for name in types:
        seconds = (ctypes.c_double * 3)()
        if not measure(numbers[name], seconds):
            continue
        row, tile, two_tiles = seconds
        sizes = range(1, TILE + 1)
        found.append(
            Tiles(
                type=name,
                alone=next(n for n in sizes if count_tiled(numbers[name], n)),
                after=next(n for n in sizes if count_tiled(numbers[name], TILE + n) > TILE),
                faster_alone=math.ceil(tile / row),
                faster_after=max(1, math.ceil((two_tiles - tile) / row)),
            )
        )
    return found
