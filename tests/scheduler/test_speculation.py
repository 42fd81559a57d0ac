"""Speculation changes the speed, never the text."""

from __future__ import annotations

import pytest

from cllm.backends.fake.backend import Costs
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.scheduler.prompt_lookup import PromptLookup
from cllm.scheduler.speculation import Speculation
from cllm.scheduler.step_cost import StepCost

CHEAP_ROWS = Costs(step=0.010, row=0.0005, token=0.0005)
EXPENSIVE_ROWS = Costs(step=0.001, row=0.010, token=0.001)
# the fake backend counts on, so its output repeats the prompt
REPEATING = [*range(10, 40), 7, *range(10, 12)]


def sequence(tokens: list[int], **params) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams(**params)), 0, 0, 1000)


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


def test_accepted_draft_tokens_save_steps(fake_engine):
    """A repetitive text needs fewer steps and less time, and is the same."""
    off, on = (run(fake_engine, how, [REPEATING]) for how in ("off", "prompt_lookup"))
    assert on.tokens("0") == off.tokens("0")
    assert on.scheduler.statistics.num_accepted > 10
    assert on.now < off.now / 1.5
    assert on.kv_cache.cells.num_held == 0


@pytest.mark.parametrize("layout", ["partitioned", "unified"])
def test_only_neighbours_get_drafts_together(fake_engine, layout):
    """A model that takes back only some tokens computes rows with draft tokens only side by side.
    The sequence that lost its neighbour is computed without, unless the layout is unified.
    """
    engine = fake_engine(
        costs=CHEAP_ROWS,
        length=200,
        engine_speculation="prompt_lookup",
        max_taken_back=4,
        layout=layout,
    )
    for i in range(4):
        engine.add(str(i), REPEATING, max_tokens=5 if i == 1 else 150, ignore_eos=True)
    engine.finish()
    assert [len(engine.tokens(str(i))) for i in range(4)] == [150, 5, 150, 150]
    rows = [row for batch in engine.backend.batches for row in batch.rows if row.draft]
    assert max(len(row.draft) for row in rows) == 4
    with_draft = {
        tuple(row.seq.name for row in batch.rows if row.draft) for batch in engine.backend.batches
    }
    assert (("0.0", "2.0", "3.0") if layout == "unified" else ("2.0", "3.0")) in with_draft
    assert ("0.0", "1.0", "2.0", "3.0") in with_draft
    has_gap = [
        batch
        for batch in engine.backend.batches
        if {"0.0", "2.0"} <= {row.seq.name for row in batch.rows if row.draft}
        and "1.0" not in {row.seq.name for row in batch.rows}
    ]
    assert bool(has_gap) == (layout == "unified")


