"""Grammar masks, compared with rows in which forbidden tokens are minus infinity, and matchers over
a vocabulary of bytes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import END, VOCABULARY_SIZE, FakeVocabulary
from cllm.core.batch import Batch, Row
from cllm.core.output import NO_TOKEN
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling import grammar as module
from cllm.sampling import pipeline
from cllm.sampling.grammar import Grammar, allowed_ids, forbid
from cllm.sampling.pipeline import Sampler

TOKENIZER = FakeVocabulary().grammar_tokenizer([END])


class Fixed:
    """A matcher whose mask is given."""

    stopped = False

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = np.packbits(mask, bitorder="little")

    def compute_mask(self) -> np.ndarray:
        return self.mask


def bytes_allowed(matcher) -> set[int]:
    return set(np.unpackbits(matcher.compute_mask(), bitorder="little").nonzero()[0].tolist())


def follow(text: str, *tokens: int):
    matcher = Grammar(text, TOKENIZER).matcher()
    for token in tokens:
        matcher.consume(token)
    return matcher


@given(st.sets(st.integers(0, 999)), st.integers(950, 1000))
def test_forbid_sets_exactly_the_forbidden_logits(allowed, size):
    """The vocabulary sizes have all remainders modulo eight."""
    mask = np.zeros(1000, bool)
    mask[list(allowed)] = True
    row = np.random.default_rng(size).normal(0, 2, size).astype(np.float32)
    forbidden = row.copy()
    forbid(forbidden, np.packbits(mask, bitorder="little"))
    assert np.array_equal(forbidden, np.where(mask[:size], row, -np.inf))


@given(st.sets(st.integers(0, 999)))
def test_small_masks_are_listed_as_ids(allowed):
    mask = np.zeros(1000, bool)
    mask[list(allowed)] = True
    assert allowed_ids(np.packbits(mask, bitorder="little")).tolist() == sorted(allowed)


def test_large_masks_are_not_listed():
    assert allowed_ids(np.ones(module.FEW + 1, np.uint8)) is None


sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 3.0]),
        "top_k": st.sampled_from([1, 5, 40, 900]),
        "top_p": st.sampled_from([0.3, 0.95]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "logit_bias": st.dictionaries(
            st.integers(0, 999), st.sampled_from([-100.0, 5.0]), max_size=3
        ),
    },
)


@given(sampling, st.sets(st.integers(0, 999), min_size=1), st.integers(0, 1000))
def test_listed_ids_and_masked_rows_give_the_same_token(params, allowed, seed):
    """Greedy and drawn. Equally spaced numbers in place of random ones give every token its share."""
    mask = np.zeros(1000, bool)
    mask[list(allowed)] = True
    logits = np.random.default_rng(seed).normal(0, 3, 1000).astype(np.float32)

    def shares(matcher, row: np.ndarray, few: int = 0) -> Counter:
        bound = SamplingParams(**params, grammar="some" if matcher else "")
        seq = Sequence(Request("A", [1], bound), 0, seed, 100)
        seq.matcher = matcher
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "FEW", few)
            found = Counter()
            for i in range(50):
                patch.setattr(pipeline, "uniform", lambda seed, position, i=i: (i + 0.5) / 50)
                found[Sampler().sample(Batch([Row(seq, 0, 1, 1)], []), row[None].copy())[0]] += 1
        return found

    forbidden = np.where(mask, logits, -np.inf).astype(np.float32)
    expected = shares(None, forbidden)
    assert expected.keys() <= allowed
    for few in (0, 10**9):
        found = shares(Fixed(mask), logits, few)
        assert found.keys() <= allowed
        assert all(abs(found[token] - expected[token]) <= 1 for token in allowed)


def test_only_allowed_token_is_sampled_despite_any_bias():
    seq = Sequence(
        Request("A", [1], SamplingParams(logit_bias={ord("x"): -100}, grammar="some")), 0, 0, 100
    )
    seq.matcher = follow('start: "x"')
    assert Sampler().sample(
        Batch([Row(seq, 0, 1, 1)], []), np.zeros((1, VOCABULARY_SIZE), np.float32)
    ) == [ord("x")]


@pytest.mark.parametrize("draft", [b"", b"c", b"cd", b"cx", b"xy"])
def test_matcher_is_unchanged_after_draft_tokens(draft):
    """The scheduler consumes the tokens that it appends."""
    bound = SamplingParams(temperature=0, grammar="some")
    seq = Sequence(Request("A", [1], bound), 0, 0, 100)
    seq.matcher = follow('start: "abcdefg"', *b"ab")
    logits = np.zeros((len(draft) + 1, VOCABULARY_SIZE), np.float32)
    row = Row(seq, 0, 1, 1 + len(draft), draft=tuple(draft))
    tokens = Sampler().sample(Batch([row], []), logits)
    num_right = next((i for i in range(len(draft)) if draft[i] != b"cdefg"[i]), len(draft))
    expected = [*b"cdefg"[: num_right + 1]]
    assert tokens == expected + [NO_TOKEN] * (len(draft) - num_right)
    assert bytes_allowed(seq.matcher) == {ord("c")}


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 5}, {"top_p": 0.9}, {"mirostat": 2}, {"temperature": 0}]
)
@pytest.mark.parametrize("many", [False, True])
def test_loose_grammar_that_conflicts_with_min_tokens_is_ignored(monkeypatch, params, many):
    """min_tokens forbids every token that the grammar allows here, which must not fail the step."""
    monkeypatch.setattr(module, "FEW", 0 if many else 512)
    bound = SamplingParams(
        **params, min_tokens=9, stop_token_ids=(97, 98), grammar="some", grammar_is_loose=True
    )
    seq = Sequence(Request("A", [1], bound), 0, 0, 100)
    seq.matcher = follow("start: /[ab]+/")
    row = np.eye(1, VOCABULARY_SIZE, 120, dtype=np.float32) * 50
    assert Sampler([END]).sample(Batch([Row(seq, 0, 1, 1)], []), row) == [120]


def test_end_token_is_allowed_only_where_the_text_may_end():
    text = "start: /a{2,3}/"
    assert bytes_allowed(follow(text)) == {ord("a")}
    assert bytes_allowed(follow(text, ord("a"))) == {ord("a")}
    assert bytes_allowed(follow(text, ord("a"), ord("a"))) == {ord("a"), END}
    assert not follow(text, ord("a"), ord("a")).is_stopped
    assert follow(text, ord("a"), ord("a"), ord("a")).is_stopped


def test_every_end_token_is_allowed():
    tokenizer = FakeVocabulary().grammar_tokenizer([END, 259])
    assert bytes_allowed(Grammar("start: /a*/", tokenizer).matcher()) == {ord("a"), END, 259}


def test_matchers_of_one_grammar_are_independent():
    grammar = Grammar('start: "ab" | "cd"', TOKENIZER)
    first, second = grammar.matcher(), grammar.matcher()
    first.consume(ord("a"))
    assert bytes_allowed(first) == {ord("b")}
    assert bytes_allowed(second) == {ord("a"), ord("c")}


def test_special_token_is_not_allowed_in_place_of_its_text():
    """A grammar allows special tokens only where it names them."""
    assert bytes_allowed(follow("start: <|im_start|>")) == {257}
    assert bytes_allowed(follow("start: <[258]>")) == {258}
    assert bytes_allowed(follow('start: "<|im_start|>"')) == {ord("<")}
    assert not {257, 258} & bytes_allowed(follow("start: /(.|\\n)*/"))


@pytest.mark.parametrize("text", ["start: a\na: a", "start: /a+/ & /b+/"])
def test_dead_end_gives_no_token_and_is_not_stopped(text):
    matcher = follow(text)
    assert matcher.compute_mask() is None
    assert not matcher.is_stopped
    seq = Sequence(Request("A", [1], SamplingParams(grammar=text)), 0, 0, 100)
    seq.matcher = matcher
    assert Sampler().sample(
        Batch([Row(seq, 0, 1, 1)], []), np.zeros((1, VOCABULARY_SIZE), np.float32)
    ) == [NO_TOKEN]


@pytest.mark.parametrize("text", ["", "start: b", "start: /(/", "start: %json {"])
def test_invalid_grammar_is_an_error(text):
    assert Grammar(text, TOKENIZER).error


def test_grammar_that_is_often_slow_fails(monkeypatch):
    """It would delay other sequences. A slow token now and then is tolerated."""
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    matcher = follow("start: /a*/")
    compute, cost = matcher._at().compute_bitmask, 0.0

    class Slow:
        def __getattr__(self, name):
            return getattr(real, name)

        def compute_bitmask(self):
            nonlocal now
            now += cost
            return compute()

    real, matcher._own = matcher._own, Slow()
    cost = module.PATIENCE / 2
    assert matcher.compute_mask() is not None
    cost = module.SLOW / 2
    assert all(matcher.compute_mask() is not None for _ in range(1000))
    cost = 2 * module.SLOW
    assert [matcher.compute_mask() is None for _ in range(2000)].index(True) < 1 + (
        1000 + 2 * module.PATIENCE / module.SLOW
    )
