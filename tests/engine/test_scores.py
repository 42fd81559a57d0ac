"""Logprobs of prompts and of generated tokens, in an engine with the fake backend."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import VOCABULARY_SIZE

SURE = 20 - math.log(
    math.exp(20) + VOCABULARY_SIZE - 1
)  # of the token that the fake backend prefers
ODD = -math.log(math.exp(20) + VOCABULARY_SIZE - 1)  # of any other token
PROMPT = [5, 6, 7, 50, 51, 52, 53, 9]


def scores(engine, name: str) -> list[float]:
    return [
        one.logprob
        for o in engine.outputs
        if o.request_id == name
        for one in o.prompt_logprobs or ()
    ]


def expected_scores(prompt: list[int]) -> list[float]:
    return [SURE if after == (before + 1) % 256 else ODD for before, after in pairwise(prompt)]


def test_prompt_logprobs_are_computed_in_chunks(fake_engine):
    """Each step computes as many positions as there are rows of logits. Then the sequence decodes
    as usual.
    """
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=4)
    engine.add("A", PROMPT, prompt_logprobs=2, max_tokens=3)
    steps = engine.finish()
    assert steps[:3] == ["A.0 0+4 score 4", "A.0 4+4 score 3 sample", "A.0 8+1 sample"]
    assert scores(engine, "A") == pytest.approx(expected_scores(PROMPT), abs=1e-4)
    assert engine.tokens("A") == [10, 11, 12]
    collect_logprobs = [one for o in engine.outputs for one in o.prompt_logprobs or ()]
    assert all(len(one.top) == 2 for one in collect_logprobs)


def test_prompt_logprobs_leave_logits_rows_for_others(fake_engine):
    """Each other sequence may need one, and prompts without logprobs do not slow down."""
    engine = fake_engine(max_num_seqs=3, max_num_batched_tokens=64)
    engine.scheduler.params = engine.scheduler.params.__class__(
        max_num_batched_tokens=64, max_num_samples=4
    )
    engine.add("A", [1, 2, 3, 4], max_tokens=9)
    engine.step()
    engine.add("B", PROMPT, prompt_logprobs=0, max_tokens=1)
    engine.add("C", [*range(100, 120)], max_tokens=1)
    assert engine.step() == "A.0 4+1 sample | B.0 0+2 score 2 | C.0 0+20 sample"
    assert engine.step() == "A.0 5+1 sample | B.0 2+3 score 3"
    engine.finish()
    assert scores(engine, "B") == pytest.approx(expected_scores(PROMPT), abs=1e-4)


def test_zero_max_tokens_computes_only_the_prompt(fake_engine):
    """The request ends without a token and with the reason "length", with or without prompt
    logprobs.
    """
    engine = fake_engine()
    engine.add("A", PROMPT, prompt_logprobs=0, max_tokens=0)
    engine.add("B", PROMPT, max_tokens=0, n=2)
    engine.finish()
    assert engine.ends() == {"A.0": "length", "B.0": "length", "B.1": "length"}
    assert engine.tokens("A") == engine.tokens("B") == []
    assert len(scores(engine, "A")) == len(PROMPT) - 1


LONG = [*range(40)]


def test_prompt_logprobs_do_not_use_prefix_cache(fake_engine):
    """Later requests can still reuse the prompt's own cells."""
    engine = fake_engine()
    for name, params in (("A", {}), ("B", {"prompt_logprobs": 0}), ("C", {})):
        engine.add(name, [*LONG, 3], max_tokens=1, **params)
        engine.finish()
    cached = {o.request_id: o.num_cached_tokens for o in engine.outputs if o.token >= 0}
    assert cached == {"A": 0, "B": 0, "C": 40}
    assert scores(engine, "B") == pytest.approx(expected_scores([*LONG, 3]), abs=1e-4)


def test_prompt_logprobs_do_not_reuse_prefix_in_place(fake_engine):
    """The few tokens that remain under a seq_id without a lookup would lack their logits too."""
    engine = fake_engine(max_num_seqs=1)
    for name, params in (("A", {}), ("B", {"prompt_logprobs": 0})):
        engine.add(name, [*LONG[:6], 77], max_tokens=1, **params)
        engine.finish()
    assert len(scores(engine, "B")) == 6


def test_prompt_is_scored_once_for_several_sequences(fake_engine):
    """All sequences of a request have the same prompt."""
    engine = fake_engine()
    engine.add("A", [*LONG, 3], prompt_logprobs=0, n=3, max_tokens=2, temperature=1.0, seed=1)
    engine.finish()
    assert scores(engine, "A") == pytest.approx(expected_scores([*LONG, 3]), abs=1e-4)
    assert all(len(engine.tokens("A", i)) == 2 for i in range(3))


