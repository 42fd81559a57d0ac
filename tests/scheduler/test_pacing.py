"""Time is divided between streams, prompts, and sequences so long that they slow down all others."""

from __future__ import annotations

from statistics import median

import pytest

from cllm.backends.fake.backend import Costs
from cllm.core.request import Priority
from cllm.scheduler.pacing import LONG_TOKENS, PATIENCE, SHARE_BESIDE_MANY

COSTS = Costs(step=0.03, row=0.01, token=0.004)
DECODE = 0.03 + 7 * 0.01  # seconds of a step of seven streams


def make_engine(fake_engine, *, share: float = 0.7, target: float = 0.7, **options):
    return fake_engine(
        **{
            "context_length": 16_384,
            "max_num_seqs": 40,
            "num_cells": 80_000,
            "max_num_batched_tokens": 512,
            "length": 10_000,
            "costs": COSTS,
            "engine_prefill_share": share,
            "engine_target_itl": target,
            **options,
        }
    )


def run(engine, until) -> list[float]:
    """Step until ``until()``; return the durations of the steps."""
    durations = []
    while not until():
        begun = engine.now
        engine.step()
        durations.append(engine.now - begun)
        assert len(durations) < 100_000
    return durations


def start_streams(engine, count: int, prefix: str = "stream") -> None:
    for i in range(count):
        engine.add(f"{prefix}{i}", [i + 1] * 20, max_tokens=5000)
    run(engine, lambda: all(engine.tokens(f"{prefix}{i}") for i in range(count)))
    for _ in range(10):
        engine.step()


@pytest.mark.parametrize("share", [0.5, 0.6, 0.7])
def test_long_prompt_gets_its_share_and_streams_are_steady(fake_engine, share):
    """Most gaps between tokens are those of undisturbed streams, and none exceeds the target."""
    engine = make_engine(fake_engine, share=share)
    start_streams(engine, 7)
    engine.add("long", [5] * 4000, max_tokens=2)
    durations = run(engine, lambda: bool(engine.tokens("long")))
    prefill = sum(duration - DECODE for duration in durations)
    assert prefill / sum(durations) == pytest.approx(share, abs=0.05)
    assert median(durations) == pytest.approx(DECODE)
    assert max(durations) <= 0.7


def test_share_of_1_computes_prompts_in_every_step(fake_engine):
    engine = make_engine(fake_engine, share=1.0)
    start_streams(engine, 7)
    engine.add("long", [5] * 4000, max_tokens=2)
    durations = run(engine, lambda: bool(engine.tokens("long")))
    assert min(durations) > DECODE


def test_many_prompts_get_more_time_than_few_streams(fake_engine):
    engine = make_engine(fake_engine, share=0.5)
    start_streams(engine, 1)
    for i in range(30):
        engine.add(f"new{i}", [50 + i] * 100, max_tokens=1)
    durations = run(engine, lambda: bool(engine.tokens("new20")))
    assert sum(durations) < 21 * 100 * COSTS.token / 0.8


def test_prompt_after_a_long_one_does_not_wait_for_the_streams(fake_engine):
    """With a share of 1, what the long prompt has used beyond its patience is not held against the
    next one.
    """
    costs = Costs(step=0.03, row=0.01, token=0.02)
    engine = make_engine(fake_engine, share=1.0, costs=costs)
    start_streams(engine, 2)
    engine.add("long", [5] * 3000, max_tokens=1)
    engine.add("next", [6] * 300, max_tokens=1)
    run(engine, lambda: bool(engine.tokens("long")))
    begun = engine.now
    run(engine, lambda: bool(engine.tokens("next")))
    assert engine.now - begun < 300 * costs.token * 2


