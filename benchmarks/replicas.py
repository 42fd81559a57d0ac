"""Measure two replicas behind cLLM's front and behind other routers, and compare them with a single
replica.

    uv run python benchmarks/replicas.py MODEL results.jsonl [--shapes prefixes,agents]
        [--loads closed,open] [--routers one,cllm,nginx,litellm,smg] [--rounds 3] [--seconds 240]

Each replica computes with one thread. A case is a workload ("shape") with a router at a load; its
result is a line in the file. Cases in the file are not measured again, and no case begins after
``--seconds``: run the command until it prints its tables. Routers take turns, and no two cases have
a prompt in common, so none of them finds what another one has left in the caches.

The loads: "closed" are 16 clients, each of which sends its next request when it has its answer.
"open" are arrivals at 70 % of the requests per second that cLLM's front had in "closed".

The routers: ``one`` is a single replica without any router, ``cllm`` is ``cllm cluster front``.
``nginx`` must be on PATH (Debian: nginx-light); ``litellm`` and ``smg`` (SGLang's gateway) are
sought on PATH and in environments of their own:

    uv venv .tools/routers/litellm; uv pip install -p .tools/routers/litellm "litellm[proxy]"
    uv venv .tools/routers/smg; uv pip install -p .tools/routers/smg smg

Exit code 1 if a target is missed, 2 if cases are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cllm.bench.distribution import jain_index
from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import run_stages
from cllm.bench.load.dialects import Messages
from cllm.bench.load.scenarios import Sizes, Writer
from cllm.bench.load.workload import (
    Group,
    RequestSpec,
    Task,
    arrival_times,
    conversations,
    make_task,
    num_requests,
)
from cllm.bench.peers import find_required
from cllm.bench.servers import MODEL, RunningServer, cllm, failures, free_port, load, running
from cllm.cli.main import install_signal_handlers
from cllm.errors import StartupError
from cllm.scheduler.policy import OUTPUT_WEIGHT

KEY = {"CLLM_CLUSTER_KEY": "the-key-of-a-benchmark"}
ROUTERS = ("one", "cllm", "nginx", "litellm", "smg")
FOLDER = Path(".tools/routers")
CLIENTS, OPEN_LOAD = 16, 0.7
# targets: cached tokens of two replicas to those of one, Jain's index, and TTFT to that of a peer
HITS, JAIN, SHARED_TTFT, UNRELATED_TTFT = 0.9, 0.95, 1 / 3, 1.05
PREFIXES, SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, TURNS = 8, 800, 20, 16, 4


class Case(msgspec.Struct, frozen=True):
    shape: str
    load: str
    router: str
    round: int


class Result(msgspec.Struct):
    """``ttft`` has the seconds of each answer that did not fail. ``jain`` is that of two accounts
    while requests of both waited.
    """

    case: Case
    ttft: list[float]
    failed: int
    prompt_tokens: int
    cached_tokens: int
    wall: float
    jain: float | None = None

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.ttft) / self.wall


class Author:
    """Writes the prompts of a case: those of a round differ only in their first word, ``salt``."""

    def __init__(self, salt: str, number: int) -> None:
        spec = RequestSpec(
            model=MODEL, prompt_words=1, max_tokens=ANSWER_TOKENS, seed=number, tokens_per_word=2.4
        )
        self._writer = Writer(spec, Sizes(requests=0, clients=0))
        self._salt = salt
        self.spec = spec
        self.random = self._writer.random

    def write(self, num_tokens: float) -> str:
        return f"{self._salt} {self._writer.tokens(num_tokens)}"

    def system(self, num_tokens: float = SYSTEM_TOKENS) -> Messages:
        return [{"role": "system", "content": self.write(num_tokens)}]

    def ask(self, before: Messages, num_tokens: float, **options: str) -> Task:
        spec = msgspec.structs.replace(self.spec, options=options)
        question = {"role": "user", "content": self.write(num_tokens)}
        return make_task(spec, [*before, question], ANSWER_TOKENS)

    def lengths(self, count: int, median: int) -> list[int]:
        return self._writer.lengths(count, median)


def prefixes(author: Author, count: int) -> list[Task]:
    """Return questions that follow one of a few system prompts."""
    systems = [author.system() for _ in range(PREFIXES)]
    return [author.ask(author.random.choice(systems), QUESTION_TOKENS) for _ in range(count)]


def agents(author: Author, count: int) -> list[Task]:
    """Return conversations of agents that have a system prompt in common."""
    return conversations(author.spec, count, TURNS, author.system(), lambda: author.write(60))


def long_talks(author: Author, count: int) -> list[Task]:
    """Return conversations, each of which begins with a long text of its own."""
    lengths = cycle([SYSTEM_TOKENS] + [60] * (TURNS - 1))
    return conversations(author.spec, count, TURNS, [], lambda: author.write(next(lengths)))


def unrelated(author: Author, count: int) -> list[Task]:
    """Return chats that have nothing in common."""
    return [author.ask([], length) for length in author.lengths(count, 60)]


def two_accounts(author: Author, count: int) -> list[Task]:
    """Return chats of the same size, nine tenths of them from one of two accounts."""
    names = ["light" if number % 10 == 0 else "heavy" for number in range(count)]
    return [author.ask([], QUESTION_TOKENS, user=name) for name in names]


class Shape(NamedTuple):
    """A workload of ``size`` requests. ``flags`` are those of the replicas."""

    make: Callable[[Author, int], list[Task]]
    size: int
    flags: tuple[object, ...] = ()
    target: float = SHARED_TTFT
    loads: tuple[str, ...] = ("closed", "open")
    routers: tuple[str, ...] = ROUTERS


# room for about 6 of the 8 prefixes on each replica
SMALL_CACHE = ("--kv.max-memory-mb", 120, "--kv.ram-cache-mb", 0)
# few places, so that requests of both accounts wait for long
SHARES = ("--max-num-seqs", 8, "--scheduler.max-queue-seconds", 3600)
SHAPES = {
    "prefixes": Shape(prefixes, 64),
    "long-talks": Shape(long_talks, 32),
    "agents": Shape(agents, 36),
    "unrelated": Shape(unrelated, 48, target=UNRELATED_TTFT, routers=ROUTERS[1:]),
    "small-caches": Shape(prefixes, 48, SMALL_CACHE, routers=ROUTERS[1:]),
    "two-accounts": Shape(two_accounts, 300, SHARES, loads=("burst",), routers=ROUTERS[:2]),
}


# --- routers --------------------------------------------------------------------------------------


def start_router(
    name: str, urls: Sequence[str], folder: Path
) -> AbstractContextManager[RunningServer]:
    """Start a router in front of ``urls``. Raises StartupError."""
    if name == "cllm":
        front = [sys.executable, "-m", "cllm", "cluster", "front", "--port", "PORT"]
        return running([*front, "--urls", ",".join(urls)], "/ready", environment=KEY)
    if name == "nginx":
        config = folder / "nginx.conf"
        port = free_port()
        config.write_text(make_nginx_config(urls, port, folder))
        program = find_required("nginx")
        return running([program, "-p", folder, "-c", config], "/ready", port=port)
    if name == "litellm":
        return start_litellm(urls, folder)
    port, ports = free_port(), ["--prometheus-host", "127.0.0.1", "--prometheus-port", free_port()]
    options = ["--policy", "cache_aware", "--log-level", "warn", "--shutdown-grace-period-secs", 1]
    program = find_required("smg", FOLDER / "smg/bin")
    where = ["--host", "127.0.0.1", "--port", "PORT", *ports, "--worker-urls", *urls]
    return running([program, "launch", *options, *where], "/readiness", port=port)


def make_nginx_config(urls: Sequence[str], port: int, folder: Path) -> str:
    """Return a configuration that sends requests to ``urls`` in turn, without buffering answers."""
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    return f"""
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; {temporary}
  upstream replicas {{ {servers} keepalive 64; }}
  server {{
    listen 127.0.0.1:{port}; client_max_body_size 64m;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Host localhost; proxy_set_header Connection ""; proxy_read_timeout 3600s;
    }}
  }}
}}
"""


@contextlib.contextmanager
def start_litellm(urls: Sequence[str], folder: Path) -> Iterator[RunningServer]:
    config, key = folder / "litellm.yaml", f"sk-{secrets.token_hex(16)}"
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "-"},
        }
        for url in urls
    ]
    settings = {"routing_strategy": "simple-shuffle"}
    config.write_bytes(msgspec.json.encode({"model_list": models, "router_settings": settings}))
    program = find_required("litellm", FOLDER / "litellm/bin")
    command = [program, "--host", "127.0.0.1", "--port", "PORT", "--config", config]
    environment = {"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with running(command, "/health/readiness", environment=environment) as server:
        yield msgspec.structs.replace(server, api_key=key)


@contextlib.contextmanager
def start_all(
    model: Path | None, flags: Sequence[object], routers: Iterable[str]
) -> Iterator[dict[str, RunningServer]]:
    """Start the replicas and the routers, and send each of these a few requests."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = ("--threads", 1) if model else ("--backend.name", "fake", "--context", 8192)
        replicas = [
            stack.enter_context(
                cllm(model, *backend, "--storage.folder", folder / name, *flags, environment=KEY)
            )
            for name in ("a", "b")
        ]
        urls = [replica.url for replica in replicas]
        targets = {
            name: replicas[0]
            if name == "one"
            else stack.enter_context(start_router(name, urls, folder))
            for name in routers
        }
        for name, target in targets.items():
            load(target, unrelated(Author(f"warm {name}", 0), 8), 2)
        yield targets


