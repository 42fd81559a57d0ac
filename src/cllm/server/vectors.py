"""Encodes embeddings as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cllm.serving.embedding import Vectors

AT_ONCE = 16  # vectors encoded before the event loop may run other tasks


async def encode_vectors(
    vectors: Vectors, write: Callable[[int, npt.NDArray[np.float32]], bytes]
) -> bytes:
    """Encode each vector with ``write`` and join them with commas. Other tasks run in between,
    because the result may have megabytes.
    """
    parts = []
    for i, vector in enumerate(vectors):
        if i % AT_ONCE == 0:
            await asyncio.sleep(0)
        parts.append(write(i, vector))
    return b",".join(parts)
