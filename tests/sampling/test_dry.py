"""DRY, compared with its definition in loops over all suffixes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.batch import Batch, Row
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.dry import MAX_MATCH, MAX_WINDOW, History, add_dry, find_repetitions
from cllm.sampling.pipeline import Sampler

SIZE = 8


def sequence(tokens: list[int], **params) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams(temperature=0, **params)), 0, 0, 10**6)


def reference(tokens: list[int], params: SamplingParams) -> dict[int, float]:
    """Return the penalty of each token."""
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    penalties: dict[int, float] = {}
    for length in range(1, min(len(tokens), MAX_MATCH + 1)):
        suffix = tokens[len(tokens) - length :]
        if set(suffix) & set(params.dry_breakers):
            break
        for end in range(length, len(tokens)):
            follower = tokens[end]
            if tokens[end - length : end] == suffix and length >= params.dry_allowed_length:
                penalty = params.dry_multiplier * params.dry_base ** (
                    length - params.dry_allowed_length
                )
                if follower not in params.dry_breakers:
                    penalties[follower] = penalty  # the longest one comes last
    return penalties


@given(
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=60),
    st.builds(
        SamplingParams,
        dry_multiplier=st.floats(0.1, 3),
        dry_base=st.floats(0.5, 3),
        dry_allowed_length=st.integers(1, 5),
        dry_penalty_last_n=st.one_of(st.just(-1), st.integers(1, 50)),
        dry_breakers=st.lists(st.integers(0, SIZE - 1), max_size=2).map(tuple),
    ),
    st.integers(1, 6),
)
def test_like_the_reference(tokens, params, num_known):
    """The alphabet is small, so texts repeat. The text also grows token by token."""
    seq = Sequence(Request("A", tokens[:num_known], params), 0, 0, 10**6)
    past = History(params.dry_breakers)
    for token in [*tokens[num_known:], None]:
        row = np.zeros(SIZE, np.float32)
        add_dry(row, seq, past)
        expected = np.zeros(SIZE)
        for other, penalty in reference(seq.tokens, params).items():
            expected[other] = -penalty
        np.testing.assert_allclose(row, expected, rtol=1e-5)
        if token is not None:
            seq.append(token)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=200))
def test_match_length_is_capped_at_max_match(tokens):
    """However long the text repeats itself."""
    _, lengths = find_repetitions(np.array(tokens * 2, np.int32), frozenset())
    assert lengths.max(initial=0) <= MAX_MATCH


def test_dry_breaks_a_loop():
    """A model that prefers 1 2 3 for ever samples another token, unless 3 is a sequence breaker."""
    # after 0 comes 1, after 1 comes 2 ...
    logits = np.eye(SIZE, dtype=np.float32)[[1, 2, 3, 1]] * 5
    for breakers, loops in (((), False), ((3,), True)):
        seq, sampler = (
            sequence([1, 2, 3], dry_multiplier=2.0, dry_base=2.0, dry_breakers=breakers),
            Sampler(),
        )
        for _ in range(30):
            batch = Batch([Row(seq, seq.num_tokens - 1, 1, 1)], [])
            seq.append(sampler.sample(batch, logits[[min(seq.tokens[-1], 3)]].copy())[0])
        assert (seq.tokens == [1, 2, 3] * 11) is loops


@pytest.mark.parametrize("tokens", [[1] * 20_000, [1, 2] * 10_000, [*range(64)] * 300])
def test_cost_per_token_is_bounded(tokens):
    """The texts repeat themselves all the time. The minimum CPU time of five runs counts."""
    seq, past = sequence(tokens, dry_multiplier=1.0), History(())
    row = np.zeros(100, np.float32)
    add_dry(row, seq, past)
    times = []
    for _ in range(5):
        begun = time.process_time()
        add_dry(row, seq, past)
        times.append(time.process_time() - begun)
    assert min(times) < 0.05
    assert np.isfinite(row).all()
    assert MAX_WINDOW < 20_000