def test_prompts_of_a_lower_class_get_no_more_than_their_share(fake_engine):
    """However many there are."""
    engine = make_engine(fake_engine, share=0.5)
    start_streams(engine, 2)
    for i in range(30):
        engine.add(f"new{i}", [50 + i] * 100, max_tokens=1, priority=Priority.BATCH)
    durations = run(engine, lambda: bool(engine.tokens("new10")))
    prefill = sum(duration - (0.03 + 2 * 0.01) for duration in durations)
    assert prefill / sum(durations) == pytest.approx(0.5, abs=0.06)


def test_prompt_beyond_patience_gets_half_of_the_time(fake_engine):
    engine = make_engine(fake_engine, costs=Costs(step=0.03, row=0.01, token=0.02))
    start_streams(engine, 7)
    engine.add("long", [5] * 6000, max_tokens=2)
    begun = engine.now
    run(engine, lambda: engine.now - begun > PATIENCE / 0.7)
    before = engine.now
    durations = run(engine, lambda: engine.now - before > 40)
    assert not engine.tokens("long")
    prefill = sum(duration - DECODE for duration in durations)
    assert prefill / sum(durations) == pytest.approx(0.5, abs=0.06)


def serve_beside_long_row(fake_engine, weights: dict[str, float]) -> tuple[float, float]:
    """Return the share of the time that a long row got beside 31 streams, and the longest time
    between two of its tokens.
    """
    costs = Costs(step=0.03, row=0.006, token=0.0001, context=0.0001)
    engine = make_engine(fake_engine, costs=costs, engine_weights=weights)
    engine.add("long", [5] * (4 * LONG_TOKENS), account="one", max_tokens=3000)
    run(engine, lambda: bool(engine.tokens("long")))
    start_streams(engine, 31)
    begun, before, tokens = engine.now, engine.now, len(engine.tokens("long"))
    spent = longest = 0.0
    for _ in range(100):
        start = engine.now
        engine.step()
        if len(engine.tokens("long")) > tokens:
            tokens = len(engine.tokens("long"))
            longest = max(longest, engine.now - before)
            before = engine.now
            spent += (4 * LONG_TOKENS + tokens) * costs.context
        assert engine.now > start
    return spent / (engine.now - begun), longest


def test_long_row_gets_half_of_the_time(fake_engine):
    """It is in every second or third step, and the streams are in all of them."""
    share, longest = serve_beside_long_row(fake_engine, {})
    assert 0.35 <= share <= 0.5
    assert longest < 10


def test_long_row_gets_less_with_less_weight(fake_engine):
    share, _ = serve_beside_long_row(fake_engine, {"one": 0.25})
    assert 0.1 <= share <= 0.25


@pytest.mark.slow
def test_long_row_gets_its_share_beside_others_that_are_long_too(fake_engine):
    """Those that are computed in every step do not use up the share of the one that is not."""
    costs = Costs(step=0.02, row=0.002, token=0.0001, context=0.000005)
    engine = make_engine(fake_engine, costs=costs, num_cells=200_000, context_length=40_000)
    engine.add("longest", [5] * 30_000, max_tokens=3000)
    for i in range(4):
        engine.add(f"long{i}", [6 + i] * 3000, max_tokens=3000)
    run(engine, lambda: all(engine.tokens(f"long{i}") for i in range(4)))
    start_streams(engine, 2)
    begun, tokens = engine.now, len(engine.tokens("longest"))
    for _ in range(200):
        engine.step()
    spent = (len(engine.tokens("longest")) - tokens) * 30_000 * costs.context
    assert 0.3 <= spent / (engine.now - begun) <= 0.5


def test_long_row_alone_is_in_every_step(fake_engine):
    engine = make_engine(fake_engine, costs=Costs(step=0.03, row=0.006, context=0.0001))
    engine.add("long", [5] * 4000, max_tokens=50)
    run(engine, lambda: bool(engine.tokens("long")))
    assert len(run(engine, lambda: len(engine.tokens("long")) == 50)) == 49


