"""Typical, top-n-sigma, XTC and mirostat, compared with slow references in plain Python."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from conftest import repeat
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cllm.core.batch import Batch, Row
from cllm.core.output import FAILED
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.extensions import XTC_STREAM, typical
from cllm.sampling.pipeline import Sampler
from cllm.sampling.random import derive_seed, uniform

TOLERANCE = 1e-5


def sequence(seed: int = 0, prompt: tuple[int, ...] = (1,), **params) -> Sequence:
    return Sequence(Request("A", list(prompt), SamplingParams(**params)), 0, seed, 10**6)


def sample(
    seqs: list[Sequence], logits: list[np.ndarray], sampler: Sampler | None = None
) -> list[int]:
    batch = Batch([Row(seq, seq.num_tokens - 1, 1, 1) for seq in seqs], [])
    return (sampler or Sampler()).sample(batch, np.array(logits, np.float32))


class Undecided(Exception):
    """A threshold lies so near to a value that rounding decides."""


def clear(a: float, b: float, scale: float | None = None) -> None:
    if abs(a - b) <= TOLERANCE * max(1e-9, max(abs(a), abs(b)) if scale is None else scale):
        raise Undecided


def shares(values: dict[int, float], temperature: float = 1.0) -> dict[int, float]:
    best = max(values.values())
    weights = {token: math.exp((value - best) / temperature) for token, value in values.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def left_by(params: SamplingParams, logits: np.ndarray, chance: float) -> dict[int, float]:
    """Return the tokens that all steps leave, in falling order, and their logits. Raises Undecided."""
    every = {token: float(value) for token, value in enumerate(logits)}
    left = dict(sorted(every.items(), key=lambda item: -item[1]))
    if params.top_n_sigma > 0:
        mean = sum(every.values()) / len(every)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in every.values()) / len(every))
        least = max(every.values()) - params.top_n_sigma * deviation
        for value in every.values():
            clear(value, least, 10)
        left = {token: value for token, value in left.items() if value >= least}
    if 0 < params.top_k < len(left):
        values = list(left.values())
        clear(values[params.top_k - 1], values[params.top_k])
        left = dict(list(left.items())[: params.top_k])
    if params.typical_p < 1:
        left = typical_of(left, params.typical_p)
    if params.top_p < 1:
        kept, mass = {}, 0.0
        for token, share in shares(left).items():
            clear(mass, params.top_p)
            if kept and mass >= params.top_p:
                break
            kept[token], mass = left[token], mass + share
        left = kept
    if params.min_p > 0:
        best = max(left.values())
        for value in list(left.values())[1:]:
            clear(math.exp(value - best), params.min_p)
        left = {
            token: value for token, value in left.items() if math.exp(value - best) >= params.min_p
        }
    if chance < params.xtc_probability:
        found = shares(left)
        for share in found.values():
            clear(share, params.xtc_threshold)
        top = [token for token in left if found[token] >= params.xtc_threshold]
        left = {token: value for token, value in left.items() if token not in top[:-1]}
    return left


def typical_of(left: dict[int, float], mass: float) -> dict[int, float]:
    found = shares(left)
    entropy = -sum(share * math.log(share) for share in found.values() if share > 0)
    distance = {
        token: abs(-math.log(share) - entropy) if share > 0 else math.inf
        for token, share in found.items()
    }
    order = sorted(left, key=lambda token: distance[token])
    for one, other in pairwise(order):
        clear(distance[one], distance[other], 1)
    kept, reached = set(), 0.0
    for token in order:
        if kept:
            clear(reached, mass)
            if reached >= mass:
                break
        kept.add(token)
        reached += found[token]
    return {token: value for token, value in left.items() if token in kept}


def pick(weights: dict[int, float], number: float) -> int:
    passed, total = 0.0, sum(weights.values())
    for token, weight in weights.items():
        passed += weight
        clear(passed, number * total, total)
        if passed > number * total:
            return token
    raise Undecided


some_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(1.0), st.floats(0.05, 5)),
    top_k=st.one_of(st.just(0), st.integers(2, 50)),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.05, 1)),
    top_n_sigma=st.one_of(st.just(0.0), st.floats(0.1, 5)),
    xtc_probability=st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
    xtc_threshold=st.floats(0, 0.5),
)
rows = st.tuples(
    some_params.filter(lambda params: params.uses_extensions), st.integers(0, 2**64 - 1)
)


@settings(max_examples=repeat(200, 40))
@given(
    st.lists(rows, min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([30, 257, 600])
)
def test_like_the_reference(rows, seed, size):
    """The uniform numbers are the same; rows are sampled alone and in a batch."""
    seqs = [Sequence(Request("A", [1], params), 0, own_seed, 10**6) for params, own_seed in rows]
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), size)).astype(np.float32)
    tokens = sample(seqs, logits)
    assert tokens == [sample([seq], [row])[0] for seq, row in zip(seqs, logits, strict=True)]
    num_decided = 0
    for seq, row, token in zip(seqs, logits, tokens, strict=True):
        params = seq.request.params
        try:
            left = left_by(params, row, uniform(derive_seed(seq.seed, XTC_STREAM), 1))
            assert token == pick(shares(left, params.temperature), uniform(seq.seed, 1))
            num_decided += 1
        except Undecided:
            continue
    assume(num_decided)


def test_equal_logits_keep_their_order():
    """Minus zero equals zero."""
    logits = np.array([-1, 0.0, -0.0, 3, 3, -np.inf, -1], np.float32)
    counts = {
        sample([sequence(seed, typical_p=0.999, temperature=5.0)], [logits])[0]
        for seed in range(400)
    }
    assert counts == {0, 1, 2, 3, 4, 6}
    assert sample([sequence(7, top_n_sigma=0.001)], [np.array([1, 5, 5], np.float32)])[0] in (1, 2)


def test_xtc_keeps_the_least_probable_token_above_the_threshold():
    """If only one token reaches the threshold, nothing changes."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.07, 0.03], np.float32))
    always = {"xtc_probability": 1.0, "xtc_threshold": 0.15}
    assert {sample([sequence(seed, **always)], [logits])[0] for seed in range(200)} == {2, 3, 4}
    one = np.log(np.array([0.8, 0.1, 0.1], np.float32))
    assert 0 in {sample([sequence(seed, **always)], [one])[0] for seed in range(50)}
    rarely = {**always, "xtc_probability": 0.25}
    kept = sum(sample([sequence(seed, **rarely)], [logits])[0] < 2 for seed in range(2000))
    assert 0.7 * 0.75 - 0.05 < kept / 2000 < 0.7 * 0.75 + 0.05


