"""Vectors as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cllm.embedding import Vectors

AT_ONCE = 16  # vectors that are written before others may have the event loop


async def written(vectors: Vectors, write: Callable[[int, npt.NDArray[np.float32]], bytes]) -> bytes:
    """Each as ``write`` has it, with commas between; others may run in between, there may be megabytes."""
    parts = []
    for i, vector in enumerate(vectors):
        if i % AT_ONCE == 0:
            await asyncio.sleep(0)
        parts.append(write(i, vector))
    return b",".join(parts)
