"""Steps that most requests do not ask for: top-n-sigma, typical, XTC, mirostat. Exact, in float64.

They see candidates: ids and logits in falling order. Each step says which of them stay, as indices in that order, so
that the best one of those that stay is always the first.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.sampling.random import derive_seed, uniform
from cllm.sampling.top_k import Ids, Row, top_k

XTC_STREAM = 0x587463  # index of the uniform numbers that decide whether XTC acts

Values = npt.NDArray[np.float64]


def draw_extended(row: Row, params: SamplingParams, seed: int, position: int) -> int:
    """The token at ``position`` of the sequence with ``seed``, after all steps from top-n-sigma to the draw."""
    ids, values = candidates(row, params)
    if params.typical_p < 1:
        ids, values = stay(ids, values, typical(values, params.typical_p))
    if params.top_p < 1:
        ids, values = ids[: (kept := top_p(values, params.top_p))], values[:kept]
    if params.min_p > 0:
        kept = int((np.exp(values - values[0]) >= params.min_p).sum())
        ids, values = ids[:kept], values[:kept]
    if params.xtc_probability > 0 and uniform(derive_seed(seed, XTC_STREAM), position) < params.xtc_probability:
        first = xtc(values, params.xtc_threshold)
        ids, values = ids[first:], values[first:]
    weights = softmax(values, params.temperature)
    return int(ids[pick(weights, uniform(seed, position))])


def candidates(row: Row, params: SamplingParams) -> tuple[Ids, Values]:
    """What top-n-sigma and top-k leave, in falling order; of equal logits the first."""
    if not np.isfinite(row.max()):
        raise EngineError("the model computes what is not a number")
    if 0 < params.top_k < row.shape[0]:
        ids, logits = top_k(row, params.top_k)
        if params.top_n_sigma > 0:
            ids = ids[logits >= sigma_threshold(row, params.top_n_sigma)]
    else:
        least = sigma_threshold(row, params.top_n_sigma) if params.top_n_sigma > 0 else -np.inf
        ids = in_falling_order(row, np.flatnonzero(row >= least))
    return ids, row[ids].astype(np.float64)


def in_falling_order(row: Row, ids: Ids) -> Ids:
    """``ids`` by their logits, of equal ones the first. A sort of integers, which takes a tenth of a stable argsort.

    The bits of floats, with those of negative ones turned round, are in the order of the floats.
    """
    bits = (0.0 - row[ids]).view(np.int32)  # of the two zeros it makes one
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits.astype(np.int64) << 32) | ids
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(np.intp)


def sigma_threshold(row: Row, n: float) -> float:
    """The least logit within ``n`` standard deviations of the largest (Tang et al. 2024). Tokens that are forbidden,
    with a logit of minus infinity, count for nothing.
    """
    finite = row[np.isfinite(row)].astype(np.float64)
    return float(row.max()) - n * float(finite.std())


def typical(values: Values, mass: float) -> Ids:
    """Candidates whose surprise is nearest to the expected one, until ``mass`` is reached (Meister et al. 2023)."""
    probabilities = softmax(values)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    some = probabilities > 0
    entropy = float((probabilities[some] * surprise[some]).sum())
    order = np.abs(surprise - entropy).argsort(kind="stable")
    cumulated = probabilities[order].cumsum()
    return np.sort(order[: int(cumulated.searchsorted(mass)) + 1])


def top_p(values: Values, mass: float) -> int:
    """How many of the best candidates reach ``mass`` together (Holtzman et al. 2020)."""
    return int(softmax(values).cumsum().searchsorted(mass)) + 1


def xtc(values: Values, threshold: float) -> int:
    """How many of the best candidates are left out: all that reach ``threshold`` but the least probable of them.

    "Exclude top choices", by Philipp Emanuel Weidmann (text-generation-webui, 2024).
    """
    return max(0, int((softmax(values) >= threshold).sum()) - 1)


class Mirostat:
    """Version 2 of Basu et al. 2021: leaves out what is more surprising than ``mu``, and moves mu so that the
    surprise (in bits) of the tokens drawn comes near to ``tau``.

    ``mu`` is kept for each position, so that one that is sampled again, after a guess that was wrong or a step that
    failed, finds what it found before. A token that was not drawn changes nothing.
    """

    def __init__(self, params: SamplingParams, position: int) -> None:
        """``position``: of the first token."""
        self._tau, self._eta = params.mirostat_tau, params.mirostat_eta
        self._mu = {position: 2 * params.mirostat_tau}

    def draw(self, row: Row, temperature: float, number: float, position: int, first: int) -> int:
        """The token at ``position``; no position before ``first`` will be asked for any more."""
        known = max(at for at in self._mu if at <= position)
        mu = self._mu[known]
        self._mu = {at: old for at, old in self._mu.items() if first <= at <= position or at == known}
        largest = float(row.max())
        if not math.isfinite(largest):
            raise EngineError("the model computes what is not a number")
        scaled = (row - np.float64(largest)) / temperature
        norm = math.log(float(np.exp(scaled).sum()))
        ids = np.flatnonzero(norm - scaled <= mu * math.log(2))
        ids = in_falling_order(row, ids) if len(ids) else np.array([int(row.argmax())])
        weights = softmax(scaled[ids])
        at = pick(weights, number)
        self._mu[position + 1] = mu - self._eta * (-math.log2(weights[at]) - self._tau)
        return int(ids[at])


def stay(ids: Ids, values: Values, kept: Ids) -> tuple[Ids, Values]:
    return ids[kept], values[kept]


def softmax(values: Values, temperature: float = 1.0) -> Values:
    """Probabilities of logits in falling order."""
    weights: Values = np.exp((values - values[0]) / temperature)
    weights /= weights.sum()
    return weights


def pick(weights: Values, number: float) -> int:
    """The index in whose share ``number``, in [0, 1), lies."""
    cumulated = weights.cumsum()
    return int(cumulated.searchsorted(number * cumulated[-1], side="right"))
