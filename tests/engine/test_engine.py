"""The loop of the engine, with an inbox and an outbox that are lists."""

from __future__ import annotations

import pytest

from cllm.backends.fake.backend import FailingSteps, FakeBackend
from cllm.backends.fake.vocabulary import END
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Abort, Add, Close, LoadAdapter
from cllm.engine.params import EngineParams
from cllm.scheduler.sequences import MAX_FAILURES


class Script:
    """An inbox whose n-th drain returns the n-th list of commands, and Close at the end. It records
    the ``block`` arguments.
    """

    def __init__(self, *commands: list) -> None:
        self.commands = [*commands, [Close()]]
        self.blocks = []

    def drain(self, block: bool) -> list:
        self.blocks.append(block)
        return self.commands.pop(0)


class Outbox:
    """Records what is sent."""

    def __init__(self) -> None:
        self.sent = []
        self.replies = []

    def send(self, outputs, stats) -> None:
        self.sent.append((outputs, stats))

    def send_message(self, message) -> None:
        self.replies.append(message)


def add(name: str, prompt: list[int], **params) -> Add:
    return Add(Request(name, prompt, SamplingParams(**{"temperature": 0, **params})))


def run(script: Script, **options) -> list:
    """Return the sent messages: one (outputs, stats) for each turn of the loop."""
    outbox = Outbox()
    engine = build_engine(FakeBackend(**options), EngineParams(check=True, speculation="off"))
    engine.run(script, outbox)
    return outbox.sent


def tokens(sent: list, name: str, index: int = 0) -> list[int]:
    return [
        o.token for outputs, _ in sent for o in outputs if (o.request_id, o.index) == (name, index)
    ]


def ends(sent: list) -> dict[str, str]:
    return {
        f"{o.request_id}.{o.index}": str(o.finish)
        for outputs, _ in sent
        for o in outputs
        if o.finish
    }


def test_engine_blocks_only_without_work():
    """The inbox may block only while no sequence is running or waiting."""
    script = Script([add("A", [1])], [], [], [add("B", [1], max_tokens=1)])
    run(script, length=2)
    assert script.blocks == [True, False, False, True, True]


def test_each_step_sends_one_message():
    """The message has all tokens of the step, and the state of the engine after it."""
    sent = run(Script([add("A", [1]), add("B", [7])], [], []), length=2)
    assert [[(o.request_id, o.token) for o in outputs] for outputs, _ in sent] == [
        [("A", 2), ("B", 8)],
        [("A", 3), ("B", 9)],
        [("A", END), ("B", END)],
    ]
    assert [stats.num_running for _, stats in sent] == [2, 2, 0]
    assert [stats.num_steps for _, stats in sent] == [1, 2, 3]


def test_new_request_joins_next_step():
    """They enter in the next step."""
    sent = run(Script([add("A", [1])], [add("B", [7])], [], [], []), length=2)
    assert tokens(sent, "A") == [2, 3, END]
    assert tokens(sent, "B") == [8, 9, END]
    assert [stats.num_running for _, stats in sent][:2] == [1, 2]


def test_abort_ends_sequences_in_next_step():
    """The end of an aborted sequence is sent with the step. No output follows it."""
    script = Script(
        [add("A", [1], n=2), add("B", [7])], [Abort("A", 1)], [Abort("A"), Abort("nobody")], []
    )
    sent = run(script, length=9)
    assert tokens(sent, "A", 1) == [2, -1]
    assert tokens(sent, "A", 0) == [2, 3, -1]
    assert tokens(sent, "B") == [8, 9, 10, 11]
    assert ends(sent) == {"A.1": "abort", "A.0": "abort"}


def test_abort_of_last_sequence_needs_no_step():
    """Its end is sent without a step, and the loop blocks again."""
    script = Script([add("A", [1])], [Abort("A")])
    sent = run(script, length=9)
    assert ends(sent) == {"A.0": "abort"}
    assert script.blocks == [True, False, True]
    assert sent[-1][1].num_steps == 1


def test_commands_are_executed_in_order():
    """An abort before its request has no effect."""
    sent = run(Script([add("A", [1]), Abort("A")], [Abort("B"), add("B", [1], max_tokens=1)]))
    assert tokens(sent, "A") == [-1]
    assert tokens(sent, "B") == [2]


