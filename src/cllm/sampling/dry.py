"""DRY ("don't repeat yourself"): a penalty for tokens that would extend a repetition.

By Philipp Emanuel Weidmann (text-generation-webui, 2024), with the parameters of llama.cpp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cllm.core.sequence import Sequence

MAX_WINDOW = 8192  # last tokens that are searched
MAX_MATCH = 64  # tokens; a longer repetition counts as this long
LARGEST = 1e30  # penalty; the sum of two stays within the range of float32

Tokens = npt.NDArray[np.int32]


class History:
    """The tokens of a sequence in an array that grows with it."""

    def __init__(self, breakers: tuple[int, ...]) -> None:
        self.breakers = frozenset(breakers)
        self._array = np.zeros(0, np.int32)
        self._length = 0

    def as_array(self, tokens: list[int]) -> Tokens:
        """Return ``tokens`` as an array.

        They must begin with those of the last call, which are not copied again.
        """
        if len(tokens) > len(self._array):
            self._array = np.concatenate(
                (self._array[: self._length], np.zeros(len(tokens) + 64, np.int32))
            )
        self._array[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._array[: self._length]


def add_dry(row: npt.NDArray[np.float32], seq: Sequence, past: History) -> None:
    """Subtract the penalties from the logits ``row``, shape (vocabulary,).

    If the last n tokens occurred before and were followed by t, then t loses multiplier * base **
    (n - allowed_length), unless n < allowed_length. The longest such n counts, up to MAX_MATCH. The
    last dry_penalty_last_n tokens are searched (-1: all), up to MAX_WINDOW. Breakers end a
    repetition and are never penalized.
    """
    params = seq.request.params
    window = (
        MAX_WINDOW if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, MAX_WINDOW)
    )
    ids, lengths = find_repetitions(past.as_array(seq.tokens)[-window:], past.breakers)
    long = lengths >= params.dry_allowed_length
    if not long.any():
        return
    ids, lengths = ids[long], lengths[long]
    with np.errstate(over="ignore"):
        penalty = params.dry_multiplier * np.float64(params.dry_base) ** (
            lengths - params.dry_allowed_length
        )
    penalty[[int(token) in past.breakers for token in ids]] = 0
    row[ids] -= np.minimum(penalty, LARGEST).astype(np.float32)


def find_repetitions(
    tokens: Tokens, breakers: frozenset[int]
) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Return tokens that followed an earlier occurrence of the end of ``tokens``, and the length of
    the longest match.

    Costs at most MAX_MATCH numpy comparisons, each of at most len(tokens) elements.
    """
    last = len(tokens) - 1
    longest = 0
    while longest < min(MAX_MATCH, last) and int(tokens[last - longest]) not in breakers:
        longest += 1
    lengths = np.zeros(len(tokens), np.int64)
    ends = np.flatnonzero(tokens[:-1] == tokens[last])  # where an earlier occurrence ends
    for back in range(longest):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[last - back]]
        lengths[ends] = back + 1
    (ends,) = lengths.nonzero()
    ids, which = np.unique(tokens[ends + 1], return_inverse=True)
    longest_matches = np.zeros(len(ids), np.int64)
    np.maximum.at(longest_matches, which, lengths[ends])
    return ids, longest_matches
