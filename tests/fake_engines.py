"""Engines of a pool without processes: tests play their messages, and read what they are sent."""

from __future__ import annotations

from collections import Counter

import msgspec

from cllm.backends.fake.backend import FakeBackend
from cllm.core.output import Stats, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import Add, Command
from cllm.engine.params import EngineParams
from cllm.process.launch import EngineSpec
from cllm.process.member import AssignedRequest, Member
from cllm.process.messages import LENGTH, Abandon, Ping, Ready, Stepped, Tokenize

INFO = FakeBackend().info
VOCABULARY = VocabularyTable.of(FakeBackend().vocabulary)
READY = Ready(INFO, VOCABULARY, EngineParams(backend="fake"))

_decode = msgspec.msgpack.Decoder(Command | Tokenize | Abandon | Ping).decode


def read_frames(data: bytes) -> list:
    """Return the messages in ``data``."""
    messages = []
    while data:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        messages.append(_decode(data[LENGTH.size : end]))
        data = data[end:]
    return messages


def ask(name: str, n: int = 1, priority: Priority = Priority.NORMAL, prompt=(1,)) -> Request:
    return Request(name, [*prompt], SamplingParams(n=n), priority=priority)


def step(*names: str, **stats) -> Stepped:
    """Return a step in which these requests have got a token."""
    return Stepped([TokenOutput(name, 0, 1) for name in names], Stats(num_seq_ids=2, **stats))


class FakePool:
    """The owner of members. Requests in ``ended`` have ended."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.texts: set[int] = set()  # numbers of members with texts to tokenize
        self.separating: set[int] = set()  # and of those that tokenize nothing else meanwhile
        self.ended: set[str] = set()

    def knows(self, request_id):
        return request_id not in self.ended

    def make_commands(self, request_id):
        return [] if request_id in self.ended else [Add(ask(request_id))]

    def has_texts(self, member):
        return member.number in self.texts

    def is_separating_texts(self, member):
        return member.number in self.separating

    def take(self, member, event):
        self.calls.append(("take", member.number, event))
        if isinstance(event, Ready):
            member.resume_all()

    def fail(self, member, request_ids, error):
        self.calls.append(("fail", member.number, [*request_ids], str(error)))


class FakeMember(Member):
    """A member whose engine is ready, with two slots, and responds unless it ``hangs``. ``sent``
    are the messages that it was sent.
    """

    def __init__(self, number: int = 0, pool: FakePool | None = None, clock=lambda: 0.0) -> None:
        self.sent: list = []
        self.hangs = False
        self.pool = pool or FakePool()
        spec = EngineSpec(number)
        super().__init__(READY.params, self.pool, spec, Counter[str](), clock)
        self.supervisor.write = lambda data: self.sent.extend(read_frames(data))
        self.supervisor.is_responding = lambda: self.ready and not self.hangs
        self.start()

    def start(self, fingerprint: str = "fake") -> None:
        info = msgspec.structs.replace(INFO, fingerprint=fingerprint, max_num_seqs=2)
        self.supervisor.info = info
        self.supervisor.ready = True
        self.take(msgspec.structs.replace(READY, info=info))

    def die(self) -> None:
        self.supervisor.ready = False

    def get(self, *names: str, n: int = 1, priority: Priority = Priority.NORMAL) -> None:
        """Give it requests, as a pool does."""
        for name in names:
            self.give(name, AssignedRequest(None, priority, n))
            if self.has(name):
                self.sent.append(Add(ask(name)))

    def take_sent(self) -> list:
        """Return the messages since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def take_added(self) -> list[str]:
        """Return the requests that it was sent since the last call."""
        return [one.request.request_id for one in self.take_sent() if isinstance(one, Add)]
