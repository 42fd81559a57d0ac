"""The steps from logits to tokens, in the order of llama.cpp: penalties, bias, top-k, top-p, min-p, temperature.

Only the selection of candidates looks at whole rows; everything after it works on (rows, candidates) at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch
from cllm.core.sequence import Sequence
from cllm.sampling.penalties import add_bias, penalize
from cllm.sampling.random import uniform
from cllm.sampling.top_k import top_k

Row = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

# Without top-k, this many candidates are tried before the whole row is sorted.
FIRST_TRY = 256
# Rows with more candidates are drawn from one by one, or every row would be padded to their width.
WIDE = 1024

Candidates = tuple[npt.NDArray[np.intp], Row | Floats, float]


class Sampler:
    """Stateless: all that a draw depends on is the row, the request's params, its seed and the position."""

    def sample(self, batch: Batch, logits: npt.NDArray[np.float32]) -> list[int]:
        """A token id for each sampled position of ``batch``; ``logits`` (num_samples, vocabulary) is written to."""
        seqs = [row.seq for row in batch.rows for _ in range(row.num_samples)]
        for seq, row in zip(seqs, logits, strict=True):
            params = seq.request.params
            if params.penalized:
                penalize(row, seq)
            if params.logit_bias:
                add_bias(row, params.logit_bias)
        if all(seq.request.params.greedy for seq in seqs):
            best: list[int] = logits.argmax(axis=1).tolist()
            return best
        tokens = [0] * len(seqs)
        positions = [row.seq.num_tokens + i for row in batch.rows for i in range(row.num_samples)]
        drawn = []
        for i, seq in enumerate(seqs):
            if seq.request.params.greedy:
                tokens[i] = int(logits[i].argmax())
            else:
                drawn.append(i)
        found = draw([seqs[i] for i in drawn], [positions[i] for i in drawn], [logits[i] for i in drawn])
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
        return tokens


def draw(seqs: list[Sequence], positions: list[int], rows: list[Row]) -> list[int]:
    """One random token for each row, by the params of its sequence, its seed and the token's position in it."""
    chosen = [candidates(row, seq) for seq, row in zip(seqs, rows, strict=True)]
    tokens = [0] * len(seqs)
    narrow = [i for i, (ids, _, _) in enumerate(chosen) if len(ids) <= WIDE]
    wide = [[i] for i, (ids, _, _) in enumerate(chosen) if len(ids) > WIDE]
    for group in [narrow, *wide] if narrow else wide:
        picked = pick([seqs[i] for i in group], [positions[i] for i in group], [chosen[i] for i in group])
        for i, token in zip(group, picked, strict=True):
            tokens[i] = token
    return tokens


def pick(seqs: list[Sequence], positions: list[int], chosen: list[Candidates]) -> list[int]:
    """Top-p, min-p, temperature and the draw, for all rows at once."""
    width = max(len(ids) for ids, _, _ in chosen)
    ids = np.zeros((len(seqs), width), np.intp)
    values = np.full((len(seqs), width), -np.inf)
    totals = np.empty((len(seqs), 1))
    for i, (row_ids, row_values, total) in enumerate(chosen):
        ids[i, : len(row_ids)] = row_ids
        values[i, : len(row_ids)] = row_values
        totals[i] = total

    params = [seq.request.params for seq in seqs]
    top_p = np.array([p.top_p if p.top_p < 1 else np.inf for p in params])[:, None]
    min_p = np.array([p.min_p for p in params])[:, None]
    temperature = np.array([p.temperature for p in params])[:, None]
    values -= values.max(axis=1, keepdims=True)
    weights = np.exp(values)
    before = np.cumsum(weights, axis=1) - weights
    keep = ((before < top_p * totals) & (weights >= min_p)) | (values == 0)
    weights = np.exp(values / temperature) * keep
    cumulated = np.cumsum(weights, axis=1)
    seeds = np.array([seq.seed for seq in seqs], np.uint64)
    target = uniform(seeds, np.array(positions, np.uint64))[:, None] * cumulated[:, -1:]
    at = (cumulated <= target).sum(axis=1)
    picked: list[int] = ids[np.arange(len(seqs)), at].tolist()
    return picked


def candidates(row: Row, seq: Sequence) -> Candidates:
    """Ids and logits that top-k, top-p and min-p can leave of ``row``, and the mass that top-p refers to.

    They are in falling order unless nothing is to be left out. The mass is the sum of exp(logit - largest logit)
    over what top-k leaves.
    """
    params = seq.request.params
    if 0 < params.top_k < row.shape[0]:
        ids, values = top_k(row, params.top_k)
        return ids, values, float(np.exp(values.astype(np.float64) - values[0]).sum())
    largest = row.max()
    total = float(np.exp(row - largest).sum(dtype=np.float64))
    if params.top_p == 1 and params.min_p == 0:
        return np.arange(row.shape[0]), row, total
    if row.shape[0] > FIRST_TRY:
        ids, values = top_k(row, FIRST_TRY)
        weights = np.exp(values.astype(np.float64) - largest)
        if weights.sum() >= params.top_p * total or weights[-1] < params.min_p:
            return ids, values, total
    ids = np.argsort(-row, kind="stable")
    return ids, row[ids], total
