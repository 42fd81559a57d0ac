"""What a front keeps of a stream."""

from types import SimpleNamespace
from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cllm.cluster import replay as replay_module
from cllm.cluster.leases import Replica
from cllm.cluster.replay import Replay, ReplayMemory
from cllm.server.cluster.continuation import Continue
from cllm.serving.delivered import LENGTH, Delivery, Ending, Origin, Progress, split_progress
from cllm.store.charges import UsageCounts

ORIGIN = Origin("id", 1.0, [7], b"digest", 0)
ENDING = Ending(3, 4, 0, 0)
FAULT = Ending(3, 4, 0, 0, "the engine died", True)
DRAINED = Ending(3, 4, 0, 0, "it shuts down", True, True)
FATAL = Ending(3, 4, 0, 0, "the engine died twice", False)


def make_replica(epoch, status="ready"):
    lease = SimpleNamespace(status=status, epoch=epoch)
    return cast("Replica", SimpleNamespace(url="http://a", lease=lease))


REPLICA, AGAIN, DRAINING = make_replica("1"), make_replica("2"), make_replica("1", "draining")


def write(*outputs, origin=None, ending=None, data=b""):
    """Return a frame, as a replica writes it."""
    parts = [[(one.choice, one.token) for one in outputs]]
    progress = msgspec.msgpack.encode(parts if not (origin or ending) else [*parts, origin, ending])
    return LENGTH.pack(len(progress)) + LENGTH.pack(len(data)) + progress + data


def token(number):
    return Delivery(0, number)


FRAMES = [
    write(origin=ORIGIN),
    write(token(1), data=b"a"),
    write(data=b": ping"),
    write(token(2), token(3)),
    write(token(4), data=b"bcd"),
    write(ending=ENDING, data=b"end"),
]


def kept_tokens(replay):
    body = replay.make_body("/p", b"", "application/json", b"{}")
    asked = msgspec.msgpack.decode(body, type=Continue)
    decoded = [
        msgspec.msgpack.decode(part, type=Progress) for part in split_progress(asked.progress)
    ]
    assert [one.origin for one in decoded if one.origin] == [ORIGIN]
    return [output.token for one in decoded for output in one.outputs]


@given(st.integers(0, len(FRAMES)), st.data())
def test_client_gets_whole_frames_whatever_the_pieces(num_frames, data):
    """The rest of a frame that was cut off is dropped, and its tokens are not kept."""
    stream = b"".join(FRAMES[:num_frames]) + b"".join(FRAMES[num_frames : num_frames + 1])[:-1]
    replay, shown = Replay(ReplayMemory()), b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        shown += replay.feed(stream[:size])
        stream = stream[size:]
    bodies = [b"", b"a", b": ping", b"", b"bcd", b"end"]
    assert shown == b"".join(bodies[:num_frames])
    assert replay.is_complete == (num_frames == len(FRAMES))
    replay.lose(REPLICA)
    assert replay.can_continue == (0 < num_frames < len(FRAMES))
    if replay.can_continue:
        tokens = [[], [1], [], [2, 3], [4]]
        assert kept_tokens(replay) == [one for part in tokens[:num_frames] for one in part]


def test_progress_of_all_replicas_is_kept():
    replay = Replay(ReplayMemory())
    replay.feed(FRAMES[0] + FRAMES[1])
    replay.lose(REPLICA)
    replay.feed(write(origin=ORIGIN) + write(token(2), data=b"b"))
    replay.lose(REPLICA)
    assert kept_tokens(replay) == [1, 2]


def test_error_of_a_replica_is_held_back_if_another_one_may_continue():
    replay = Replay(ReplayMemory())
    replay.feed(FRAMES[0])
    assert replay.feed(write(ending=FAULT, data=b"error")) == b""
    assert replay.fault == b"error"
    assert replay.can_continue
    assert replay.feed(write(ending=FATAL, data=b"fatal")) == b"fatal"
    assert not replay.can_continue


