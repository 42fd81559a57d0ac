"""The workloads that users have: agents, questions about documents, edits, long prompts beside
chats, batch work beside chats, and a load that changes.

Their sizes are in tokens of the server's model. Each scenario is a list of stages, which run one
after the other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from cllm.bench.load.dialects import DIALECTS
from cllm.bench.load.workload import (
    Group,
    RequestSpec,
    Stage,
    Task,
    WordSource,
    conversations,
    make_task,
)
from cllm.models.builtin.questions import NAMES, stories

AGENT_TURNS = 6
DOCUMENTS = 12
LEAD = 32  # chunks that each stream receives before the long prompt is sent
STREAM_TOKENS = 512
BATCH = 48  # requests and clients of the batch work
SHARERS = 8
FEWEST_TOKENS, MOST_TOKENS = 20, 8000  # the range of mixed prompt lengths
ZIPF = 1.5  # the density of mixed lengths falls with this power of the length
WAVES = 2  # requests of each client

ALONE, LONG, STREAMS, CHATS, BATCHES = "alone", "long", "streams", "chats", "batch"
PHASES = (
    "1: short",
    "2: one long among them",
    "3: with a shared beginning",
    "4: of mixed lengths",
)


class Sizes(msgspec.Struct, frozen=True):
    """How much a scenario sends.

    ``requests`` are sent in total, or in a part of the scenario. The long prompt, if there is one,
    has ``long_tokens`` tokens. ``scale`` is a factor for all numbers of prompt tokens.
    """

    requests: int
    clients: int
    long_tokens: int = 0
    scale: float = 1.0


class Writer(WordSource):
    """A source of prompts whose lengths are in tokens."""

    def __init__(self, spec: RequestSpec, sizes: Sizes) -> None:
        self.spec = msgspec.structs.replace(spec, shared_words=0)
        super().__init__(self.spec)
        self._scale = sizes.scale

    def tokens(self, count: float) -> str:
        return super().tokens(count * self._scale)

    def ask(self, text: str, part: str, **changes: Any) -> Task:
        """Return a request. ``changes`` replace fields of the spec."""
        spec = msgspec.structs.replace(self.spec, **changes)
        return make_task(spec, [{"role": "user", "content": text}], spec.max_tokens, part)

    def chats(self, part: str, length: float = 50, **changes: Any) -> Iterator[Task]:
        """Yield unrelated requests without end."""
        while True:
            yield self.ask(self.tokens(length), part, **changes)


def agents(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return conversations of agents with the same system prompt, which is long, as with tools."""
    writer = Writer(spec, sizes)
    system = [{"role": "system", "content": writer.tokens(2000)}]
    tasks = conversations(spec, sizes.requests, AGENT_TURNS, system, lambda: writer.tokens(60))
    return [[Group(tasks=tasks, clients=sizes.clients)]]


def documents(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return requests with the same instructions, one of the documents, and different questions."""
    writer = Writer(spec, sizes)
    system = {"role": "system", "content": writer.tokens(500)}
    texts = [writer.tokens(1500) for _ in range(DOCUMENTS)]
    chosen = [texts[i % DOCUMENTS] for i in range(sizes.requests)]
    writer.random.shuffle(chosen)
    questions = [{"role": "user", "content": f"{text}\n\n{writer.tokens(20)}"} for text in chosen]
    tasks = [make_task(spec, [system, question], spec.max_tokens) for question in questions]
    return [[Group(tasks=tasks, clients=sizes.clients)]]


def edits(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return requests to repeat a story with another name. The answers are checked."""
    make_body, options = DIALECTS[spec.api].body, {"max_tokens": 320, "temperature": 0}
    rng, bodies = random.Random(spec.seed), dict[bytes, str]()
    while len(bodies) < sizes.requests:
        story = stories(rng)
        question = story.messages[0]["content"]
        named = re.search(r" named (\w+) in ", question)
        assert named is not None
        name = rng.choice([name for name in NAMES if name != named[1]])
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": story.answer},
            {"role": "user", "content": replace_name(question, named[1], name)},
        ]
        bodies[make_body(spec.model, messages, options)] = replace_name(
            story.answer, named[1], name
        )
    tasks = [Task(body, answer=answer) for body, answer in bodies.items()]
    return [[Group(tasks=tasks, clients=sizes.clients)]]


def replace_name(text: str, name: str, other: str) -> str:
    return re.sub(rf"\b{name}\b", other, text)


