"""Sampling, compared with a slow reference that follows the documented order of steps."""

from __future__ import annotations

import math

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
from cllm.sampling import pipeline
from cllm.sampling.pipeline import FIRST_TRY, Sampler
from cllm.sampling.random import uniform

TOLERANCE = 1e-5  # relative; float32 logits leave the reference undecided below it


def sequence(
    params: SamplingParams,
    seed: int = 0,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
):
    seq = Sequence(Request("A", list(prompt), params), 0, seed, 10**6)
    for token in output:
        seq.append(token)
    return seq


def sample(seqs: list[Sequence], logits: list[np.ndarray]) -> list[int]:
    batch = Batch([Row(seq, seq.num_tokens - 1, 1, True) for seq in seqs], [])
    return Sampler().sample(batch, np.array(logits, np.float32))


class Undecided(Exception):
    """A threshold lies so near to a value that rounding decides."""


def reference(seq: Sequence, logits: np.ndarray) -> dict[int, float]:
    """Return the tokens that are left, in order, with their weights, computed in float64 and plain
    loops.

    Raises Undecided where rounding would decide.
    """
    params = seq.request.params
    values = {token: float(value) for token, value in enumerate(logits)}
    prompt, output = seq.request.prompt, seq.tokens[seq.num_prompt_tokens :]
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
    for token, bias in params.logit_bias.items():
        values[token] += bias

    left = sorted(values, key=lambda token: -values[token])
    if params.is_greedy:
        clear(values[left[0]], values[left[1]])
        return {left[0]: 1.0}
    if 0 < params.top_k < len(left):
        clear(values[left[params.top_k - 1]], values[left[params.top_k]])
        left = left[: params.top_k]
    weights = {token: math.exp(values[token] - values[left[0]]) for token in left}
    if params.top_p < 1:
        total, before, kept = sum(weights.values()), 0.0, []
        for token in left:
            if kept:
                clear(before, params.top_p * total)
            if kept and before >= params.top_p * total:
                break
            kept.append(token)
            before += weights[token]
        left = kept
    if params.min_p > 0:
        for token in left[1:]:
            clear(weights[token], params.min_p)
        left = [token for token in left if weights[token] >= params.min_p]
    if len(left) == len(values) and params.top_p == 1 and params.min_p == 0:
        left = sorted(left)  # nothing was left out, so nothing was put in order
    best = max(values[token] for token in left)
    return {token: math.exp((values[token] - best) / params.temperature) for token in left}


def pick(weights: dict[int, float], number: float) -> int:
    """Return the token in whose share of the weights ``number`` lies. Raises Undecided at its
    borders.
    """
    total, passed = sum(weights.values()), 0.0
    for token, weight in weights.items():
        passed += weight
        clear(passed, number * total, total)
        if passed > number * total:
            return token
    raise AssertionError("a number below 1 picks somebody")


def clear(a: float, b: float, scale: float | None = None) -> None:
    if abs(a - b) <= TOLERANCE * (max(abs(a), abs(b)) if scale is None else scale):
        raise Undecided


ratios = st.floats(0, 1, allow_subnormal=False)
params_of_a_row = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.05, 5)),
    top_k=st.one_of(st.just(0), st.integers(1, 50)),
    top_p=st.one_of(st.just(1.0), ratios),
    min_p=st.one_of(st.just(0.0), ratios),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=3),
)
rows = st.tuples(
    params_of_a_row,
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 39), min_size=1, max_size=6),
    st.lists(st.integers(0, 39), max_size=6),
)


@settings(max_examples=repeat(150, 30))
@given(
    st.lists(rows, min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([40, 41, 257, 1000]),
)
def test_tokens_match_the_reference(rows, seed, size):
    """The uniform numbers are the same; rows are sampled alone and in a batch with different
    params.
    """
    seqs = [
        sequence(params, own_seed, tuple(prompt), tuple(output))
        for params, own_seed, prompt, output in rows
    ]
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows), size)).astype(np.float32)
    tokens = sample(seqs, logits)
    assert tokens == [sample([seq], [row])[0] for seq, row in zip(seqs, logits, strict=True)]
    num_decided = 0
    for seq, row, token in zip(seqs, logits, tokens, strict=True):
        number = uniform(seq.seed, seq.num_tokens)
        try:
            assert token == pick(reference(seq, row), number)
            num_decided += 1
        except Undecided:
            continue
    assume(num_decided)


@pytest.mark.parametrize("size", [40, FIRST_TRY, 3000])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.0},
        {"top_p": 0.97},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.7, "min_p": 0.05},
        {"top_k": 5, "temperature": 3.0},
        {"top_p": 0.5, "temperature": 3.0},
        {"top_k": 10, "repetition_penalty": 1.8, "logit_bias": {2: 6.0}},
        {},
    ],
)
def test_exactly_the_tokens_of_the_reference_can_be_drawn(monkeypatch, params, size):
    """A number in the middle of each share draws that token. The largest number draws the last one."""
    generator = np.random.default_rng(size)
    logits = generator.normal(0, 1 if size > 100 else 2, size).astype(np.float32)
    if size > 100:
        logits[:30] += np.linspace(6, 12, 30, dtype=np.float32)
    seq = sequence(SamplingParams(**params), prompt=(2, 3))
    weights = reference(seq, logits)

    def drawn(number: float) -> int:
        monkeypatch.setattr(pipeline, "uniform", lambda seed, position: number)
        return sample([seq], [logits])[0]

    total, passed = sum(weights.values()), 0.0
    for token, weight in weights.items():
        if weight > 1e-7 * total:
            assert drawn((passed + weight / 2) / total) == token
        passed += weight
    assert drawn(0.0) in weights
    assert drawn(1 - 2.0**-53) in weights


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1, "temperature": 5.0}])
def test_greedy_takes_the_first_of_the_most_probable_tokens(params):
    """The seed and the other rows do not matter."""
    logits = [np.array([0, 5, 5, 1], np.float32), np.array([9, 5, 5, 1], np.float32)]
    greedy = [sequence(SamplingParams(**params), seed) for seed in range(2)]
    assert sample(greedy, logits) == [1, 0]
    drawn = sequence(SamplingParams(logit_bias={3: 100}), 5)
    assert sample([greedy[0], drawn, greedy[1]], [logits[0], logits[0], logits[1]]) == [1, 3, 0]