@pytest.mark.slow
def test_short_prompts_do_not_wait_for_a_long_one(fake_engine):
    """Although a step has room for one of them, or for a part of the long one, but not for both."""
    costs = Costs(step=0.03, row=0.01, token=0.008)
    engine = make_engine(fake_engine, costs=costs, layout="paged", target=0.6)
    start_streams(engine, 4)
    engine.add("long", [5] * 8000, max_tokens=2)
    for _ in range(4):
        engine.step()
    waits = []
    for i in range(10):
        engine.add(f"short{i}", [60 + i] * 50, max_tokens=2)
        begun = engine.now
        run(engine, lambda i=i: bool(engine.tokens(f"short{i}")))
        waits.append(engine.now - begun)
    assert not engine.tokens("long")
    assert max(waits) < 4 * 0.6
    run(engine, lambda: bool(engine.tokens("long")))


@pytest.mark.slow
def test_short_prompts_do_not_wait_for_a_whole_step_of_a_long_one(fake_engine):
    """Although nobody decodes, because those that did have ended at the same time."""
    costs = Costs(step=0.03, row=0.01, token=0.008)
    engine = make_engine(fake_engine, costs=costs, layout="paged", target=0.6)
    engine.add("long", [5] * 8000, max_tokens=2)
    durations = []
    for i in range(30):
        for j in range(4):
            engine.add(f"short{i}-{j}", [10 + i, j] * 5, max_tokens=10)
        durations += run(
            engine, lambda i=i: all(len(engine.tokens(f"short{i}-{j}")) == 10 for j in range(4))
        )
    assert not engine.tokens("long")
    assert max(durations[10:]) <= 0.6 * 1.1  # the first steps teach what tokens cost


class LongCosts(Costs, frozen=True):
    """Prompt tokens cost more after many others, as their attention does."""

    def compute_seconds(self, batch):
        prompts = [row for row in batch.rows if row.num_tokens > 1]
        attended = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in prompts)
        return super().compute_seconds(batch) + attended * 1.6e-5