def test_close_ends_loop():
    """It ends while a sequence is running, and later commands are ignored."""
    script = Script([add("A", [1])], [Close(), add("B", [1])])
    sent = run(script, length=9)
    assert tokens(sent, "A") == [2]
    assert len(script.commands) == 1


def test_sequence_ends_after_repeated_failures():
    """A sequence ends with "error" after MAX_FAILURES failed batches. The others are computed."""
    script = Script([add("A", [1]), add("B", [7]), add("C", [20])], *[[]] * (MAX_FAILURES + 5))
    sent = run(
        script,
        length=2,
        max_num_seqs=2,
        failing=FailingSteps(raise_at_step=1, raise_times=MAX_FAILURES),
    )
    assert ends(sent) == {"A.0": "error", "B.0": "stop", "C.0": "stop"}, (
        "the sequences are retried one by one"
    )
    assert tokens(sent, "A") == [-1]
    assert tokens(sent, "C") == [21, 22, END]
    assert sent[MAX_FAILURES - 1][1].num_seq_ids_in_use == 0
    assert sent[MAX_FAILURES - 1][1].num_cells_held == 0


@pytest.mark.parametrize("step", [2, 3, 4])
def test_engine_continues_after_error(step):
    """A failed batch is computed again from the tokens. What it left in the cells affects no
    sequence.
    """
    script = Script([add("A", [1]), add("B", [7])], *[[]] * (step - 1), [add("C", [20])], *[[]] * 5)
    script.commands[-1:-1] = [[]] * 8
    sent = run(script, length=4, max_num_seqs=2, failing=FailingSteps(raise_at_step=step))
    assert ends(sent) == {"A.0": "stop", "B.0": "stop", "C.0": "stop"}
    assert [tokens(sent, name) for name in "ABC"] == [[*range(n, n + 4), END] for n in (2, 8, 21)]


def test_operations_of_failed_batch_are_done_later():
    """B's step failed before it could trim the cells that A had left."""
    script = Script(
        [add("A", [1] * 20, max_tokens=1)],
        [add("B", [2], max_tokens=1)],
        [add("C", [3], max_tokens=1)],
        [],
        [],
    )
    sent = run(script, max_num_seqs=1, failing=FailingSteps(raise_at_step=2))
    assert ends(sent) == {"A.0": "length", "B.0": "length", "C.0": "length"}


def test_seed_gives_same_text_alone_and_with_neighbours(fake_engine):
    """The temperature makes the fake backend's tokens random; neighbours arrive, finish and
    preempt.
    """
    lonely = fake_engine(length=30)
    lonely.add("A", [1, 2, 3], seed=7, temperature=5.0, max_tokens=30, ignore_eos=True, n=2)
    lonely.finish()

    crowd = fake_engine(
        length=30, context_length=64, num_cells=80, max_num_seqs=4, max_num_batched_tokens=8
    )
    crowd.scheduler.sequences.length_estimates.output = 4
    for i in range(3):
        crowd.add(str(i), [i] * 9, seed=i, temperature=5.0, max_tokens=20 + i, ignore_eos=True)
    crowd.add("A", [1, 2, 3], seed=7, temperature=5.0, max_tokens=30, ignore_eos=True, n=2)
    crowd.finish()
    assert crowd.scheduler.statistics.num_parked > 0
    for index in range(2):
        assert crowd.tokens("A", index) == lonely.tokens("A", index)
    assert lonely.tokens("A", 0) != lonely.tokens("A", 1), "the sequences of a request differ"
    assert len(set(lonely.tokens("A"))) > 5, "the tokens are random"


# --- unexpected exceptions -----------------------------------------------------------------------


def make_surviving_engine(**options):
    """Return an engine that survives exceptions, as in a server. A test engine raises them."""
    return build_engine(
        FakeBackend(**options), EngineParams(speculation="off", ram_cache_bytes=1 << 20)
    )


def finish(engine) -> list:
    """Step until there is no work; return the outputs."""
    outputs = []
    for _ in range(200):
        if not engine.has_work():
            return outputs
        outputs += engine.step()
        engine.scheduler.sequences.check()
    raise AssertionError(f"the engine does not finish: {engine.scheduler}")