def test_greedy_choice_respects_penalties_and_bias():
    logits = np.array([5, 4, 3.5, 0], np.float32)
    assert sample(
        [sequence(SamplingParams(temperature=0, repetition_penalty=2.0), prompt=(0,))], [logits]
    ) == [1]
    assert sample([sequence(SamplingParams(temperature=0, logit_bias={3: 6.0}))], [logits]) == [3]
    assert sample(
        [sequence(SamplingParams(temperature=0, presence_penalty=2.0), output=(0, 1))], [logits]
    ) == [2]


@pytest.mark.parametrize(
    "temperature",
    [
        5e-324,
        1e-300,
        1e-9,
        1e-3,
    ],
)
def test_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = np.array([1, 30, 29.9, -30], np.float32)
    assert (
        sample(
            [sequence(SamplingParams(temperature=temperature), seed) for seed in range(9)],
            [logits] * 9,
        )
        == [1] * 9
    )


def test_logit_of_minus_infinity_is_never_drawn():
    """Other sampling steps are on or off."""
    logits = np.full(600, -np.inf, np.float32)
    logits[[7, 300, 599]] = 0.5
    for params in ({}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 10}):
        seqs = [sequence(SamplingParams(temperature=9.0, **params), seed) for seed in range(30)]
        assert set(sample(seqs, [logits] * 30)) == {7, 300, 599}


@given(st.integers(0, 2**64 - 1), st.lists(rows, max_size=4), st.integers(0, 4))
def test_token_does_not_depend_on_other_rows(seed, others, place):
    """It does not depend on the row's position in the batch either."""
    logits = (
        np.random.default_rng(seed % 1000).normal(0, 2, (len(others) + 1, 300)).astype(np.float32)
    )
    seq = sequence(SamplingParams(top_p=0.9), seed)
    alone = sample([seq], [logits[-1]])
    seqs = [
        sequence(params, own, tuple(prompt), tuple(output))
        for params, own, prompt, output in others
    ]
    place = min(place, len(seqs))
    seqs.insert(place, seq)
    together = np.insert(logits[:-1], place, logits[-1], axis=0)
    assert sample(seqs, list(together))[place] == alone[0]


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.999999}, {"temperature": 2.0}])
def test_tokens_are_drawn_as_often_as_they_are_probable(params):
    """20,000 draws of six tokens follow their probabilities.

    Chi-square with at most 5 degrees of freedom exceeds 50 with probability 1.4e-9. The seeds are
    fixed, so the test always passes or always fails.
    """
    logits = np.array([2, 1.5, 1, 0, 0.5, -1], np.float32)
    num_draws = 20_000
    seqs = [sequence(SamplingParams(**params), seed) for seed in range(200)]
    counts = np.zeros(len(logits))
    for _ in range(num_draws // len(seqs)):
        for token in sample(seqs, [logits] * len(seqs)):
            counts[token] += 1
        for seq in seqs:
            seq.append(0)
    weights = reference(seqs[0], logits)
    expected = np.zeros(len(logits))
    expected[list(weights)] = np.array(list(weights.values())) / sum(weights.values()) * num_draws
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    assert ((counts[some] - expected[some]) ** 2 / expected[some]).sum() < 50


def test_row_without_samples_gets_no_token():
    """Its prompt is not computed to the end."""
    seqs = [sequence(SamplingParams(temperature=0)) for _ in range(3)]
    batch = Batch(
        [Row(seqs[0], 0, 1, True), Row(seqs[1], 0, 1, False), Row(seqs[2], 0, 1, True)], []
    )
    assert Sampler().sample(batch, np.array([[0, 1], [1, 0]], np.float32)) == [1, 0]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.9}])
def test_nan_logits_fail_only_that_sequence(params):
    """They never give an id outside the vocabulary."""
    seqs = [sequence(SamplingParams(**params)), sequence(SamplingParams(temperature=0))]
    assert sample(seqs, [np.full(600, np.nan, np.float32), np.eye(600)[7]]) == [FAILED, 7]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 5}, {"top_k": 0}, {"top_p": 0.5}])
def test_logits_that_are_not_numbers_fail_their_sequence_only(params: dict[str, float]) -> None:
    """As damaged weights give them; without the check the answer would be the first token."""
    own = SamplingParams(**params)
    broken, sound = np.full(2000, np.nan), np.zeros(2000)
    sound[7] = 100
    assert sample([sequence(own), sequence(own)], [broken, sound]) == [FAILED, 7]