class MirostatReference:
    """Version 2 by its paper, in plain Python."""

    def __init__(self, tau: float, eta: float) -> None:
        self.mu, self.tau, self.eta = 2 * tau, tau, eta

    def draw(self, logits: np.ndarray, temperature: float, number: float) -> int:
        values = dict(
            sorted(((t, float(v)) for t, v in enumerate(logits)), key=lambda item: -item[1])
        )
        found = shares(values, temperature)
        for share in found.values():
            clear(-math.log2(share), self.mu)
        kept = {token: share for token, share in found.items() if -math.log2(share) <= self.mu}
        kept = kept or dict([next(iter(found.items()))])
        total = sum(kept.values())
        token = pick(kept, number)
        self.mu -= self.eta * (-math.log2(kept[token] / total) - self.tau)
        return token


@settings(max_examples=repeat(60, 15))
@given(
    st.floats(0.5, 8),
    st.floats(0, 1),
    st.floats(0.3, 3),
    st.integers(0, 2**32),
    st.integers(2, 300),
)
def test_mirostat_matches_its_paper(tau, eta, temperature, seed, size):
    """Thirty tokens, each with the mu that the preceding ones leave."""
    seq = sequence(seed, mirostat=2, mirostat_tau=tau, mirostat_eta=eta, temperature=temperature)
    reference, sampler = MirostatReference(tau, eta), Sampler()
    generator = np.random.default_rng(seed)
    num_decided = 0
    for position in range(1, 31):
        logits = generator.normal(0, 3, size).astype(np.float32)
        token = sample([seq], [logits], sampler)[0]
        try:
            assert token == reference.draw(logits, temperature, uniform(seed, position))
        except Undecided:
            break
        num_decided += 1
        seq.append(token)
    assume(num_decided)


