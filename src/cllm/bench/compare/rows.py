"""The rows of ``cllm bench compare``: what is sent, how often it is measured, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from cllm.bench.compare.rounds import (
    BOUND,
    BUILD,
    CLLM,
    DEFAULT_BUILD,
    DEFAULT_SERVER,
    ENGINE,
    EXAMPLE,
    FIXED,
    LLAMA_SERVER,
    OLLAMA,
)
from cllm.bench.load.scenario_figures import BESIDE
from cllm.bench.load.scenarios import BATCH, PHASES, SCENARIOS
from cllm.bench.load.workload import (
    FIRST_TURNS,
    LATER_TURNS,
    Group,
    Stage,
    Words,
    chat_tasks,
    word_tasks,
)

HEADLINE, FEW, ONCE = 9, 3, 1  # rounds
OUTPUT, PER_CPU, TTFT = "output tokens/s", "output tokens/CPU s", "TTFT mean ms"
DECODE, PREFILL = "decoding tokens/s", "prefill tokens/s"
START, MEMORY, API_CPU = "start s", "memory MB", "CPU of the API process µs/token"
OUTSIDE = "CPU outside llama_decode, share"
SUCCEEDED = "requests that succeed, share"
SPREAD = 0.25  # sigma of the lengths of unrelated requests
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
HOST_SEQS = (1, 8, 32)


class Target(NamedTuple):
    """A figure of a row and its limit: a value of ``of`` divided by the same value of ``against``,
    minus it if there is a ``unit``, or the value itself if ``against`` is empty.

    default_limit: for llama.cpp's default build. part: the part of the workload, whose failures
    exclude a setting of ``against``; "" for all requests.
    """

    name: str
    value: str
    limit: float | None = None
    at_least: bool = True
    against: str = LLAMA_SERVER
    default_limit: float | None = None
    of: str = CLLM
    unit: str = ""
    part: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured in one way on several systems.

    primary: the value that says which setting of a peer is the best one, and whether more is
    better; without a name, the value of each target. slots: requests at a time, if they are more
    than ``clients``. builtin: use the built-in model instead of the given one.
    """

    name: str
    text: str
    clients: int = 1
    slots: int = 0
    rounds: int = FEW
    kind: Literal["load", "engine", "context", "host", "llama-bench"] = "load"
    make: Callable[[Words, float], list[Stage]] | None = None
    systems: tuple[str, ...] = (CLLM, LLAMA_SERVER, DEFAULT_SERVER)
    targets: list[Target] = []
    primary: tuple[str, bool] = (OUTPUT, True)
    max_tokens: int = 32
    keep_alive: bool = False
    builtin: bool = False


# --- what is sent -------------------------------------------------------------------------------


def unrelated(clients: int, words: Words, scale: float) -> list[Stage]:
    words = with_prompt(words, 50 * scale)
    return [[Group(tasks=chat_tasks(max(8, 2 * clients), words), clients=clients)]]


def shared_prefix(words: Words, scale: float) -> list[Stage]:
    shared = round(1000 * scale)
    words = msgspec.structs.replace(words, prompt_words=shared + 20, shared_words=shared)
    return [[Group(tasks=word_tasks(24, words), clients=8)]]


def kept_alive(words: Words, scale: float) -> list[Stage]:
    return [[Group(tasks=word_tasks(64, with_prompt(words, 50 * scale)), clients=8)]]


def scenario(name: str, words: Words, scale: float) -> list[Stage]:
    sizes = msgspec.structs.replace(SCENARIOS[name].sizes, scale=scale)
    return SCENARIOS[name].make(words, sizes)


def with_prompt(words: Words, tokens: float) -> Words:
    return msgspec.structs.replace(
        words, prompt_words=max(1, round(tokens / words.tokens_per_word)), spread=SPREAD
    )


# --- the rows -----------------------------------------------------------------------------------


def unrelated_row(clients: int) -> Row:
    speed = {1: 1.00, 8: 1.05, 32: 1.05, 64: 1.05}.get(clients)
    ttft = {1: 1.0, 8: 0.8, 32: 0.6, 64: 0.6}.get(clients)
    memory = 100.0 if clients in (1, 8, 32) else None
    host = 0.03 if clients == 32 else None
    return Row(
        name=f"unrelated-{clients}",
        text=f"unrelated requests of about 50 tokens and answers of about 50, {clients} at a time",
        clients=clients,
        rounds=FEW if speed is None else HEADLINE,
        make=partial(unrelated, clients),
        systems=(CLLM, LLAMA_SERVER, DEFAULT_SERVER, OLLAMA, EXAMPLE),
        targets=[
            Target("output tokens/s", OUTPUT, speed),
            Target("mean TTFT", TTFT, ttft, at_least=False),
            Target("output tokens for a second of the CPU", PER_CPU),
            Target("memory", MEMORY, memory, at_least=False, unit=" MB"),
            Target("CPU outside llama_decode", OUTSIDE, host, at_least=False, against=""),
            Target("CPU of the API process for a token, µs", API_CPU, at_least=False, against=""),
        ],
        max_tokens=50,
    )


def scenario_row(name: str, targets: Iterable[Target], rounds: int = HEADLINE) -> Row:
    chosen = SCENARIOS[name]
    return Row(
        name=name,
        text=chosen.text.replace("--long-tokens", f"{chosen.sizes.long_tokens:,} tokens"),
        clients=chosen.sizes.clients,
        rounds=rounds,
        make=partial(scenario, name),
        targets=[*targets, Target("output tokens for a second of the CPU", PER_CPU)],
        max_tokens=chosen.max_tokens,
    )


