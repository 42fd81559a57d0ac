"""The rows of ``cllm bench compare``: what is sent, how often it is measured, and the targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from cllm.bench.compare.rounds import (
    BACKEND,
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
    PLAIN,
    RESTARTED,
)
from cllm.bench.compare.workloads import (
    ACCOUNT_SEQS,
    EDITORS,
    FAIRNESS,
    LONG_ANSWERS,
    SHARERS,
    SLOWDOWN,
    account_figures,
    accounts,
    edits_by_clients,
    kept_alive,
    long_answers,
    one_prompt,
    scenario,
    shared_prefix,
    unrelated,
)
from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.scenario_figures import BESIDE
from cllm.bench.load.scenarios import BATCH, PHASES, SCENARIOS
from cllm.bench.load.workload import FIRST_TURNS, LATER_TURNS, RequestSpec, Stage

HEADLINE, FEW, ONCE = 9, 3, 1  # rounds
OUTPUT, PER_CPU, TTFT = "output tokens/s", "output tokens/CPU s", "TTFT mean ms"
DECODE, PREFILL = "decoding tokens/s", "prefill tokens/s"
START, MEMORY, API_CPU = "start s", "memory MB", "CPU of the API process µs/token"
OUTSIDE = "CPU outside llama_decode, share"
SUCCEEDED = "requests that succeed, share"
COMPUTED, PARKED = "prompt tokens computed", "sequences parked"
RESTORED = "1,000 tokens loaded from RAM / computed"
QUEUED = "time to schedule a step, 10,000 waiting / 10 waiting"
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
HOST_SEQS = (1, 8, 32)

Kind = Literal["load", "engine", "context", "host", "llama-bench", "bound", "queue", "restart"]
"""How a row is measured: "load" sends requests to servers."""


class Target(NamedTuple):
    """A figure of a row and its limit: a value of ``of`` divided by the same value of ``against``,
    minus it if there is a ``unit``, or the value itself if ``against`` is empty.

    ``default_limit`` is the limit for llama.cpp's default build. ``part`` is the part of the
    workload, "" for all requests; failures in it exclude a setting of ``against``.
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