@settings(max_examples=repeat(40, 10))
@given(
    st.lists(
        st.tuples(st.integers(2, 30), st.integers(0, 4), st.booleans(), st.sampled_from([None, 5])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([{}, {"num_cells": 72}, {"max_taken_back": 0}]),
    st.integers(4, 20),
)
def test_prompt_logprobs_are_complete_when_sequences_are_parked(
    fake_engine, requests, limits, max_num_samples
):
    """In small pools, where sequences are parked in the middle of their prompts, each token's
    logprob is reported once and in order.
    """
    limits = {"context_length": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24, **limits}
    engine = fake_engine(**limits, engine_ram_cache_bytes=500)
    engine.scheduler.params = engine.scheduler.params.__class__(
        max_num_batched_tokens=24, max_num_samples=max_num_samples
    )
    asked = {}
    for i, (length, max_tokens, is_scored, wait) in enumerate(requests):
        prompt = [(7 * j) % 50 for j in range(length)]
        params = {"prompt_logprobs": 1} if is_scored else {}
        asked[f"r{i}"] = engine.add(f"r{i}", prompt, max_tokens=max_tokens, **params), is_scored
        for _ in range(wait or 0):
            engine.step()
    engine.finish()
    assert max(batch.num_samples for batch in engine.backend.batches) <= max_num_samples
    for name, (request, is_scored) in asked.items():
        expected = expected_scores(request.prompt) if is_scored else []
        assert scores(engine, name) == pytest.approx(expected, abs=1e-4)
        assert len(engine.tokens(name)) == request.params.max_tokens


def test_prompt_logprobs_of_failed_batch_are_reported_once(fake_engine):
    """The batch is computed again from the last reported position."""
    from cllm.backends.fake.backend import FailingSteps

    engine = fake_engine(max_num_batched_tokens=8, failing=FailingSteps(raise_at_step=2))
    engine.add("A", [*LONG, 3], prompt_logprobs=0, max_tokens=2)
    engine.finish()
    assert scores(engine, "A") == pytest.approx(expected_scores([*LONG, 3]), abs=1e-4)


def test_accepted_draft_tokens_have_logprobs(fake_engine):
    """Each accepted token has its own logprobs. Rejected tokens are not reported."""

    def collect_logprobs(speculation: str) -> list[tuple[int, float]]:
        engine = fake_engine(length=60, engine_speculation=speculation)
        engine.add("A", [*range(30), *range(30)][:45], logprobs=1, max_tokens=40, temperature=0)
        engine.finish()
        assert (engine.scheduler.statistics.num_accepted > 0) is (speculation != "off")
        return [(o.token, o.logprobs.logprob) for o in engine.outputs if o.token >= 0]

    assert collect_logprobs("prompt_lookup") == collect_logprobs("off")


@pytest.mark.parametrize(
    "params",
    [{"mirostat": 2}, {"dry_multiplier": 1.0}, {"xtc_probability": 0.5}, {"min_tokens": 9}],
)
def test_speculation_keeps_text(fake_engine, params):
    """This holds for stateful sampling steps too."""

    def text(speculation: str) -> list[int]:
        engine = fake_engine(length=30, engine_speculation=speculation)
        engine.add(
            "A", [*range(30), *range(30)][:45], max_tokens=60, temperature=7.0, seed=3, **params
        )
        engine.finish()
        return engine.tokens("A")

    assert text("prompt_lookup") == text("off")


def test_different_salts_share_no_prefix(fake_engine):
    """They share neither idle cells, nor a prefix that is being computed, nor RAM. Equal salts
    share as usual.
    """
    engine = fake_engine()
    cached = {}
    for name, salt in (("A", "x"), ("B", "y"), ("C", ""), ("D", "x"), ("E", "y"), ("F", "")):
        engine.add(name, [*LONG, 3], max_tokens=1, cache_salt=salt)
        engine.finish()
        cached[name] = next(o.num_cached_tokens for o in engine.outputs if o.request_id == name)
    assert cached == {"A": 0, "B": 0, "C": 0, "D": 40, "E": 40, "F": 40}
    together = fake_engine()
    for name, salt in (("A", "x"), ("B", "y"), ("C", "x")):
        together.add(name, [*LONG, 3], max_tokens=1, cache_salt=salt)
    together.finish()
    cached = {o.request_id: o.num_cached_tokens for o in together.outputs}
    assert cached == {"A": 0, "B": 0, "C": 40}
