"""What the live view of a cluster makes of the snapshots of its replicas."""

import time

import msgspec

from cllm.cluster.journey import MAX_ATTEMPTS, Journey
from cllm.cluster.outcomes import ReplicaLost
from cllm.cluster.view import label
from cllm.observe.request_record import RequestRecord
from cllm.scheduler.trace import SequenceState
from cllm.server.live.schema import EngineState, Latencies, ModelState, Snapshot

ZEROS = dict.fromkeys(EngineState.__struct_fields__, 0) | {
    "is_ready": True,
    "stage_ms": {},
    "steps": [],
}


def make_sequence(name):
    reason = "it is behind cmpl-1-again0123abcd-0.1, the head of the queue"
    return SequenceState(name, "ann", "normal", "decode", 1.0, 1.0, 7, reason=reason)


def make_model(*names):
    sequences = [make_sequence(name) for name in names]
    prompts = {name.rpartition(".")[0]: f"prompt of {name}" for name in names}
    engine = EngineState(**ZEROS | {"sequences": sequences, "prompts": prompts})
    return ModelState("m", "loaded", 1.0, 0, len(names), 0.0, 0.0, [], [engine])


def test_sequence_that_another_replica_continues_keeps_its_name():
    model = make_model("cmpl-1-again0123abcd-0.1", "cmpl-2-0.0", "cmpl-3-0.0")
    [engine] = label(model, "a", {"cmpl-3-0.0"}).engines
    assert [one.name for one in engine.sequences] == ["cmpl-1-0.1", "cmpl-2-0.0"]
    reason = "it is behind cmpl-1-0.1, the head of the queue"
    assert {one.reason for one in engine.sequences} == {reason}
    assert engine.prompts["cmpl-1-0"] == "prompt of cmpl-1-again0123abcd-0.1"
    assert model.engines[0].sequences[0].name == "cmpl-1-again0123abcd-0.1"


def test_attempts_that_fail_in_the_same_way_are_told_once_and_are_bounded():
    journey = Journey(RequestRecord())

    def ask(replica):
        try:
            with journey.ask(replica):
                raise ReplicaLost("gone")
        except ReplicaLost:
            pass

    for _ in range(100):
        ask("a")
    assert journey.describe(time.monotonic()) == []
    ask("b")
    first, second = journey.describe(time.monotonic())
    assert first.startswith("a did not begin to answer 0.")
    assert second.startswith("b did not begin to answer 0.")
    assert journey.is_at_front
    state = journey.show(time.monotonic())
    assert state.reason == (
        "b did not begin to answer, and the front looks for a replica that answers it"
    )
    for number in range(100):
        ask(f"{number}")
    assert len(journey.describe(time.monotonic())) == MAX_ATTEMPTS
    with journey.ask("c"):
        assert journey.record.num_retries == 102
        assert not journey.is_at_front
        assert journey.describe(time.monotonic())[-1].startswith("c has had it for 0.")


def test_merging_8_replicas_with_64_sequences_takes_milliseconds():
    """Snapshots are decoded, labelled and encoded again; 1.6 ms were measured."""
    names = [f"chatcmpl-{number:024x}-0.0" for number in range(64)]
    snapshot = Snapshot(0.0, "1", True, [make_model(*names)], Latencies())
    data = msgspec.json.encode(snapshot)
    seconds = []
    for _ in range(10):
        begun = time.thread_time()
        models = []
        for replica in range(8):
            read = msgspec.json.decode(data, type=Snapshot)
            models += [label(one, f"{replica}", set()) for one in read.models]
        msgspec.json.encode(msgspec.structs.replace(snapshot, models=models))
        seconds.append(time.thread_time() - begun)
    assert min(seconds) < 0.03