def test_mirostat_restores_mu_when_a_position_is_sampled_again():
    """A draft token was rejected, or a step failed."""
    params = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5}
    logits = np.random.default_rng(3).normal(0, 3, (40, 200)).astype(np.float32)
    plain, sampler = sequence(5, **params), Sampler()
    for position in range(1, 31):
        plain.append(sample([plain], [logits[position]], sampler)[0])
    guessing, sampler = sequence(5, **params), Sampler()
    while guessing.num_tokens < 31:
        at = guessing.num_tokens
        guesses = (plain.tokens[at] if at % 3 else 199, 0)[: 31 - at]
        batch = Batch([Row(guessing, at - 1, 1, 1 + len(guesses), guesses)], [])
        for _ in range(1 + (at % 5 == 0)):  # the second time is after a failure
            found = sampler.sample(batch, logits[at : at + 1 + len(guesses)].copy())
        right = 0
        while right < len(guesses) and found[right] == guesses[right]:
            right += 1
        for token in found[: right + 1]:
            guessing.append(token)
    assert guessing.tokens[:31] == plain.tokens


@pytest.mark.parametrize(
    "params", [{"typical_p": 0.5}, {"mirostat": 2}, {"top_n_sigma": 1.0}, {"xtc_probability": 1}]
)
def test_what_is_not_a_number_gives_no_token(params):
    assert sample([sequence(**params)], [np.full(600, np.nan, np.float32)]) == [FAILED]


@pytest.mark.parametrize(
    "params", [{"typical_p": 0.3}, {"mirostat": 2}, {"top_n_sigma": 1.0}, {"xtc_probability": 1}]
)
def test_temperature_0_ignores_all_extensions(params):
    logits = np.array([1, 4, 3.9], np.float32)
    assert {
        sample([sequence(seed, temperature=0, **params)], [logits])[0] for seed in range(20)
    } == {1}


def test_min_tokens_forbids_end_and_stop_tokens():
    logits = np.array([9, 1, 8, 7], np.float32)
    seq, sampler = sequence(temperature=0, min_tokens=2, stop_token_ids=(2,)), Sampler([0])
    for _ in range(4):
        seq.append(sample([seq], [logits], sampler)[0])
    assert seq.tokens == [1, 3, 3, 0, 0]


def test_forced_token_does_not_change_mu():
    """Draft tokens that went further do not change it either."""
    params = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5}
    logits = np.random.default_rng(3).normal(0, 3, (8, 200)).astype(np.float32)
    one, other = Sampler(), Sampler()
    seq = sequence(5, **params)
    first = sample([seq], [logits[0]], one)[0]
    other.sample(Batch([Row(seq, 0, 1, 3, (7, 7))], []), logits[:3].copy())
    seq.append(first)
    seq.append(150)  # by force
    seq.append(151)
    assert sample([seq], [logits[4]], one) == sample([seq], [logits[4]], other)


def test_typical_prefers_smaller_ids_among_equal_logits():
    for seed in range(20):
        values = np.sort(np.random.default_rng(seed).normal(0, 3, 1000).round())[::-1]
        kept = typical(values, 0.5)
        for value in np.unique(values[kept]):
            equal = kept[values[kept] == value]
            assert equal.tolist() == np.flatnonzero(values == value)[: len(equal)].tolist()


def test_row_without_allowed_tokens_fails():
    forbidden = np.full(600, -np.inf, np.float32)
    for params in ({}, {"typical_p": 0.5}, {"mirostat": 2}, {"top_n_sigma": 1.0}):
        assert sample([sequence(**params)], [forbidden]) == [FAILED]