@pytest.mark.slow
def test_long_prompt_and_chats_both_get_their_share(fake_engine):
    """Chats that begin anew again and again need time for their own prompts. They get it while the
    long prompt has had its third of the time, and it gets its third while they wait. It gets more
    when a chunk of it takes so long that it would seldom advance.
    """
    costs = LongCosts(step=0.017, row=0.01, token=0.003)
    engine = make_engine(fake_engine, costs=costs, layout="paged", target=0.6, engine_check=False)
    chats: set[str] = set()
    sent = received = 0
    spent, advanced, pauses = 0.0, 0.0, []
    asked: dict[str, float] = {}
    waits, ended = [], set()

    def run_to(end: float) -> float:
        """Return the tokens per second of the chats. Stop earlier if the long prompt ends."""
        nonlocal sent, received, spent, advanced
        begun, before = engine.now, received
        while engine.now < end and "long" not in ended:
            while len(chats) < 31:
                sent += 1
                chats.add(f"chat{sent}")
                asked[f"chat{sent}"] = engine.now
                prompt = [sent % 250] * 59 + [sent // 250]
                engine.add(f"chat{sent}", prompt, max_tokens=32, ignore_eos=True)
            start = engine.now
            outputs = engine.engine.step()
            if any(row.seq.request.request_id == "long" for row in engine.backend.batches[-1].rows):
                spent += engine.now - start
                pauses.append(engine.now - advanced)
                advanced = engine.now
            received += sum(output.request_id in chats for output in outputs)
            answered = {output.request_id for output in outputs} & asked.keys()
            waits.extend(engine.now - asked.pop(name) for name in answered)
            ended.update(output.request_id for output in outputs if output.finish)
            chats.difference_update(ended)
        return (received - before) / (engine.now - begun)

    rate_before = run_to(60)
    engine.add("long", [251] * 4200, max_tokens=1)
    advanced = engine.now
    rate_beside = run_to(240)
    assert spent / 180 == pytest.approx(SHARE_BESIDE_MANY, abs=0.05)
    assert rate_beside / rate_before >= 0.6
    run_to(1000)
    assert "long" in ended
    assert max(pauses) < 10
    assert max(waits) < 20, "chats wait until the long prompt ends"


@pytest.mark.slow
def test_short_prompts_do_not_wait_for_a_long_one_of_another_account(fake_engine):
    """Although its account has been served less."""
    costs = LongCosts(step=0.017, row=0.01, token=0.003)
    engine = make_engine(fake_engine, costs=costs, layout="paged", target=0.6, engine_check=False)
    for i in range(20):
        engine.add(f"stream{i}", [i + 1] * 20, "chats", max_tokens=9000, ignore_eos=True)
    run(engine, lambda: all(engine.tokens(f"stream{i}") for i in range(20)))
    engine.add("long", [251] * 3000, "reports", max_tokens=1)
    waits = []
    while not engine.tokens("long"):
        begun, name = engine.now, f"chat{len(waits)}"
        engine.add(name, [60 + len(waits) % 150] * 50, "chats", max_tokens=1)
        run(engine, lambda name=name: bool(engine.tokens(name)))
        waits.append(engine.now - begun)
        engine.outputs = [output for output in engine.outputs if output.request_id == "long"]
    assert len(waits) > 100
    assert max(waits) < 15


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_long_sequence_decodes_beside_endless_short_prompts(fake_engine, share):
    """It is paused to learn what the others cost, which only a step without prompts tells."""
    costs = Costs(step=0.02, row=0.001, token=0.0005, context=0.000005)
    engine = make_engine(fake_engine, share=share, target=0.1, costs=costs, max_num_seqs=8)
    engine.add("long", [5] * 4000, max_tokens=3000, ignore_eos=True)
    run(engine, lambda: len(engine.tokens("long")) > 20)
    engine.add("short", [6] * 50, max_tokens=5000, ignore_eos=True)
    engine.outputs, last, pauses = [], engine.now, []
    for number in range(200):
        engine.add(f"chat{number}", [number] * 120, max_tokens=4, ignore_eos=True)
        engine.step()
        if any(output.request_id == "long" for output in engine.outputs):
            pauses.append(engine.now - last)
            last, engine.outputs = engine.now, []
    assert max([engine.now - last, *pauses]) < 5


@pytest.mark.slow
def test_streams_are_steady_beside_a_prompt_of_another_adapter(fake_engine):
    costs = Costs(step=0.03, row=0.01, token=0.01)
    engine = make_engine(fake_engine, costs=costs, target=0.6)
    start_streams(engine, 4)
    engine.add("long", [5] * 4000, max_tokens=1, adapters=(("poet", 1.0),), cache_salt="poet")
    last, longest = engine.now, 0.0
    while not engine.tokens("long"):
        num_tokens = len(engine.tokens("stream0"))
        engine.step()
        if len(engine.tokens("stream0")) > num_tokens:
            longest, last = max(longest, engine.now - last), engine.now
    assert longest < 0.7


@pytest.mark.slow
def test_time_of_a_prompt_is_remembered_while_another_adapter_has_its_turn(fake_engine):
    engine = make_engine(fake_engine, costs=Costs(step=0.03, row=0.01, token=0.02))
    start_streams(engine, 4)
    poet = {"adapters": (("poet", 1.0),), "cache_salt": "poet"}
    engine.add("poet", [99] * 20, max_tokens=9000, ignore_eos=True, **poet)
    run(engine, lambda: bool(engine.tokens("poet")))
    engine.add("long", [5] * 6000, max_tokens=1)
    most = 0.0
    while not engine.tokens("long"):
        engine.step()
        most = max([most, *engine.scheduler.pacing._spent.values()])
    assert most > PATIENCE
    engine.step()
    assert not engine.scheduler.pacing._spent


def test_share_of_1_computes_short_prompts_beside_a_long_one(fake_engine):
    engine = make_engine(fake_engine, share=1.0)
    start_streams(engine, 2)
    engine.add("long", [5] * 4000, max_tokens=2)
    engine.step()
    engine.add("short", [6] * 50, max_tokens=2)
    run(engine, lambda: bool(engine.tokens("short")))
    assert not engine.tokens("long")


def test_prompt_of_a_higher_class_than_all_streams_is_not_held_back(fake_engine):
    """It is computed in every step, whatever time other prompts have used."""
    engine = make_engine(fake_engine)
    for i in range(20):
        engine.add(f"stream{i}", [i + 1] * 20, max_tokens=5000, priority=Priority.BATCH)
    run(engine, lambda: all(engine.tokens(f"stream{i}") for i in range(20)))
    engine.add("low", [5] * 4000, max_tokens=1, priority=Priority.BATCH)
    for _ in range(5):
        engine.step()
    engine.add("high", [6] * 2000, max_tokens=1, priority=Priority.INTERACTIVE)
    durations = run(engine, lambda: bool(engine.tokens("high")))
    assert min(durations) > 2 * (COSTS.step + 20 * COSTS.row)


def test_prompt_of_a_lower_class_does_not_starve(fake_engine):
    """Prompts of a higher class arrive without end, and would use every step's budget."""
    engine = make_engine(fake_engine)
    sent, is_added = 0, False
    while not engine.tokens("low"):
        if sent >= 60 and not is_added:
            engine.add("low", [5] * 400, max_tokens=1, priority=Priority.BATCH)
            is_added = True
        while (
            len(engine.scheduler.sequences.running) + len(engine.scheduler.sequences.waiting) < 30
        ):
            sent += 1
            prompt = [sent % 200] * 900 + [sent // 200]
            engine.add(f"high{sent}", prompt, max_tokens=2, priority=Priority.INTERACTIVE)
        engine.step()
        assert engine.now < 600


def test_account_with_one_prompt_does_not_wait_for_all_prompts_of_another(fake_engine):
    """Although the others were admitted before."""
    engine = make_engine(fake_engine)
    for i in range(30):
        engine.add(f"many{i}", [i] * 500, account="many", max_tokens=2)
    for _ in range(3):
        engine.step()
    engine.add("one", [200] * 500, account="one", max_tokens=2)
    run(engine, lambda: bool(engine.tokens("one")))
    assert sum(bool(engine.tokens(f"many{i}")) for i in range(30)) < 6


def test_interrupted_step_does_not_hold_back_prompts(fake_engine):
    """As if the machine had been suspended for ten minutes during a prompt."""
    engine = make_engine(fake_engine)
    start_streams(engine, 7)
    engine.add("long", [5] * 4000, max_tokens=2)
    for _ in range(20):
        engine.step()
    forward = engine.backend.forward

    def interrupt(batch):
        if any(row.num_tokens > 1 for row in batch.rows):
            engine.sleep(600)
            engine.backend.forward = forward
        return forward(batch)

    engine.backend.forward = interrupt
    run(engine, lambda: engine.backend.forward is forward)
    begun = engine.now
    run(engine, lambda: bool(engine.tokens("long")))
    assert engine.now - begun < 2 * 4000 * COSTS.token / 0.5


def test_interrupted_step_gives_prompts_no_credit(fake_engine):
    """As if the machine had been suspended for ten minutes while streams decoded."""
    engine = make_engine(fake_engine)
    start_streams(engine, 7)
    engine.backend._sleep = lambda seconds: engine.sleep(seconds + 600)
    engine.step()
    assert engine.scheduler.pacing.short_prompts.seconds < 10


def test_prompts_one_after_the_other_get_their_share_together(fake_engine):
    """A prompt that is sent when the one before has been answered does not begin without debt."""
    engine = make_engine(fake_engine)
    start_streams(engine, 1)
    begun, tokens = engine.now, len(engine.tokens("stream0"))
    for i in range(30):
        engine.add(f"short{i}", [50 + i] * 150, max_tokens=1)
        run(engine, lambda i=i: bool(engine.tokens(f"short{i}")))
        engine.step()  # the answer is on its way
    decode = (len(engine.tokens("stream0")) - tokens) * (COSTS.step + COSTS.row)
    assert decode / (engine.now - begun) >= 0.25


def test_steps_of_rows_that_cost_almost_nothing_do_not_hide_the_cost_of_prompts(fake_engine):
    """As on a GPU: the cost of many rows, extrapolated from one, is far too high."""
    costs = Costs(step=0.007, row=0.00003, token=0.0001)
    engine = make_engine(fake_engine, costs=costs, target=0.2)
    start_streams(engine, 1)
    for i in range(39):
        engine.add(f"more{i}", [50 + i] * 50, max_tokens=3000)
    run(engine, lambda: all(engine.tokens(f"more{i}") for i in range(39)))
    for i in range(20):
        engine.abort(f"more{i}")
        engine.add(f"again{i}", [100 + i] * 50, max_tokens=3000)
        engine.step()
    assert engine.scheduler.cost.per_token > costs.token / 4


def test_of_prompts_that_arrive_together_shorter_ones_come_first(fake_engine):
    """But one that arrives later than a long one takes comes after it."""
    engine = make_engine(fake_engine, layout="paged")
    start_streams(engine, 2)
    for i, size in enumerate([200, 100, 150, 50]):
        engine.add(f"p{i}", [100 + i] * size, max_tokens=1)
    run(engine, lambda: all(engine.tokens(f"p{i}") for i in range(4)))
    first = [output.request_id for output in engine.outputs if output.request_id.startswith("p")]
    assert [*dict.fromkeys(first)] == ["p3", "p1", "p2", "p0"]


def test_prompts_and_streams_have_steps_of_their_own_if_their_passes_are_separate(fake_engine):
    """So a prompt does not wait for the streams' tokens, and streams wait no longer than the
    target.
    """
    engine = make_engine(fake_engine, layout="paged", max_num_batched_tokens=128)
    start_streams(engine, 7)
    engine.add("long", [5] * 4000, max_tokens=2)
    waits, waited = [], 0.0
    while not engine.tokens("long"):
        begun, step = engine.now, engine.step()
        waited += engine.now - begun
        assert ("long" in step) != ("stream" in step)
        if "stream" in step:
            waits.append(waited)
            waited = 0.0
    assert max(waits[1:]) <= 0.75
    assert median(waits) < 0.4


def test_prompts_that_are_cached_do_not_stop_streams(fake_engine):
    """They lack one token when they are admitted, and decode with the streams."""
    engine = make_engine(fake_engine, layout="paged", max_num_seqs=8)
    start_streams(engine, 3)
    engine.add("first", [9] * 200, max_tokens=1)
    run(engine, lambda: bool(engine.tokens("first")))
    for i in range(60):
        engine.add(f"same{i}", [9] * 200, max_tokens=1)
    tokens = len(engine.tokens("stream0"))
    for _ in range(10):
        engine.step()
    assert len(engine.tokens("stream0")) - tokens >= 8


@pytest.mark.slow
def test_old_prompt_gets_one_of_eight_turns_beside_streams(fake_engine):
    """Also if steps with and without prompts alternate."""
    engine = make_engine(fake_engine, layout="paged")
    start_streams(engine, 16)
    sent, added = 0, 0.0
    while not engine.tokens("low"):
        if sent == 12 and not added:
            engine.add("low", [5] * 2000, max_tokens=1, priority=Priority.BATCH)
            added = engine.now
        while len(engine.scheduler.sequences.running) + len(
            engine.scheduler.sequences.waiting
        ) < 20 + bool(added):
            sent += 1
            prompt = [sent % 200] * 400 + [sent // 200]
            engine.add(f"high{sent}", prompt, max_tokens=2, priority=Priority.INTERACTIVE)
        engine.step()
        assert engine.now < 300