def raise_for(monkeypatch: pytest.MonkeyPatch, owner, name: str, request_id: str) -> None:
    """Make the method ``name`` of ``owner`` raise an exception for the sequences of one request."""
    method = getattr(owner, name)

    def faulty(seq, *args, **kwargs):
        if seq.request.request_id == request_id:
            raise ZeroDivisionError(request_id)
        return method(seq, *args, **kwargs)

    monkeypatch.setattr(owner, name, faulty)


def raise_for_row(monkeypatch: pytest.MonkeyPatch, sampler, request_id: str) -> None:
    """Make the sampling of one request's rows raise an exception."""
    sample = sampler._sample

    def faulty(row, *args):
        if row.seq.request.request_id == request_id:
            raise ZeroDivisionError(request_id)
        sample(row, *args)

    monkeypatch.setattr(sampler, "_sample", faulty)


@pytest.mark.parametrize("method", ["group", "effective_priority", "served"])
def test_policy_exception_ends_only_its_request(method, monkeypatch):
    """While it is queued, admitted or sampled."""
    engine = make_surviving_engine(length=4)
    raise_for(monkeypatch, engine.scheduler.sequences.waiting.policy, method, "B")
    outputs = [
        output
        for name, prompt in (("A", 1), ("B", 7), ("C", 20))
        for output in engine.handle(add(name, [prompt]))
    ]
    outputs += finish(engine)
    assert {o.request_id: str(o.finish) for o in outputs if o.finish} == {
        "A": "stop",
        "B": "error",
        "C": "stop",
    }
    assert tokens([(outputs, None)], "A") == [2, 3, 4, 5, END]
    assert tokens([(outputs, None)], "C") == [21, 22, 23, 24, END]


def test_sampling_exception_ends_only_its_sequence(monkeypatch):
    """The others are not recomputed, and cells of the failed sequence are not reused."""
    engine = make_surviving_engine(length=4)
    raise_for_row(monkeypatch, engine.sampler, "B")
    for name, prompt in (("A", 1), ("B", 7), ("C", 20)):
        engine.handle(add(name, [prompt] * 9))
    outputs = finish(engine)
    assert {o.request_id: str(o.finish) for o in outputs if o.finish} == {
        "A": "stop",
        "B": "error",
        "C": "stop",
    }
    assert tokens([(outputs, None)], "C") == [21, 22, 23, 24, END]
    assert engine.scheduler.statistics.num_steps == 5
    engine.handle(add("D", [7] * 9))
    assert next(output.num_cached_tokens for output in finish(engine)) == 0


def test_exception_in_every_step_ends_all_requests_but_not_engine(monkeypatch):
    """If no sequence causes it, each is tried MAX_FAILURES times. Later requests are served."""
    engine = make_surviving_engine(length=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.scheduler.cost, "compute_prefill_budget", lambda *args, **kwargs: 1 / 0
        )
        engine.handle(add("A", [1]))
        engine.handle(add("B", [7]))
        outputs = finish(engine)
    assert {o.request_id: str(o.finish) for o in outputs if o.finish} == {
        "A": "error",
        "B": "error",
    }
    engine.handle(add("C", [20]))
    assert [output.token for output in finish(engine)] == [21, 22, END]


def test_failed_add_ends_all_sequences_of_request(monkeypatch):
    """Each ends once, also those that were queued already."""
    engine = make_surviving_engine()
    made = []

    def derive_seed(seed: int, index: int) -> int:
        made.append(index)
        return 1 // (2 - index)

    monkeypatch.setattr("cllm.engine.engine.derive_seed", derive_seed)
    outputs = engine.handle(add("A", [1], n=4))
    assert sorted(output.index for output in outputs if output.finish) == [0, 1, 2, 3]
    assert made == [0, 1, 2]
    assert not engine.has_work()


def test_adapter_may_take_long_to_load():
    """The supervisor sees that more than a usual step is expected."""
    seen = []

    class Record:
        def begin(self, request_ids, expected_seconds):
            seen.append(expected_seconds)

        def end(self):
            pass

    class Backend(FakeBackend):
        def load_adapter(self, name, path):
            assert seen == [60.0]

    backend = Backend()
    engine = build_engine(backend, EngineParams())
    engine.use_record(Record())
    engine.run(Script([LoadAdapter("a", "a.gguf")]), Outbox())
    assert seen == [60.0]
