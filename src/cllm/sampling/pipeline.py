"""The steps from logits to tokens, in the order of llama.cpp: penalties, bias, top-k, top-p, min-p,
temperature.

Steps that few requests use are in extensions.py and dry.py; core/params.py documents their place in
this order. A grammar masks tokens after the bias.

Rows are sampled one by one. The CPU caches are cold after each decode, so the speed depends on how
little memory is touched: a row is read once, and all later steps work on its candidates.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch, Row
from cllm.core.output import FAILED, NO_TOKEN, Logprobs
from cllm.core.params import SamplingParams
from cllm.core.sequence import Matcher, Sequence
from cllm.errors import EngineError
from cllm.sampling.dry import History, add_dry
from cllm.sampling.extensions import draw_extended, draw_mirostat
from cllm.sampling.grammar import allowed_ids, forbid
from cllm.sampling.logprobs import find_top_tokens
from cllm.sampling.penalties import add_bias, penalize
from cllm.sampling.random import derive_seed, uniform
from cllm.sampling.top_k import Ids, LogitRow, check_finite, top_k

Rows = npt.NDArray[np.float32] | list[LogitRow]

log = logging.getLogger("cllm.sampling")

# Without top-k, this many candidates are tried before the whole row is sorted.
FIRST_TRY = 256
AGAIN_STREAM = 0x416761  # seed index of the random numbers for tokens that are chosen again


class Sampler:
    """Draws tokens.

    A draw depends only on the row, the request's params, its seed and the position; with mirostat
    or DRY, also on the tokens before, whose state is cached for each sequence.
    """

    def __init__(self, end_tokens: Collection[int] = ()) -> None:
        """Until a text has min_tokens, its ``end_tokens`` are not sampled."""
        self._end_tokens = [*end_tokens]
        self._pasts: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()
        # from the last call, by row of the logits; if requested
        self.logprobs: dict[int, Logprobs] = {}

    def sample(self, batch: Batch, logits: Rows) -> list[int]:
        """Return a token for each of the ``num_samples`` rows of ``logits``, shape (vocabulary,).

        Modifies ``logits``.

        A row that only gives a prompt logprob yields the prompt's next token. If a grammar allows
        no token, the row yields NO_TOKEN. A sequence whose sampling raises an exception gets FAILED
        for each of its rows.
        """
        if self.logprobs:
            self.logprobs = {}
        tokens: list[int] = []
        for row in batch.rows:
            begun = len(tokens)
            try:
                self._sample(row, logits, tokens)
            except Exception as error:
                log.error(
                    "%s cannot be sampled: %s",
                    row.seq.name,
                    error,
                    exc_info=not isinstance(error, EngineError),
                )
                tokens[begun:] = [FAILED] * row.num_samples
        return tokens

    def _sample(self, row: Row, logits: Rows, tokens: list[int]) -> None:
        """Append the tokens of one row to ``tokens``, the tokens of the rows before it."""
        seq, position = row.seq, row.seq.num_tokens
        if row.num_prompt_logprobs:
            tokens += self._score(row, logits, len(tokens))
        if row.draft and seq.matcher is not None:
            tokens += self._follow(row, seq.matcher, logits, len(tokens))
            return
        for _ in range(row.num_samples - row.num_prompt_logprobs):
            at = len(tokens)
            if seq.is_plain and seq.matcher is None:
                tokens.append(choose(logits[at], seq, position))
            else:
                tokens.append(self._choose(logits[at], seq, position, at, row.draft))
            position += 1

    def _follow(self, row: Row, matcher: Matcher, logits: Rows, at: int) -> list[int]:
        """Return the tokens of a sequence with a grammar: the next one, and one more after each
        correct draft token.

        The remaining rows get NO_TOKEN.
        """
        tokens: list[int] = []
        for position, guess in enumerate([*row.draft, NO_TOKEN], row.seq.num_tokens):
            here = at + len(tokens)
            tokens.append(self._choose(logits[here], row.seq, position, here, row.draft))
            if tokens[-1] != guess:
                break
            matcher.consume(guess)
        matcher.rollback(len(tokens) - 1)
        return tokens + [NO_TOKEN] * (len(row.draft) + 1 - len(tokens))

    def _score(self, row: Row, logits: Rows, at: int) -> list[int]:
        """Return the next tokens of the prompt, and keep their logprobs."""
        position = row.start + row.num_tokens - row.num_samples + 1
        tokens = row.seq.tokens[position : position + row.num_prompt_logprobs]
        num_top = row.seq.request.params.prompt_logprobs or 0
        for i, token in enumerate(tokens, at):
            self.logprobs[i] = find_top_tokens(logits[i], num_top).compute_logprobs(
                logits[i][token]
            )
        return tokens

    def _choose(
        self, row: LogitRow, seq: Sequence, position: int, at: int, draft: tuple[int, ...]
    ) -> int:
        """Do the same as ``choose``, with all options of a request, after its own tokens and some
        of ``draft``.
        """
        params = seq.request.params
        if params.logprobs is None:
            return self._choose_from(row, seq, position, draft)
        best = find_top_tokens(row, params.logprobs)
        untouched = row.copy()
        token = self._choose_from(row, seq, position, draft)
        if token != NO_TOKEN:
            self.logprobs[at] = best.compute_logprobs(untouched[token])
        return token

    def _choose_from(
        self, row: LogitRow, seq: Sequence, position: int, draft: tuple[int, ...]
    ) -> int:
        params = seq.request.params
        if (thinking := seq.thinking) is not None:
            if position > seq.num_tokens:
                thinking = thinking.after(draft[: position - seq.num_tokens])
            if (token := thinking.forced) is not None:
                return token
            if forbidden := thinking.forbidden:
                row[forbidden] = -np.inf
        if params.has_penalties:
            penalize(row, seq)
        if params.uses_dry:
            if seq not in self._pasts:
                self._pasts[seq] = History(params.dry_breakers)
            add_dry(row, seq, self._pasts[seq])
        if params.logit_bias:
            add_bias(row, params.logit_bias)
        if params.is_bound and seq.matcher is not None:
            return self._select_allowed(row, seq, seq.matcher, position, seq.seed)
        if position - seq.num_prompt_tokens < params.min_tokens:
            row[[*self._end_tokens, *params.stop_token_ids]] = -np.inf
        token = self._select(row, seq, position, seq.seed)
        if seq.matcher is None or seq.matcher.accepts(token):
            return token
        # Draw with another random number: the first one belongs to tokens that the grammar refuses.
        again = self._select_allowed(
            row, seq, seq.matcher, position, derive_seed(seq.seed, AGAIN_STREAM)
        )
        return token if again == NO_TOKEN else again

    def _select_allowed(
        self, row: LogitRow, seq: Sequence, matcher: Matcher, position: int, seed: int
    ) -> int:
        """Return a token that the grammar allows, or NO_TOKEN if ``min_tokens`` or the grammar
        itself forbids all.
        """
        mask = matcher.compute_mask()
        if mask is None:
            return NO_TOKEN
        ids = allowed_ids(mask)
        if ids is None:
            forbid(row, mask)
        else:
            row = row[ids]
        if row.max() == -np.inf:
            return NO_TOKEN
        at = self._select(row, seq, position, seed)
        return at if ids is None else int(ids[at])

    def _select(self, row: LogitRow, seq: Sequence, position: int, seed: int) -> int:
        """Return the index in ``row`` of the token of ``seq`` at ``position``."""
        params = seq.request.params
        if params.is_greedy:
            return int(row.argmax())
        if not params.uses_extensions:
            return draw(row, params, uniform(seed, position))
        if not params.mirostat:
            return draw_extended(row, params, seed, position)
        return draw_mirostat(row, seq, uniform(seed, position), position)


def choose(row: LogitRow, seq: Sequence, position: int) -> int:
    """Return the index in ``row`` of the token of ``seq`` at ``position``, chosen by its logits
    alone.

    Raises EngineError if the largest logit is not finite.
    """
    params = seq.request.params
    if not params.is_greedy:
        return draw(row, params, uniform(seq.seed, position))
    token = int(row.argmax())
    check_finite(row[token])
    return token


def draw(row: LogitRow, params: SamplingParams, number: float) -> int:
    """Return the token whose share of the probability mass contains ``number``, in [0, 1).

    Raises EngineError if the largest logit is not finite.
    """
    if 0 < params.top_k < row.shape[0]:
        ids, values = top_k(row, params.top_k)
        check_finite(values[0] if len(values) else math.nan)  # nothing is larger than a NaN
        return pick(ids, values, params, number)
    largest = row.max()
    check_finite(largest)
    if params.top_p == 1 and params.min_p == 0:
        cumulated = np.exp((row - largest) / np.float64(params.temperature)).cumsum()
        return int(cumulated.searchsorted(number * cumulated[-1], side="right"))
    total = float(np.exp(row - largest).sum(dtype=np.float64))
    if row.shape[0] > FIRST_TRY:
        ids, values = top_k(row, FIRST_TRY)
        weights = np.exp(values.astype(np.float64) - largest)
        if weights.sum() >= params.top_p * total or weights[-1] < params.min_p:
            return pick(ids, values, params, number, total)
    ids = np.argsort(-row, kind="stable")
    return pick(ids, row[ids], params, number, total)


def pick(
    ids: Ids, values: LogitRow, params: SamplingParams, number: float, total: float | None = None
) -> int:
    """Apply top-p, min-p and temperature to candidates in descending order, and draw one of them.

    ``total`` is the mass that top-p refers to, the sum of exp(logit - largest logit); None: that of
    the candidates.
    """
    shifted = np.subtract(values, values[0], dtype=np.float64)
    weights = np.exp(shifted)
    kept = len(weights)
    if params.top_p < 1:
        cumulated = weights.cumsum()
        kept = int(cumulated.searchsorted(params.top_p * (total or cumulated[-1]))) + 1
    if params.min_p > 0:
        kept = min(kept, int((weights >= params.min_p).sum()))
    if params.temperature != 1:
        weights = np.exp(shifted[:kept] / params.temperature)
    cumulated = weights[:kept].cumsum()
    return int(ids[cumulated.searchsorted(number * cumulated[-1], side="right")])