class ComparisonRow(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement that is made in the same way on several systems.

    ``primary`` is the value that decides which setting of a peer is the best one, and whether more
    is better; without a name, it is the value of each target. ``slots`` is the number of requests
    at a time, if they are more than ``clients``. ``builtin`` uses the built-in model instead of the
    given one. ``settings`` has flags for each setting of a system, instead of those that systems.py
    tries; "FOLDER" is a folder of the run. ``figures`` returns the values that only this row has.
    """

    name: str
    text: str
    clients: int = 1
    slots: int = 0
    rounds: int = FEW
    kind: Kind = "load"
    make: Callable[[RequestSpec, float], list[Stage]] | None = None
    systems: tuple[str, ...] = (CLLM, LLAMA_SERVER, DEFAULT_SERVER)
    targets: list[Target] = []
    primary: tuple[str, bool] = (OUTPUT, True)
    max_tokens: int = 32
    keep_alive: bool = False
    builtin: bool = False
    settings: Mapping[str, Sequence[str]] = {}
    figures: Callable[[list[TimedAnswer]], dict[str, float]] | None = None


# --- the rows -----------------------------------------------------------------------------------


def unrelated_row(clients: int) -> ComparisonRow:
    speed = {1: 1.05, 8: 1.2, 32: 1.15, 64: 1.2}.get(clients)
    ttft = {1: 0.9, 8: 0.7, 32: 0.6, 64: 0.6}.get(clients)
    memory = 100.0 if clients in (1, 8, 32) else None
    host = 0.03 if clients == 32 else None
    return ComparisonRow(
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


def scenario_row(name: str, targets: Iterable[Target], rounds: int = HEADLINE) -> ComparisonRow:
    chosen = SCENARIOS[name]
    return ComparisonRow(
        name=name,
        text=chosen.text.replace("--long-tokens", f"{chosen.sizes.long_tokens:,} tokens"),
        clients=chosen.sizes.clients,
        rounds=rounds,
        make=partial(scenario, name),
        targets=[*targets, Target("output tokens for a second of the CPU", PER_CPU)],
        max_tokens=chosen.max_tokens,
    )


def engine_row(num_seqs: int) -> ComparisonRow:
    return ComparisonRow(
        name=f"engine-{num_seqs}",
        text=f"the engine without a server, {num_seqs} at a time",
        clients=num_seqs,
        rounds=HEADLINE,
        kind="engine",
        systems=(BOUND, ENGINE, CLLM),
        primary=("", True),
        targets=[
            Target("decoding tokens/s", DECODE, 1.05, against=BOUND, of=ENGINE),
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
    Target("output tokens/s", OUTPUT, 2.5),
    Target("mean TTFT", TTFT, 1 / 4, at_least=False),
    *part_targets(FIRST_TURNS, ttft=1 / 6),
    *part_targets(LATER_TURNS, ttft=0.5),
]
BESIDE_STREAMS = [
    Target(f"p99 between tokens, {BESIDE}", P99, 0.08, at_least=False),
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
        1.25,
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

WITHOUT_SPECULATION = "--scheduler.speculation off"
"""Models with random weights repeat themselves, so speculation would gain too much."""
DISK_CACHE = "--kv.disk-cache FOLDER"
SMALL_POOL = "--kv.layout unified --kv.max-memory-mb 1 --context 256"
SLOTS = f"-np {LONG_ANSWERS} -kvu -t {os.cpu_count() or 1} --jinja"

SCHEDULING = [
    ComparisonRow(
        name="shared-bound",
        text="the requests of shared, compared with the least work that they need",
        clients=SHARERS,
        make=shared_prefix,
        kind="bound",
        systems=(CLLM, BACKEND),
        settings={CLLM: [WITHOUT_SPECULATION]},
        targets=[
            Target("output tokens/s", OUTPUT, 0.9, against=BACKEND),
            Target("mean TTFT", TTFT, at_least=False, against=BACKEND),
            Target("prompt tokens computed", COMPUTED, 1.05, at_least=False, against=BACKEND),
        ],
        max_tokens=30,
    ),
    ComparisonRow(
        name="small-pool",
        text=f"{LONG_ANSWERS} requests at once, with cells for about four of them",
        clients=LONG_ANSWERS,
        make=long_answers,
        systems=(CLLM, LLAMA_SERVER),
        settings={
            CLLM: [f"--max-num-seqs {LONG_ANSWERS} {SMALL_POOL}"],
            LLAMA_SERVER: [f"{SLOTS} -c {cells}" for cells in (512, 512 * LONG_ANSWERS)],
        },
        targets=[Target("right answers", SUCCEEDED, 1.0, against="")],
        builtin=True,
    ),
    ComparisonRow(
        name="accounts",
        text="an account with 200 requests beside one with 10, then two with 60 each",
        clients=ACCOUNT_SEQS,
        make=accounts,
        systems=(CLLM,),
        settings={CLLM: [f"--max-num-seqs {ACCOUNT_SEQS} {WITHOUT_SPECULATION}"]},
        targets=[
            Target(SLOWDOWN, SLOWDOWN, 2.5, at_least=False, against=""),
            Target(FAIRNESS, FAIRNESS, 0.95, against=""),
        ],
        max_tokens=16,
        figures=account_figures,
    ),
    ComparisonRow(
        name="queue",
        text="the scheduler alone, with few and with many waiting requests",
        kind="queue",
        systems=(ENGINE,),
        targets=[Target(QUEUED, QUEUED, 1.1, at_least=False, against="", of=ENGINE)],
    ),
    ComparisonRow(
        name="speculation",
        text="the built-in model repeats texts with a change, with and without speculation",
        clients=max(EDITORS.values()),
        make=edits_by_clients,
        systems=(CLLM, PLAIN),
        settings={PLAIN: [WITHOUT_SPECULATION]},
        targets=[
            Target(f"output tokens/s, {part}", f"{part}: {OUTPUT}", limit, against=PLAIN, part=part)
            for part, limit in zip(EDITORS, (1.5, 0.98), strict=True)
        ],
        builtin=True,
    ),
    ComparisonRow(
        name="restart",
        text="a prompt of 2,000 tokens, new and after a restart of the server",
        make=partial(one_prompt, 2000),
        kind="restart",
        systems=(CLLM, RESTARTED, ENGINE),
        settings={CLLM: [DISK_CACHE], RESTARTED: [DISK_CACHE]},
        targets=[
            Target("TTFT", TTFT, 0.1, at_least=False, of=RESTARTED, against=CLLM),
            Target(RESTORED, RESTORED, 0.05, at_least=False, of=ENGINE, against=""),
        ],
        max_tokens=2,
    ),
]

ROWS = {
    row.name: row
    for row in (
        *map(unrelated_row, CLIENTS),
        ComparisonRow(
            name="shared",
            text="24 requests that share 1,000 words, 8 at a time",
            clients=8,
            rounds=HEADLINE,
            make=shared_prefix,
            targets=[
                Target("output tokens/s", OUTPUT, 4.0),
                Target("mean TTFT", TTFT, 1 / 5, at_least=False, default_limit=1 / 5),
                Target("output tokens for a second of the CPU", PER_CPU),
            ],
            max_tokens=30,
        ),
        scenario_row("agents", AGENTS),
        scenario_row("rag", [Target("output tokens/s", OUTPUT, 2.2)], FEW),
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
        ComparisonRow(
            name="kept-alive",
            text="short answers, 8 clients, each with one connection for all its requests",
            clients=8,
            make=kept_alive,
            targets=[Target(SUCCEEDED, SUCCEEDED, 1.0, against="")],
            max_tokens=4,
            keep_alive=True,
        ),
        ComparisonRow(
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
        ComparisonRow(
            name="context",
            text="speed over the length of the context",
            clients=8,
            rounds=ONCE,
            kind="context",
            systems=(ENGINE, BOUND),
        ),
        ComparisonRow(
            name="host",
            text="microseconds of a decoding step, by part",
            rounds=ONCE,
            kind="host",
            systems=(ENGINE,),
        ),
        *SCHEDULING,
    )
}
UNUSUAL = (
    *("unrelated-2", "unrelated-4", "unrelated-16", "context", "host"),
    *(row.name for row in SCHEDULING),
)
"""The rows that are measured only if they are named."""