def engine_row(num_seqs: int) -> Row:
    return Row(
        name=f"engine-{num_seqs}",
        text=f"the engine without a server, {num_seqs} at a time",
        clients=num_seqs,
        rounds=HEADLINE,
        kind="engine",
        systems=(BOUND, ENGINE, CLLM),
        primary=("", True),
        targets=[
            Target("decoding tokens/s", DECODE, 0.99, against=BOUND, of=ENGINE),
            Target("output tokens/s, over HTTP", OUTPUT, against=ENGINE),
            Target(
                "start until ready - loading of the model",
                START,
                1.0,
                at_least=False,
                against=ENGINE,
                unit=" s",
            ),
        ],
        max_tokens=64,
    )


def part_targets(part: str, **options: float) -> list[Target]:
    """Return the target of the mean TTFT of a part of a workload."""
    value = f"{part}: {TTFT}"
    return [Target(f"mean TTFT, {part}", value, options["ttft"], at_least=False, part=part)]


P99, P90 = (f"ITL p{share} {BESIDE} ms" for share in (99, 90))
AGENTS = [
    Target("output tokens/s", OUTPUT, 2.0),
    Target("mean TTFT", TTFT, 1 / 4, at_least=False),
    *part_targets(FIRST_TURNS, ttft=1 / 6),
    *part_targets(LATER_TURNS, ttft=0.6),
]
BESIDE_STREAMS = [
    Target(f"p99 between tokens, {BESIDE}", P99, 0.1, at_least=False),
    Target(f"p90 between tokens, {BESIDE}", P90, 0.1, at_least=False),
    Target(
        f"median between tokens, {BESIDE} / before",
        f"ITL p50, {BESIDE} / before",
        3.0,
        at_least=False,
        against="",
    ),
    Target(
        "TTFT of the long prompt / alone",
        "TTFT of the long prompt / alone",
        1.5,
        at_least=False,
        against="",
    ),
]
BESIDE_CHATS = [
    Target(SUCCEEDED, SUCCEEDED, 1.0, against=""),
    *(
        Target(
            f"rate of the chats, {name} / before",
            f"chunks/s of the chats, {name} / before",
            limit,
            against="",
        )
        for name, limit in (("after", 0.95), ("during", 0.5))
    ),
    Target(
        "longest pause of the long request, s",
        "longest pause of the long request s",
        10.0,
        at_least=False,
        against="",
    ),
]
CHANGING = [
    Target(f"output tokens/s, {part}", f"{part}: {OUTPUT}", 0.95, against=FIXED, part=part)
    for part in PHASES
]

ROWS = {
    row.name: row
    for row in (
        *map(unrelated_row, CLIENTS),
        Row(
            name="shared",
            text="24 requests that share 1,000 words, 8 at a time",
            clients=8,
            rounds=HEADLINE,
            make=shared_prefix,
            targets=[
                Target("output tokens/s", OUTPUT, 3.3),
                Target("mean TTFT", TTFT, 1 / 4, at_least=False, default_limit=1 / 5),
                Target("output tokens for a second of the CPU", PER_CPU),
            ],
            max_tokens=30,
        ),
        scenario_row("agents", AGENTS),
        scenario_row("rag", [Target("output tokens/s", OUTPUT, 2.0)], FEW),
        msgspec.structs.replace(
            scenario_row("edit", [Target("output tokens/s", OUTPUT, 1.4)]), builtin=True
        ),
        msgspec.structs.replace(
            scenario_row("long-beside-short", BESIDE_STREAMS), slots=8, primary=(P99, False)
        ),
        msgspec.structs.replace(
            scenario_row("batch-beside-chat", [Target("output tokens/s", OUTPUT)], FEW),
            slots=BATCH + SCENARIOS["batch-beside-chat"].sizes.clients,
        ),
        msgspec.structs.replace(
            scenario_row("phases", CHANGING, FEW), systems=(CLLM, FIXED), primary=("", True)
        ),
        msgspec.structs.replace(scenario_row("long-context", BESIDE_CHATS, ONCE), systems=(CLLM,)),
        *map(engine_row, (1, 8, 32)),
        Row(
            name="kept-alive",
            text="short answers, 8 clients, each with one connection for all its requests",
            clients=8,
            make=kept_alive,
            targets=[Target(SUCCEEDED, SUCCEEDED, 1.0, against="")],
            max_tokens=4,
            keep_alive=True,
        ),
        Row(
            name="llama-bench",
            text="the benchmark of llama.cpp itself, with both builds",
            kind="llama-bench",
            systems=(BUILD, DEFAULT_BUILD),
            primary=("", True),
            targets=[
                Target(f"{test} tokens/s", test, against=DEFAULT_BUILD, of=BUILD)
                for test in ("pp512", "tg64")
            ],
        ),
        Row(
            name="context",
            text="speed over the length of the context",
            clients=8,
            rounds=ONCE,
            kind="context",
            systems=(ENGINE, BOUND),
        ),
        Row(
            name="host",
            text="microseconds of a decoding step, by part",
            rounds=ONCE,
            kind="host",
            systems=(ENGINE,),
        ),
    )
}
UNUSUAL = ("unrelated-2", "unrelated-4", "unrelated-16", "context", "host")
"""The rows that are measured only if they are named."""