# --- measurements ---------------------------------------------------------------------------------


def make_salt(case: Case) -> str:
    """Return a word that only the prompts of this case begin with."""
    return f"{zlib.crc32(msgspec.json.encode(case)):08x}"


def measure(target: RunningServer, case: Case, count: int, rate: float) -> Result:
    """Measure a case of ``count`` requests. ``rate`` is that of ``find_rate``."""
    author = Author(make_salt(case), case.round)
    tasks = SHAPES[case.shape].make(author, count)
    arrivals = None
    if case.load == "open":
        rate *= OPEN_LOAD * len(tasks) / num_requests(tasks)
        arrivals = arrival_times(len(tasks), rate, "poisson", case.round)
    clients = len(tasks) if case.load == "burst" else CLIENTS
    outcome = run_stages(target, [[Group(tasks=tasks, clients=clients, arrivals=arrivals)]])
    good = [answer for answer in outcome.answers if answer.succeeded]
    if failed := failures(outcome):
        print(f"{case}: {len(failed)} failed: {failed[0]}", file=sys.stderr)
    if not good:
        raise StartupError(f"no request of {case} succeeded")
    jain = measure_fairness(good) if case.load == "burst" else None
    return Result(
        case,
        [round(answer.first - answer.sent, 5) for answer in good],
        len(failed),
        sum(answer.prompt_tokens for answer in good),
        sum(answer.cached_tokens for answer in good),
        outcome.wall,
        jain,
    )


