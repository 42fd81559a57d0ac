"""Convert DRY's sequence breakers, texts at which a repetition ends, to the ids of the tokens that
contain them.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from cllm.errors import BadRequest

USUAL = ("\n", ":", '"', "*")  # llama.cpp's defaults
MAX_BREAKERS = 16
MAX_LENGTH = 16  # characters
PARAM = "dry_sequence_breakers"
BETWEEN = b"\xff"  # occurs in no UTF-8 text


class DryBreakers:
    """Finds the tokens of a vocabulary that contain a text, and remembers the results for 32
    texts.
    """

    def __init__(self, pieces: list[bytes]) -> None:
        """``pieces``: the bytes of each token id."""
        self._pieces = pieces
        self._tokens_with = lru_cache(32)(self._find)

    def ids(self, texts: tuple[str, ...] | None) -> tuple[int, ...]:
        """Return the ids of the tokens that contain one of ``texts``; None means the usual ones.

        Raises BadRequest if there are too many texts, or if one is empty, too long, or in no single
        token.
        """
        if len(texts or ()) > MAX_BREAKERS or not all(
            1 <= len(text) <= MAX_LENGTH for text in texts or ()
        ):
            message = (
                f"Invalid '{PARAM}': at most {MAX_BREAKERS} texts of 1 to {MAX_LENGTH} "
                f"characters are accepted."
            )
            raise BadRequest(message, param=PARAM, code="invalid_value")
        found = {text: self._tokens_with(text) for text in (USUAL if texts is None else texts)}
        for text, ids in found.items():
            if texts is not None and not len(ids):
                message = (
                    f"Invalid '{PARAM}': no token of this model contains {text!r}, so "
                    f"it can never break a repetition."
                )
                raise BadRequest(message, param=PARAM, code="invalid_value")
        return tuple(np.unique(np.concatenate([*found.values()])).tolist()) if found else ()

    def _find(self, text: str) -> npt.NDArray[np.int32]:
        joined, ends = self._table
        places = [match.start() for match in re.finditer(re.escape(text.encode()), joined)]
        return np.unique(ends.searchsorted(places, side="right")).astype(np.int32)

    @cached_property
    def _table(self) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The joined bytes of all tokens, and the index where each token ends, including the
        separator after it.
        """
        return BETWEEN.join(self._pieces), np.cumsum([len(piece) + 1 for piece in self._pieces])
