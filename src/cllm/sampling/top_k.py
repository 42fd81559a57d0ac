"""The k largest logits of a row, exactly, without sorting the row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_BLOCKS = 32


def top_k(row: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Ids and logits of the ``k`` largest values of ``row``, shape (vocabulary,), in falling order.

    The row is seen as NUM_BLOCKS lines, one below the other. A value among the k largest stands in a column whose
    maximum is among the k largest column maxima, so only those columns are partitioned; what the lines do not cover
    is added as it is. Ties at the k-th value are broken arbitrarily.
    """
    size = row.shape[0]
    width = size // NUM_BLOCKS
    if k * 4 > width:
        ids = np.argpartition(row, size - k)[size - k :] if k < size else np.arange(size)
        values = row[ids]
    else:
        blocks = row[: width * NUM_BLOCKS].reshape(NUM_BLOCKS, width)
        columns = np.argpartition(blocks.max(axis=0), width - k)[width - k :]
        found = (columns + np.arange(0, width * NUM_BLOCKS, width)[:, None]).ravel()
        ids = np.concatenate((found, np.arange(width * NUM_BLOCKS, size)))
        values = row[ids]
        best = np.argpartition(values, len(values) - k)[len(values) - k :]
        ids, values = ids[best], values[best]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]