def measure_fairness(answers: Sequence[TimedAnswer]) -> float | None:
    """Return Jain's index of the service of two accounts, as the policy fair counts it, while both
    have requests without a first token. They sent all requests at the same time.
    """
    accounts: list[list[TimedAnswer]] = [[], []]
    for answer in answers:
        accounts[b'"user":"light"' in answer.task.body].append(answer)
    end = min(max(answer.first for answer in own) for own in accounts)
    return jain_index([float(measure_service(own, end)) for own in accounts])


def measure_service(answers: Sequence[TimedAnswer], end: float) -> int:
    """Return the computed prompt tokens and the weighted output tokens until ``end``."""
    prompts = [one.prompt_tokens - one.cached_tokens for one in answers if one.first <= end]
    num_output = sum(at <= end for answer in answers for at in answer.content_times)
    return sum(prompts) + OUTPUT_WEIGHT * num_output


def find_rate(results: Sequence[Result], shape: str) -> float:
    """Return the requests per second of cLLM's front under a closed load; 0 if unknown."""
    wanted = (shape, "closed", "cllm")
    found = (one for one in results if (one.case.shape, one.case.load, one.case.router) == wanted)
    return next((one.rate for one in found), 0.0)


# --- tables ---------------------------------------------------------------------------------------


def print_tables(results: Sequence[Result]) -> bool:
    """Print the figures. Return whether all targets are reached."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        case = result.case
        groups.setdefault((case.shape, case.load, case.router), []).append(result)
    missed: list[str] = []
    print("| workload | load | router | TTFT mean s | median | p99 | ours to it | cached | req/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (shape, kind, router), group in groups.items():
        times = join_times(group)
        mean = statistics.fmean(times)
        ours = join_times(groups.get((shape, kind, "cllm"), []))
        ratio = ""
        if ours and router not in ("one", "cllm"):
            ratio = f"{statistics.fmean(ours) / mean:.2f}"
            if float(ratio) > SHAPES[shape].target:
                missed.append(f"{shape}, {kind}: {ratio} of the TTFT of {router}")
        cells = [f"{mean:.3f}", f"{statistics.median(times):.3f}"]
        cells += [f"{np.percentile(times, 99):.3f}", ratio, f"{find_cached(group):.3f}"]
        cells.append(f"{len(times) / sum(one.wall for one in group):.2f}")
        print(f"| {shape} | {kind} | {router} | {' | '.join(cells)} |")
    for shape in ("prefixes", "long-talks", "agents"):
        one, two = (groups.get((shape, "closed", router), []) for router in ("one", "cllm"))
        if one and two:
            share = find_cached(two) / find_cached(one)
            print(f"{shape}: {share:.3f} times the cached tokens of one replica (least {HITS})")
            if share < HITS:
                missed.append(f"{shape}: {share:.3f} of the cached tokens of one replica")
    for (shape, _, router), group in groups.items():
        if jains := [one.jain for one in group if one.jain is not None]:
            jain = statistics.fmean(jains)
            print(f"{shape}, {router}: Jain's index {jain:.3f} of {jains} (least {JAIN})")
            if jain < JAIN:
                missed.append(f"{shape}: Jain's index {jain:.3f} with {router}")
    print("\n".join(f"missed: {text}" for text in missed))
    return not missed


def join_times(results: Sequence[Result]) -> list[float]:
    return [seconds for result in results for seconds in result.ttft]


def find_cached(results: Sequence[Result]) -> float:
    """Return the share of prompt tokens that were cached."""
    return sum(one.cached_tokens for one in results) / sum(one.prompt_tokens for one in results)


# --- command --------------------------------------------------------------------------------------


def list_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases in the order in which they are measured: routers take turns."""
    routers = options.routers
    for shape, number in itertools.product(options.shapes, range(options.rounds)):
        turn = number % len(routers)
        for kind in SHAPES[shape].loads:
            for router in [*routers[turn:], *routers[:turn]]:
                is_wanted = router in SHAPES[shape].routers and kind in options.loads
                if is_wanted and (router != "one" or kind != "open"):
                    yield Case(shape, kind, router, number)


