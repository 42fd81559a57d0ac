"""Guesses change the speed, never the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.backend import Costs
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.scheduler.speculation import PromptLookup, Speculation
from cllm.scheduler.step_cost import StepCost

CHEAP_ROWS = Costs(step=0.010, row=0.0005, token=0.0005)
DEAR_ROWS = Costs(step=0.001, row=0.010, token=0.001)
# the fake counts on, so it goes on as it did before
REPEATING = [*range(10, 40), 7, *range(10, 12)]


def sequence(tokens: list[int], **params) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams(**params)), 0, 0, 1000)


def test_lookup_finds_what_followed():
    """The longest n-gram counts, and its last occurrence."""
    lookup = PromptLookup()
    seq = sequence([1, 2, 3, 4, 9, 1, 2])
    assert lookup.draft({seq: 3}) == {seq: (3, 4, 9)}
    seq.append(3)
    assert lookup.draft({seq: 2}) == {seq: (4, 9)}
    seq.append(8)
    assert lookup.draft({seq: 2}) == {}


def test_lookup_prefers_the_longer_match():
    """Four tokens that agree say more than two."""
    seq = sequence([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4])
    assert PromptLookup().draft({seq: 1}) == {seq: (50,)}


@given(st.lists(st.integers(0, 3), min_size=2, max_size=60), st.integers(1, 5))
def test_lookup_is_what_a_search_finds(tokens, count):
    """The index that grows token by token finds the last occurrence that a search from the end
    finds.
    """
    lookup, seq = PromptLookup(), sequence(tokens[:2])
    for token in tokens[2:]:
        seq.append(token)
        found = lookup.draft({seq: count}).get(seq, ())
        expected = ()
        for size in PromptLookup.SIZES:
            ends = [
                e
                for e in range(size, len(seq.tokens))
                if seq.tokens[e - size : e] == seq.tokens[-size:]
            ]
            if len(seq.tokens) >= size and ends:
                expected = tuple(seq.tokens[ends[-1] : ends[-1] + count])
                break
        assert found == expected


def run(
    fake_engine, speculation: str, prompts: list[list[int]], costs: Costs = CHEAP_ROWS, **params
):
    engine = fake_engine(
        costs=costs, length=60, engine_speculation=speculation, engine_max_draft_tokens=6
    )
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, **{"max_tokens": 25, **params})
    engine.finish()
    return engine


def test_right_guesses_save_steps(fake_engine):
    """A text that repeats needs fewer steps and less time, and is the same."""
    off, on = (run(fake_engine, how, [REPEATING]) for how in ("off", "prompt_lookup"))
    assert on.tokens("0") == off.tokens("0")
    assert on.scheduler.num_accepted > 10
    assert on.now < off.now / 1.5
    assert on.ledger.cells.num_held == 0


@pytest.mark.parametrize(
    "params", [{"temperature": 3.0, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_k": 3}, {}]
)
@pytest.mark.parametrize("prompts", [[REPEATING], [REPEATING, [1, 2, 3, 1, 2], [5] * 9]])
def test_the_text_is_the_same(fake_engine, params, prompts):
    """Also where guesses are wrong and sampling is random: each position draws its own number."""
    off, on = (
        run(fake_engine, how, prompts, ignore_eos=True, **params)
        for how in ("off", "prompt_lookup")
    )
    assert on.scheduler.num_guesses > 0
    for i in range(len(prompts)):
        assert on.tokens(str(i)) == off.tokens(str(i))


@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 5}, {}])
def test_guesses_change_no_text_of_a_loose_grammar(fake_engine, params):
    """A guess that the grammar refuses is wrong; and what is guessed behind it does not move the
    grammar.
    """
    # every x is followed by !
    grammar = 'start: (shout "!")* rest\nshout[lazy]: /(?s:.*)x/\nrest: /(?s:.*)/'
    engines = []
    for how in ("off", "prompt_lookup"):
        engine = fake_engine(
            costs=CHEAP_ROWS, length=400, engine_speculation=how, engine_max_draft_tokens=6
        )
        prompt = [*range(0x20, 0x82), *range(0x20, 0x24)]
        engine.add("A", prompt, grammar=grammar, grammar_is_loose=True, max_tokens=300, **params)
        while engine.engine.has_work():
            engine.step()
        engines.append(engine)
    off, on = engines
    assert on.tokens("A") == off.tokens("A")
    assert bytes(on.tokens("A")).count(b"x!") > 2
    assert 10 < on.scheduler.num_accepted < on.scheduler.num_guesses


def test_an_end_among_the_guesses(fake_engine):
    """A stop token, the end of the model or max_tokens in the middle of right guesses ends the text
    there.
    """
    for params in ({"stop_token_ids": (20,)}, {"max_tokens": 7}, {"max_tokens": 1}):
        off, on = (run(fake_engine, how, [REPEATING], **params) for how in ("off", "prompt_lookup"))
        assert on.tokens("0") == off.tokens("0")
        assert on.ends() == off.ends()


def test_what_was_guessed_is_a_prefix_for_the_next(fake_engine):
    """After guesses, wrong ones too, the cells hold exactly the text: the next turn finds all of
    it.
    """
    engine = run(fake_engine, "prompt_lookup", [REPEATING], stop_token_ids=(30,))
    engine.add("next", [*REPEATING, *engine.tokens("0"), 9], max_tokens=1)
    assert engine.finish() == [f"next.0 {len(REPEATING) + 19}+1 sample"], (
        "the last token was a right guess"
    )


def test_no_guesses_where_rows_are_dear(fake_engine):
    """If a row costs as much as a step, guessing does not pay, and ends."""
    off, on = (run(fake_engine, how, [REPEATING], DEAR_ROWS) for how in ("off", "prompt_lookup"))
    assert on.now <= off.now * 1.02
    assert on.scheduler.num_guesses <= 20


def test_no_guesses_while_others_wait(fake_engine):
    """Rows are better used by those who wait."""
    engine = fake_engine(
        costs=CHEAP_ROWS, max_num_seqs=2, length=60, engine_speculation="prompt_lookup"
    )
    for i in range(5):
        engine.add(str(i), [i, *REPEATING], max_tokens=10)
    while engine.scheduler.waiting:
        engine.step()
        assert engine.scheduler.num_guesses == 0
    engine.finish()
    assert engine.scheduler.num_guesses > 0


def test_wrong_guesses_end():
    """A sequence whose guesses are wrong is trusted with fewer, and soon with none."""
    cost = StepCost(16)
    for rows in range(1, 8):
        cost.observe(rows, 0, 0.010 + 0.002 * rows)
    seq = sequence([1, 2, 1, 2, 1, 2])
    speculation = Speculation(PromptLookup(), 6, 16)
    counts = []
    for _ in range(40):
        draft = speculation.propose([seq], cost, 100).get(seq, ())
        counts.append(len(draft))
        if draft:
            speculation.verified(seq, len(draft), 0)
    assert counts[0] >= 2
    assert sum(counts[20:]) <= 2


def test_penalized_sequences_do_not_guess(fake_engine):
    """A penalty depends on the tokens before it, so each position would have to wait for the one
    before.
    """
    on = run(fake_engine, "prompt_lookup", [REPEATING], repetition_penalty=1.1)
    assert on.scheduler.num_guesses == 0


def test_a_drafter_that_fails_costs_no_answer(fake_engine, caplog):
    """Its guesses are done without from then on, and that is said once."""
    engine = fake_engine(costs=CHEAP_ROWS, engine_speculation="prompt_lookup", length=20)
    calls = []

    def fail(wanted):
        calls.append(wanted)
        raise EngineError("llama_decode returned -1")

    engine.scheduler._speculation._drafter.draft = fail
    request = engine.add("A", REPEATING)
    engine.finish()
    assert engine.tokens("A") == engine.right_tokens(request)
    assert len(calls) == 1
    assert [record.message for record in caplog.records] == [
        "no more guesses, because the drafter failed: llama_decode returned -1"
    ]
