"""The steps from logits to tokens, in the order of llama.cpp: penalties, bias, top-k, top-p, min-p, temperature.

A grammar forbids tokens behind the bias.

Row by row: between two decodes nothing is in the processor's caches, so what counts is how little is touched. A row is
read once, and all that follows works on its candidates.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch
from cllm.core.output import NO_TOKEN
from cllm.core.params import SamplingParams
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.sampling.grammar import allowed_ids, forbid
from cllm.sampling.penalties import add_bias, penalize
from cllm.sampling.random import uniform
from cllm.sampling.thinking import forced_token
from cllm.sampling.top_k import Ids, Row, top_k

# Without top-k, this many candidates are tried before the whole row is sorted.
FIRST_TRY = 256


class Sampler:
    """Stateless: all that a draw depends on is the row, the request's params, its seed and the position."""

    def sample(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[int]:
        """A token id for each sampled position of ``batch``, NO_TOKEN where a grammar allows none.

        ``logits`` (num_samples, vocabulary) is written to.
        """
        seqs = [row.seq for row in batch.rows for _ in range(row.num_samples)]
        positions = [row.seq.num_tokens + i for row in batch.rows for i in range(row.num_samples)]
        drafts = [row.draft for row in batch.rows for _ in range(row.num_samples)]
        return [choose(*each) for each in zip(logits, seqs, positions, drafts, strict=True)]


def choose(row: Row, seq: Sequence, position: int, draft: tuple[int, ...] = ()) -> int:
    """The token of ``seq`` at ``position``, behind its own and some of ``draft``; ``row`` is written to."""
    params = seq.request.params
    if params.thinking is not None and (token := forced_token(seq, params.thinking, position, draft)) is not None:
        return token
    if params.penalized:
        penalize(row, seq)
    if params.logit_bias:
        add_bias(row, params.logit_bias)
    if seq.matcher is None:
        return select(row, seq, position)
    mask = seq.matcher.allowed()
    if mask is None:
        return NO_TOKEN
    ids = allowed_ids(mask)
    if ids is None:
        forbid(row, mask)
        return select(row, seq, position)
    return int(ids[select(row[ids], seq, position)]) if ids.shape[0] > 1 else int(ids[0])


def select(row: Row, seq: Sequence, position: int) -> int:
    """The place in ``row`` of the token of ``seq`` at ``position``."""
    params = seq.request.params
    if params.greedy:
        return int(row.argmax())
    return draw(row, params, uniform(seq.seed, position))


def draw(row: Row, params: SamplingParams, number: float) -> int:
    """The token in whose share of the probability ``number`` lies, 0 to 1."""
    if 0 < params.top_k < row.shape[0]:
        return pick(*top_k(row, params.top_k), params, number)
    largest = row.max()
    if np.isnan(largest):
        raise EngineError("the model computes what is not a number")
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


def pick(ids: Ids, values: Row, params: SamplingParams, number: float, total: float | None = None) -> int:
    """Top-p, min-p, temperature and the draw from candidates in falling order.

    ``total`` is the mass that top-p refers to, the sum of exp(logit - largest logit); None: that of the candidates.
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
