"""Convert DRY's sequence breakers, texts at which a repetition ends, to the ids of the tokens that
contain them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

from cllm.core.vocabulary import Pieces
from cllm.errors import BadRequest

USUAL = ("\n", ":", '"', "*")  # llama.cpp's defaults
MAX_BREAKERS = 16
MAX_LENGTH = 16  # characters
PARAM = "dry_sequence_breakers"


class DryBreakers:
    """Finds the tokens of a vocabulary that contain a text. Remembers the results for 32 texts."""

    def __init__(self, pieces: Callable[[], Pieces]) -> None:
        """``pieces`` returns the bytes of each token id."""
        self._find = lru_cache(32)(lambda text: array("I", pieces().find(text.encode())))

    def ids(self, texts: Sequence[str] | None) -> tuple[int, ...]:
        """Return the ids of the tokens that contain one of ``texts``; None means the usual ones.

        This takes up to a second for texts that are in many tokens.

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
        ids_of_texts = {text: self._find(text) for text in (USUAL if texts is None else texts)}
        for text, ids in ids_of_texts.items():
            if texts is not None and not len(ids):
                message = (
                    f"Invalid '{PARAM}': no token of this model contains {text!r}, so "
                    f"it can never break a repetition."
                )
                raise BadRequest(message, param=PARAM, code="invalid_value")
        return tuple(sorted({token for tokens in ids_of_texts.values() for token in tokens}))