@pytest.mark.parametrize(
    "params", [{"temperature": 3.0, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_k": 3}, {}]
)
@pytest.mark.parametrize("prompts", [[REPEATING], [REPEATING, [1, 2, 3, 1, 2], [5] * 9]])
def test_speculation_keeps_text(fake_engine, params, prompts):
    """Draft tokens are rejected and sampling is random, but each position has its own random
    number.
    """
    off, on = (
        run(fake_engine, how, prompts, ignore_eos=True, **params)
        for how in ("off", "prompt_lookup")
    )
    assert on.scheduler.statistics.num_guesses > 0
    for i in range(len(prompts)):
        assert on.tokens(str(i)) == off.tokens(str(i))


@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 5}, {}])
def test_speculation_keeps_text_of_loose_grammar(fake_engine, params):
    """A draft token that the grammar forbids is rejected, and the tokens after it do not advance
    the grammar.
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
    assert 10 < on.scheduler.statistics.num_accepted < on.scheduler.statistics.num_guesses


def test_text_can_end_within_draft(fake_engine):
    """A stop token, the end token or max_tokens ends the text in the middle of accepted draft
    tokens.
    """
    for params in ({"stop_token_ids": (20,)}, {"max_tokens": 7}, {"max_tokens": 1}):
        off, on = (run(fake_engine, how, [REPEATING], **params) for how in ("off", "prompt_lookup"))
        assert on.tokens("0") == off.tokens("0")
        assert on.ends() == off.ends()


def test_cells_after_speculation_serve_next_turn(fake_engine):
    """The cells hold exactly the text, so the next turn finds all of it."""
    engine = run(fake_engine, "prompt_lookup", [REPEATING], stop_token_ids=(29,))
    engine.add("next", [*REPEATING, *engine.tokens("0"), 9], max_tokens=1)
    assert engine.finish() == [f"next.0 {len(REPEATING) + 18}+1 sample"], (
        "the last token was an accepted draft token"
    )


def test_no_draft_if_rows_are_expensive(fake_engine):
    """If a row costs as much as a step, speculation does not help and stops."""
    off, on = (
        run(fake_engine, how, [REPEATING], EXPENSIVE_ROWS) for how in ("off", "prompt_lookup")
    )
    assert on.now <= off.now * 1.02
    assert on.scheduler.statistics.num_guesses <= 20


def test_no_draft_while_requests_wait(fake_engine):
    """Waiting requests make better use of the rows."""
    engine = fake_engine(
        costs=CHEAP_ROWS, max_num_seqs=2, length=60, engine_speculation="prompt_lookup"
    )
    for i in range(5):
        engine.add(str(i), [i, *REPEATING], max_tokens=10)
    while engine.scheduler.sequences.waiting:
        engine.step()
        assert engine.scheduler.statistics.num_guesses == 0
    engine.finish()
    assert engine.scheduler.statistics.num_guesses > 0


def test_rejected_draft_tokens_reduce_drafting():
    """A sequence whose draft tokens are rejected gets fewer of them, and soon none."""
    cost = StepCost(16)
    for rows in range(1, 8):
        cost.observe(rows, 0, 0.010 + 0.002 * rows)
    seq = sequence([1, 2, 1, 2, 1, 2])
    speculation = Speculation([PromptLookup()], 6, 16)
    counts = []
    for _ in range(40):
        draft = speculation.propose([seq], cost, cost, 100).get(seq, ())
        counts.append(len(draft))
        if draft:
            speculation.record_verification(seq, len(draft), 0)
    assert counts[0] >= 2
    assert sum(counts[20:]) <= 2


def test_sequences_with_penalties_get_no_draft(fake_engine):
    """A penalty depends on the previous tokens, so each position would have to wait for the one
    before it.
    """
    on = run(fake_engine, "prompt_lookup", [REPEATING], repetition_penalty=1.1)
    assert on.scheduler.statistics.num_guesses == 0


def test_failing_drafter_disables_speculation(fake_engine, caplog):
    """Requests continue without it, and one message is logged."""
    engine = fake_engine(costs=CHEAP_ROWS, engine_speculation="prompt_lookup", length=20)
    calls = []

    def fail(wanted):
        calls.append(wanted)
        raise EngineError("llama_decode returned -1")

    engine.scheduler._speculation._sources[0].drafter.draft = fail
    request = engine.add("A", REPEATING)
    engine.finish()
    assert engine.tokens("A") == engine.right_tokens(request)
    assert len(calls) == 1
    assert [record.message for record in caplog.records] == [
        "disabling a source of draft tokens because it failed: llama_decode returned -1"
    ]


def test_new_sequences_begin_with_the_rate_of_earlier_ones():
    """A drafter that was always right gets long drafts at once, one that was never right short
    ones or none.
    """

    def first_drafts(num_right: int) -> list[int]:
        """Return the number of draft tokens that each new sequence begins with."""
        speculation, cost = Speculation([Repeats()], 8, 100), StepCost(16)
        for rows in range(1, 12):
            cost.observe(rows, 0, 0.010 + 0.002 * rows)
        begun = []
        for _ in range(8):
            seq = sequence([1, 2, 3])
            drafts = speculation.propose([seq], cost, cost, 100)
            begun.append(len(drafts.get(seq, ())))
            for _ in range(20):
                speculation._sources[0].record_verification(seq, 4, num_right)
            speculation.forget(seq)
        return begun

    good, bad = first_drafts(4), first_drafts(0)
    assert good[0] == bad[0]
    assert good[-1] > good[0] > bad[-1]


class Repeats:
    """Drafts ones for all sequences, or ``token`` at a cost of ``seconds`` for each."""

    def __init__(self, token: int = 1, seconds: float = 0.0) -> None:
        self.token, self.token_seconds, self.seconds = token, seconds, seconds

    def draft(self, wanted):
        return {seq: (self.token,) * count for seq, count in wanted.items()}

    def forget(self, seq) -> None:
        pass


def test_drafting_is_tried_again_after_bad_sequences():
    """Although a draft of these costs is worth nothing at the lowest rate."""
    speculation, cost = Speculation([Repeats()], 8, 100), StepCost(16)
    for _ in range(10):
        for rows in range(1, 12):
            cost.observe(rows, 0, 0.030 + 0.012 * (rows - 1))

    def serve(num_right: int) -> int:
        seq = sequence([1, 2, 3])
        for _ in range(30):
            draft = speculation.propose([seq], cost, cost, 100).get(seq, ())
            if draft:
                speculation.record_verification(seq, len(draft), min(num_right, len(draft)))
        speculation.forget(seq)
        return len(draft)

    drafted = [serve(0) for _ in range(10)]
    assert drafted[-1] == 0
    assert any(serve(0) or serve(8) for _ in range(20))


def test_copied_text_is_drafted_at_length_until_it_changes():
    """The first token after a wrong one is less certain than those after a right one."""
    speculation, cost = Speculation([Repeats()], 8, 100), StepCost(16)
    for _ in range(10):
        for rows in range(1, 12):
            cost.observe(rows, 0, 0.010 + 0.004 * rows)
    seq = sequence([1, 2, 3])
    after = {True: 0, False: 0}
    for i in range(60):
        count = len(speculation.propose([seq], cost, cost, 100).get(seq, ()))
        is_right = i % 3 != 2
        speculation.record_verification(seq, count, count if is_right else 0)
        after[is_right] = len(speculation.propose([seq], cost, cost, 100).get(seq, ()))
    assert after[True] > after[False]


def test_best_source_drafts():
    """Of two that are equally good, the first one; else the one whose drafts are accepted. A source
    whose drafts take too long is not asked.
    """
    cost = StepCost(16)
    for _ in range(10):
        for rows in range(1, 12):
            cost.observe(rows, 0, 0.010 + 0.001 * rows)

    def serve(*sources: Repeats, right: int, times: int = 60) -> list[int]:
        """Return the first token of each draft, 0 without."""
        speculation, seq = Speculation(sources, 8, 100), sequence([1, 2, 3])
        tokens = []
        for _ in range(times):
            draft = speculation.propose([seq], cost, cost, 100).get(seq, (0,))
            tokens.append(draft[0])
            if draft[0]:
                num_right = len(draft) if draft[0] == right else 0
                speculation.record_verification(seq, len(draft), num_right)
        return tokens

    assert set(serve(Repeats(1), Repeats(2), right=1)) == {1}
    tokens = serve(Repeats(1), Repeats(2), right=2)
    assert tokens[0] == 1
    assert tokens[-30:].count(2) > 25
    assert set(serve(Repeats(1, 0.2), right=1)[5:]) == {0}
    assert serve(Repeats(1, 0.001), right=1)[-1] == 1
    assert 1 in serve(Repeats(1, 0.015), right=1, times=2000)[1000:], "it is tried again"


def test_source_that_fails_leaves_the_others():
    speculation, cost = Speculation([Repeats(1), Repeats(2)], 8, 100), StepCost(16)
    cost.observe(1, 0, 0.010)
    seq = sequence([1, 2, 3])

    def fail(wanted):
        raise EngineError("llama_decode returned -1")

    speculation._sources[0].drafter.draft = fail
    for _ in range(2):
        assert set(speculation.propose([seq], cost, cost, 100)[seq]) == {2}


def test_rows_of_drafts_and_of_sequences_cost_differently():
    """Eight sequences are cheap without drafts; with a draft each, sixteen rows are not. This is not
    learned from steps of few sequences, whose drafts pay.
    """
    speculation, cost, drafted = Speculation([Repeats()], 8, 100), StepCost(16), StepCost(16)
    cost.observe(1, 0, 0.010)
    for _ in range(10):
        for rows in range(2, 10):
            drafted.observe(rows, 0, 0.014 + 0.001 * rows)
    alone, seqs = sequence([1, 2, 3]), [sequence([i, 2, 3]) for i in range(8)]
    assert len(speculation.propose([alone], cost, drafted, 100)[alone]) > 1
    assert speculation.propose(seqs, cost, drafted, 100) == {}, "their cost is not known"
    cost.observe(8, 0, 0.012)
    for _ in range(5):
        drafted.observe(16, 0, 0.030)
    assert speculation.propose(seqs, cost, drafted, 100) == {}
    for _ in range(20):
        drafted.observe(16, 0, 0.014)
    assert len(speculation.propose(seqs, cost, drafted, 100)) == 8


def test_slow_first_steps_do_not_end_drafting():
    """Nor do steps that were slow because the machine had other work."""
    speculation, cost, drafted = Speculation([Repeats()], 8, 100), StepCost(16), StepCost(16)
    seq = sequence([1, 2, 3])
    cost.observe(1, 0, 0.010)
    drafted.observe(2, 0, 0.500)
    assert speculation.propose([seq], cost, drafted, 100)
    for rows in range(2, 10):
        for _ in range(5):
            drafted.observe(rows, 0, 0.500)
    counts = [len(speculation.propose([seq], cost, drafted, 100)) for _ in range(1100)]
    assert counts[:900] == [0] * 900
    assert sum(counts) > 0


def test_some_steps_have_no_drafts():
    """So that their cost is known, however good the drafts are."""
    speculation, cost, seq = Speculation([Repeats()], 8, 100), StepCost(16), sequence([1, 2, 3])
    cost.observe(1, 0, 0.010)
    counts = []
    for _ in range(200):
        draft = speculation.propose([seq], cost, cost, 100).get(seq, ())
        counts.append(len(draft))
        if draft:
            speculation.record_verification(seq, len(draft), len(draft))
    assert counts.count(0) == 3


def test_long_contexts_make_drafts_dear():
    """Each draft token attends to all of them."""
    cost = StepCost(16)
    for _ in range(10):
        for rows in range(1, 10):
            cost.observe(rows, 0, 0.030 + 0.001 * rows)
            cost.observe(rows, 0, 0.030 + 0.101 * rows, num_long_tokens=4000 * rows)

    def count(length: int) -> int:
        request = Request("A", [1] * length, SamplingParams())
        seq = Sequence(request, 0, 0, 10_000)
        return len(Speculation([Repeats()], 8, 100).propose([seq], cost, cost, 100).get(seq, ()))

    assert count(100) > 0
    assert count(4000) == 0
