"""Sampling steps that few requests use: top-n-sigma, typical, XTC, mirostat. Exact, in float64.

The steps work on candidates: token ids and logits, in descending order. Each step returns which
candidates remain, as indices or a count in that order, so the best remaining candidate is always
first.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cllm.core.params import SamplingParams
from cllm.core.sequence import Sequence
from cllm.sampling.random import derive_seed, uniform
from cllm.sampling.top_k import Ids, LogitRow, check_finite, top_k

XTC_STREAM = 0x587463  # seed index of the random numbers that decide whether XTC applies

Values = npt.NDArray[np.float64]


def draw_extended(row: LogitRow, params: SamplingParams, seed: int, position: int) -> int:
    """Return the token at ``position`` of the sequence with ``seed``, after all steps from
    top-n-sigma to the draw.
    """
    ids, values = candidates(row, params)
    if params.typical_p < 1:
        ids, values = select(ids, values, typical(values, params.typical_p))
    if params.top_p < 1:
        ids, values = ids[: (kept := top_p(values, params.top_p))], values[:kept]
    if params.min_p > 0:
        kept = int((np.exp(values - values[0]) >= params.min_p).sum())
        ids, values = ids[:kept], values[:kept]
    if (
        params.xtc_probability > 0
        and uniform(derive_seed(seed, XTC_STREAM), position) < params.xtc_probability
    ):
        first = xtc(values, params.xtc_threshold)
        ids, values = ids[first:], values[first:]
    weights = softmax(values, params.temperature)
    return int(ids[pick(weights, uniform(seed, position))])


def candidates(row: LogitRow, params: SamplingParams) -> tuple[Ids, Values]:
    """Return the ids and logits that top-n-sigma and top-k keep, in descending order; for equal
    logits, by lowest id.

    Raises EngineError if the largest logit is not finite.
    """
    check_finite(row.max())
    if 0 < params.top_k < row.shape[0]:
        ids, logits = top_k(row, params.top_k)
        if params.top_n_sigma > 0:
            ids = ids[logits >= find_least_logit(row, params.top_n_sigma)]
    else:
        least = find_least_logit(row, params.top_n_sigma) if params.top_n_sigma > 0 else -np.inf
        ids = sort_descending(row, np.flatnonzero(row >= least))
    return ids, row[ids].astype(np.float64)


def sort_descending(row: LogitRow, ids: Ids) -> Ids:
    """Return ``ids`` sorted by descending logit; for equal logits, by lowest id.

    Sorts integers, which takes a tenth of the time of a stable argsort. The bits of floats sort
    like the floats once those of negative numbers are inverted.
    """
    bits = (0.0 - row[ids]).view(np.int32)  # the subtraction maps both zeros to the same bits
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits.astype(np.int64) << 32) | ids
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(np.intp)


def find_least_logit(row: LogitRow, n: float) -> float:
    """Return the lowest logit within ``n`` standard deviations of the largest (Tang et al. 2024).

    Forbidden tokens, whose logit is minus infinity, are ignored.
    """
    finite = row[np.isfinite(row)].astype(np.float64)
    return float(row.max()) - n * float(finite.std())


def typical(values: Values, mass: float) -> Ids:
    """Return the candidates whose surprise is nearest to the entropy and that reach ``mass``
    (Meister et al. 2023).
    """
    probabilities = softmax(values)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    some = probabilities > 0
    entropy = float((probabilities[some] * surprise[some]).sum())
    order = np.abs(surprise - entropy).argsort(kind="stable")
    cumulated = probabilities[order].cumsum()
    return np.sort(order[: int(cumulated.searchsorted(mass)) + 1])


def top_p(values: Values, mass: float) -> int:
    """Return how many of the best candidates together reach ``mass`` (Holtzman et al. 2020)."""
    return int(softmax(values).cumsum().searchsorted(mass)) + 1


def xtc(values: Values, threshold: float) -> int:
    """Return how many of the best candidates to exclude: all that reach ``threshold``, except the
    least probable one.

    "Exclude top choices", by Philipp Emanuel Weidmann (text-generation-webui, 2024).
    """
    return max(0, int((softmax(values) >= threshold).sum()) - 1)


def draw_mirostat(row: LogitRow, seq: Sequence, number: float, position: int) -> int:
    """Return the token of ``seq`` at ``position``, by mirostat version 2 (Basu et al. 2021).

    Excludes tokens whose surprise exceeds ``mu``, and adjusts mu so that the surprise (in bits) of
    the drawn tokens approaches ``tau``. The sequence keeps mu by position, so that a position that
    is sampled again, after a rejected draft token or a failed step, uses the same one as before. A
    token that was not drawn does not change mu.

    Raises EngineError if the largest logit is not finite.
    """
    params = seq.request.params
    mu = seq.find_mu(position)
    if mu is None:
        mu = 2 * params.mirostat_tau
    largest = float(row.max())
    check_finite(largest)
    scaled = (row - np.float64(largest)) / params.temperature
    norm = math.log(float(np.exp(scaled).sum()))
    ids = np.flatnonzero(norm - scaled <= mu * math.log(2))
    ids = sort_descending(row, ids) if len(ids) else np.array([int(row.argmax())])
    weights = softmax(scaled[ids])
    chosen = pick(weights, number)
    surprise = -math.log2(weights[chosen])
    needed = {at: old for at, old in seq.mirostat_mu.items() if seq.num_tokens <= at < position}
    following = mu - params.mirostat_eta * (surprise - params.mirostat_tau)
    seq.mirostat_mu = {**needed, position: mu, position + 1: following}
    return int(ids[chosen])


def select(ids: Ids, values: Values, kept: Ids) -> tuple[Ids, Values]:
    return ids[kept], values[kept]


def softmax(values: Values, temperature: float = 1.0) -> Values:
    """Return the probabilities of logits in descending order."""
    weights: Values = np.exp((values - values[0]) / temperature)
    weights /= weights.sum()
    return weights


def pick(weights: Values, number: float) -> int:
    """Return the index whose share of the weights contains ``number``, in [0, 1)."""
    cumulated = weights.cumsum()
    return int(cumulated.searchsorted(number * cumulated[-1], side="right"))