def test_request_ends_after_ten_deaths_without_a_token_between_them():
    """Fewer of them may be kills from outside."""
    replay = Replay(ReplayMemory())
    replay.feed(FRAMES[0] + FRAMES[1])
    for number in (2, 3, 4):
        replay.lose(REPLICA)
        assert replay.can_continue
        assert (replay.may_try(REPLICA), replay.may_try(AGAIN)) == (False, True)
        replay.feed(write(token(number)))
        assert replay.may_try(REPLICA)
    replay.lose(DRAINING)
    replay.feed(write(ending=DRAINED))
    replay.lose(REPLICA)  # it has shut down
    for _ in range(10):
        assert replay.can_continue
        replay.lose(REPLICA)
    assert not replay.can_continue


def test_stream_that_has_become_too_long_cannot_be_continued(monkeypatch):
    """The memory of all streams is limited too."""
    monkeypatch.setattr(replay_module, "MAX_PROGRESS_BYTES", 100)
    monkeypatch.setattr(replay_module, "MAX_KEPT_BYTES", 150)
    memory = ReplayMemory()
    long, first, second = (Replay(memory) for _ in range(3))
    long.feed(FRAMES[0])
    assert long.can_continue
    long.feed(b"".join([write(token(number), data=b"a") for number in range(20)]))
    assert not long.can_continue
    assert memory.num_bytes == 0
    first.feed(FRAMES[0] + FRAMES[1])
    assert first.can_continue
    used = memory.num_bytes
    while second.feed(write(origin=ORIGIN) + FRAMES[1]) and second.can_continue:
        assert memory.num_bytes <= 150
    assert first.can_continue
    assert memory.num_bytes == used
    first.close()
    assert memory.num_bytes == 0


def test_bytes_that_are_no_frames_are_refused():
    too_long = LENGTH.pack(2**31) + LENGTH.pack(0)
    negative = write(ending=Ending(-3, 4, 0, 0))
    for data in (LENGTH.pack(1) + LENGTH.pack(0) + b"\xc1", too_long, negative):
        replay = Replay(ReplayMemory())
        assert replay.feed(FRAMES[0] + FRAMES[1] + data + FRAMES[1]) == b"a"
        assert replay.is_broken
        assert kept_tokens(replay) == [1]


def test_tokens_that_the_client_receives_are_counted_once():
    received = UsageCounts()
    replay = Replay(ReplayMemory(), received=received)
    replay.feed(write(origin=Origin("id", 1.0, [7], b"digest", 2, 9)))
    replay.feed(b"".join(FRAMES[1:5]) + write(Delivery(0, -1, "stop")))
    assert received == UsageCounts(0, 9, 2, 4)
    replay.lose(REPLICA)
    replay.feed(write(origin=Origin("id", 1.0, [7], b"digest", 5, 9)) + write(token(5)))
    assert received == UsageCounts(0, 9, 2, 5)


def test_progress_that_is_nonsense_breaks_the_stream():
    nonsense = b"\x91nonsense"
    frame = LENGTH.pack(len(nonsense)) + LENGTH.pack(0) + nonsense
    replay = Replay(ReplayMemory())
    replay.feed(write(origin=ORIGIN) + frame)
    assert replay.is_broken
    for origin in (
        Origin("id", 1.0, [7], b"digest", 0, -5),
        Origin("id", 1.0, [1 << 63], b"digest", 0),
        Origin("id", float("nan"), [7], b"digest", 0),
        Origin("id", float("inf"), [7], b"digest", 0),
        Origin("i\r\nd", 1.0, [7], b"digest", 0),
    ):
        replay = Replay(ReplayMemory())
        replay.feed(write(origin=origin))
        assert replay.is_broken


def test_nothing_comes_after_the_last_frame():
    for more in (write(data=b"more"), write(token(5), data=b"more"), write(ending=FATAL), b"x" * 9):
        replay = Replay(ReplayMemory())
        assert replay.feed(b"".join(FRAMES) + more) == b"a: pingbcdend"
        assert replay.feed(more) == b""
        assert replay.is_complete
        assert replay.ending == ENDING