def long_beside_short(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return a long prompt alone, then another one that is sent while streams decode."""
    writer = Writer(spec, sizes)
    lone, other = (writer.ask(writer.tokens(sizes.long_tokens), part) for part in (ALONE, LONG))
    streams = writer.chats(STREAMS, max_tokens=STREAM_TOKENS)
    return [
        [Group(tasks=[lone], clients=1)],
        [
            Group(tasks=streams, clients=sizes.clients, background=True),
            Group(tasks=[other], clients=1, start_after=LEAD * sizes.clients),
        ],
    ]


def batch_beside_chat(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return chats of a few clients, while batch work with low priority fills the server."""
    writer = Writer(spec, sizes)
    low, high = (spec.options | {"priority": name} for name in ("batch", "interactive"))
    work = [*islice(writer.chats(BATCHES, 200, options=low), BATCH)]
    chats = [*islice(writer.chats(CHATS, options=high), sizes.requests)]
    return [
        [
            Group(tasks=work, clients=BATCH),
            Group(tasks=chats, clients=sizes.clients, start_after=LEAD),
        ]
    ]


def phases(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return a load that changes without notice."""
    writer, clients = Writer(spec, sizes), sizes.clients

    def short(part: str) -> Group:
        return Group(tasks=[*islice(writer.chats(part), WAVES * clients)], clients=clients)

    first, second, third, fourth = PHASES
    long = writer.ask(writer.tokens(sizes.long_tokens), second)
    shared = writer.tokens(2000)
    sharing = [writer.ask(f"{shared} {writer.tokens(20)}", third) for _ in range(3 * SHARERS)]
    mixed = [writer.ask(writer.tokens(length), fourth) for length in mixed_lengths(sizes.requests)]
    writer.random.shuffle(mixed)
    return [
        [short(first)],
        [short(second), Group(tasks=[long], clients=1, start_after=LEAD)],
        [Group(tasks=sharing, clients=SHARERS)],
        [Group(tasks=mixed, clients=clients)],
    ]


def mixed_lengths(count: int) -> list[float]:
    """Return the quantiles of a power law from FEWEST_TOKENS to MOST_TOKENS."""
    low, high = FEWEST_TOKENS ** (1 - ZIPF), MOST_TOKENS ** (1 - ZIPF)
    shares = [i / max(1, count - 1) for i in range(count)]
    return [(low + share * (high - low)) ** (1 / (1 - ZIPF)) for share in shares]


def long_context(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return a very long prompt, with chats before, during and after it."""
    writer, clients = Writer(spec, sizes), sizes.clients
    wave = clients * spec.max_tokens
    long = writer.ask(writer.tokens(sizes.long_tokens), LONG)
    return [
        [
            Group(tasks=writer.chats(CHATS), clients=clients, background=True, tail=WAVES * wave),
            Group(tasks=[long], clients=1, start_after=(WAVES + 1) * wave, watched=True),
        ]
    ]


class Scenario(NamedTuple):
    """A workload of users, with the sizes that it has by default."""

    make: Callable[[RequestSpec, Sizes], list[Stage]]
    text: str
    sizes: Sizes
    max_tokens: int = 32


SCENARIOS = {
    "agents": Scenario(
        agents,
        f"agents that share a system prompt of 2,000 tokens, {AGENT_TURNS} turns each",
        Sizes(requests=48, clients=8),
    ),
    "rag": Scenario(
        documents,
        f"instructions of 500 tokens, one of {DOCUMENTS} documents of 1,500 tokens, a question",
        Sizes(requests=48, clients=8),
    ),
    "edit": Scenario(
        edits,
        "the built-in model repeats a text with a change; each answer must be correct",
        Sizes(requests=96, clients=1),
    ),
    "long-beside-short": Scenario(
        long_beside_short,
        "a prompt of --long-tokens tokens, alone and then beside streams",
        Sizes(requests=2, clients=7, long_tokens=3000),
    ),
    "batch-beside-chat": Scenario(
        batch_beside_chat,
        f"chats beside {BATCH} requests with the priority batch",
        Sizes(requests=16, clients=4),
        max_tokens=64,
    ),
    "phases": Scenario(
        phases,
        "short prompts; the same and one of --long-tokens tokens; prompts that share 2,000 tokens; "
        f"prompts of {FEWEST_TOKENS} to {MOST_TOKENS:,} tokens",
        Sizes(requests=64, clients=32, long_tokens=3000),
    ),
    "long-context": Scenario(
        long_context,
        "a prompt of --long-tokens tokens beside chats",
        Sizes(requests=1, clients=31, long_tokens=30_000),
    ),
}
