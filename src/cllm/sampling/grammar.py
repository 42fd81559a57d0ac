"""Computes which tokens a grammar allows next, with llguidance:
https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cllm.core.params import MAX_LEXER_STATES
from cllm.sampling.top_k import Ids, LogitRow

if TYPE_CHECKING:  # importing it takes 0.1 s
    from llguidance import LLMatcher, LLTokenizer

# seconds: allowed mean time of a mask, and by how much all masks together may exceed it
SLOW, PATIENCE = 0.005, 0.5
# nonzero mask bytes up to which the allowed tokens are picked from the row; with more, the row is
# masked
FEW = 512
FORBIDDEN = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0,
    -np.inf,
    0,
)
# for the eight tokens of each possible mask byte, shape (256, 8)
PENALTIES = FORBIDDEN.astype(np.float32)


class Grammar:
    """A grammar compiled for a vocabulary. Its matchers share what they learn about its lexer."""

    def __init__(self, text: str, tokenizer: LLTokenizer) -> None:
        """Compile ``text``, which can take seconds but releases the GIL.

        ``error`` says why the grammar cannot be used; "" if it can.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        self.error = self._matcher.get_error()

    @classmethod
    def failed(cls, why: str) -> Grammar:
        """Return a grammar that cannot be used because of ``why``."""
        grammar = cls.__new__(cls)
        grammar.error = why
        return grammar

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for another sequence, at the beginning of its text."""
        return GrammarMatcher(self, self._matcher)


class GrammarMatcher:
    """See core/sequence.py for the contract."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._seconds = -PATIENCE  # time by which the masks have exceeded the allowed time
        self._shared = matcher
        self._own: LLMatcher | None = None  # created on first use; waiting sequences need none

    def consume(self, token: int) -> None:
        self._at().consume_token(token)

    @property
    def is_stopped(self) -> bool:
        return self._own is not None and self._own.is_stopped() and not self._own.is_error()

    def rollback(self, count: int) -> None:
        if count:
            self._at().rollback(count)

    def accepts(self, token: int) -> bool:
        matcher = self._at()
        # a failed matcher constrains nothing
        return bool(matcher.is_error() or matcher.validate_tokens([token]))

    def compute_mask(self) -> npt.NDArray[np.uint8] | None:
        begun = time.perf_counter()
        matcher = self._at()
        mask = matcher.compute_bitmask()
        # no token is allowed, or a limit is reached; the shared lexer is at that limit too
        if matcher.is_error():
            self._grammar.error = matcher.get_error()
            return None
        self._seconds += time.perf_counter() - begun - SLOW
        if self._seconds > 0:
            return None
        return np.frombuffer(mask, np.uint8)

    def _at(self) -> LLMatcher:
        if self._own is None:
            self._own = self._shared.deep_copy()
        return self._own


def allowed_ids(mask: npt.NDArray[np.uint8]) -> Ids | None:
    """Return the ids of the tokens that ``mask`` allows, or None if more than FEW bytes of the mask
    are nonzero.
    """
    used = mask.nonzero()[0]
    if used.shape[0] > FEW:
        return None
    bits = np.unpackbits(mask[used, None], axis=1, bitorder="little")
    at, bit = bits.nonzero()
    return used[at] * 8 + bit


def forbid(row: LogitRow, mask: npt.NDArray[np.uint8]) -> None:
    """Set logits of ``row``, shape (vocabulary,), to minus infinity where ``mask`` does not allow
    the token.
    """
    row += PENALTIES.take(mask, axis=0).reshape(-1)[: row.shape[0]]
