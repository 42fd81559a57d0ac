"""Which tokens a grammar allows next. Parsing is llguidance's: https://github.com/guidance-ai/llguidance."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cllm.core.params import MAX_LEXER_STATES
from cllm.sampling.top_k import Ids, Row

if TYPE_CHECKING:  # its import takes a tenth of a second
    from llguidance import LLMatcher, LLTokenizer

SLOW, PATIENCE = 0.005, 0.5  # seconds a token that a mask may take on average, and in all before that counts
FEW = 512  # allowed tokens that are looked at one by one; with more of them the others are forbidden in the row
FORBIDDEN = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0, -np.inf, 0)
PENALTIES = FORBIDDEN.astype(np.float32)  # of the eight tokens that a byte of a mask stands for, shape (256, 8)


class Grammar:
    """A grammar compiled for a vocabulary; what its matchers learn about its lexer they share."""

    def __init__(self, text: str, tokenizer: LLTokenizer) -> None:
        """Takes up to seconds and gives the GIL free meanwhile. ``error`` says why it cannot be used, or is ""."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        self.error = self._matcher.get_error()

    @classmethod
    def failed(cls, why: str) -> Grammar:
        """One that cannot be used because of ``why``."""
        grammar = cls.__new__(cls)
        grammar.error = why
        return grammar

    def matcher(self) -> Matcher:
        """For one more sequence, at its beginning."""
        return Matcher(self, self._matcher)


class Matcher:
    """See core/sequence.py for the contract."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._seconds = -PATIENCE  # that masks have taken more than they may
        self._shared = matcher
        self._own: LLMatcher | None = None  # made when the sequence begins; those who wait need none

    def consume(self, token: int) -> None:
        self._at().consume_token(token)

    @property
    def stopped(self) -> bool:
        return self._own is not None and self._own.is_stopped() and not self._own.is_error()

    def take_back(self, count: int) -> None:
        if count:
            self._at().rollback(count)

    def accepts(self, token: int) -> bool:
        matcher = self._at()
        return bool(matcher.is_error() or matcher.validate_tokens([token]))  # a failed matcher constrains nothing

    def allowed(self) -> npt.NDArray[np.uint8] | None:
        begun = time.perf_counter()
        matcher = self._at()
        mask = matcher.compute_bitmask()
        if matcher.is_error():  # a limit, and what is shared is at it too; or no token goes on
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
    """The tokens that ``mask`` allows, or None if they are more than FEW."""
    used = mask.nonzero()[0]
    if used.shape[0] > FEW:
        return None
    bits = np.unpackbits(mask[used, None], axis=1, bitorder="little")
    at, bit = bits.nonzero()
    return used[at] * 8 + bit


def forbid(row: Row, mask: npt.NDArray[np.uint8]) -> None:
    """Write minus infinity into the logits ``row``, shape (vocabulary,), of tokens that ``mask`` does not allow."""
    row += PENALTIES.take(mask, axis=0).reshape(-1)[: row.shape[0]]