def read_words(text: str) -> list[str]:
    return text.split(",")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, or fake for the backend that has no model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--shapes", type=read_words, default=[*SHAPES])
    parser.add_argument("--routers", type=read_words, default=[*ROUTERS])
    parser.add_argument("--loads", type=read_words, default=["closed", "open", "burst"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="of each case; by default, depends on it")
    parser.add_argument("--seconds", type=float, default=240)
    return parser.parse_args()


def main() -> None:
    install_signal_handlers()
    options = parse()
    until = time.monotonic() + options.seconds
    model = None if options.model == "fake" else Path(options.model)
    lines = options.file.read_bytes().splitlines() if options.file.exists() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    known = {result.case for result in results}
    cases = [case for case in list_cases(options) if case not in known]
    for flags, group in itertools.groupby(cases, lambda case: SHAPES[case.shape].flags):
        if time.monotonic() > until:
            break
        wanted = [*group]
        with start_all(model, flags, {case.router: None for case in wanted}) as targets:
            for case in wanted:
                if time.monotonic() > until:
                    break
                count = options.requests or SHAPES[case.shape].size
                target = targets[case.router]
                results.append(measure(target, case, count, find_rate(results, case.shape)))
                with options.file.open("ab") as file:
                    file.write(msgspec.json.encode(results[-1]) + b"\n")
    reached = print_tables(results)
    if len(results) < len(known) + len(cases):
        print(f"{len(known) + len(cases) - len(results)} cases are missing", file=sys.stderr)
        sys.exit(2)
    sys.exit(not reached)


if __name__ == "__main__":
    main()
