"""The runs of ``cllm bench compare``: what one system does on one row, measured once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cllm.bench.compare.in_process import EngineJob, at_a_time, measure
from cllm.bench.compare.llama_bench import batched_bench, llama_bench
from cllm.bench.compare.noise import Watch
from cllm.bench.compare.rounds import BUILD, CLLM, CLLM_SYSTEMS, ENGINE, RESTARTED, StoredRun
from cllm.bench.compare.rows import (
    API_CPU,
    COMPUTED,
    DECODE,
    MEMORY,
    OUTPUT,
    OUTSIDE,
    PARKED,
    PREFILL,
    START,
    SUCCEEDED,
    ComparisonRow,
)
from cllm.bench.compare.scheduler_jobs import QueueJob, RestoreJob, SharedPrefixJob
from cllm.bench.compare.systems import Opener
from cllm.bench.load.client import Outcome, find_model, run_stages
from cllm.bench.load.dialects import TokenCounts
from cllm.bench.load.report import Report, figures, summarize
from cllm.bench.load.workload import Group, RequestSpec, Stage, WordSource, word_tasks
from cllm.bench.peers import find_required
from cllm.bench.servers import RunningServer, cllm, load, memory_mb
from cllm.bench.work import Work, WorkSize
from cllm.engine.build import build_vocabulary
from cllm.engine.params import EngineParams
from cllm.http_client import read_local
from cllm.models.catalog import BUILTIN
from cllm.models.gguf import format_size, read_header
from cllm.models.memory import measure_available_bytes
from cllm.models.sequence_memory import compute_kv_bytes_per_token
from cllm.observe.cpu_time import read_cpu_seconds

TEMPERATURE = 0.8
SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.0}  # servers' own defaults differ
STRANGERS = 1_000_000  # added to the seed, for prompts that only the warm-up sends
WARM_UP_WORDS, WARM_UP_TOKENS = 20, 4
WAVES, FEWEST = 2, 4  # requests of each client of the engine, and the least number of all
ENGINE_WORDS = 16
CONTEXTS = (100, 500, 1000, 2000, 4000, 8000)  # tokens
CURVE_TOKENS = 32
METRICS = ("decode_cpu_seconds", "prefill_tokens_computed", "parked")
CELLS = 256  # llama.cpp rounds the context of a sequence up to a multiple of this


class RunResult(NamedTuple):
    """The results of one run.

    ``others`` is the share of the CPU that other processes took, or None if the measurement cannot
    be separated from the start of the system.
    """

    values: dict[str, float]
    num_requests: int = 0
    num_succeeded: int = 0
    failures: Mapping[str, int] = {}
    others: float | None = None


class ComparedModel:
    """A model to serve, and facts about it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = header = read_header(path)
        self.name = path.name
        number = header.get_number("context_length")
        self._trained = trained = number if isinstance(number, int) else None
        self.description = f"{path.name}, {format_size(header.file_bytes)}" + (
            f", trained for {trained:,} tokens" if trained else ""
        )
        self.served = None if path == BUILTIN else path
        self.vocabulary = build_vocabulary(EngineParams(path=str(path)))

    @cached_property
    def tokens_per_word(self) -> float:
        text = WordSource(RequestSpec(model="", prompt_words=1, max_tokens=1)).text(1000)
        return len(self.vocabulary.tokenize(text, add_special=False, parse_special=False)) / 1000

    @cached_property
    def num_cells(self) -> int:
        """The size in tokens of the KV cache that cLLM takes, as it reports it."""
        with cllm(self.served, name=None) as server:
            return int(msgspec.json.decode(read(server, "/model/info"))["num_cells"])

    def fits(self, context: int, row: ComparisonRow) -> bool:
        """Return whether the model was trained for a context, and the memory suffices for it."""
        most = CONTEXTS[-1] if self._trained is None else self._trained - 2 * CURVE_TOKENS
        room = (measure_available_bytes() or 1 << 62) / 2
        tokens = row.clients * (context + 2 * CELLS)
        return context <= most and tokens * (compute_kv_bytes_per_token(self._header) or 1) <= room


def make_spec(row: ComparisonRow, model: ComparedModel, name: str, i: int) -> RequestSpec:
    """Return what the requests of a row are like in round ``i``. They name the model ``name``."""
    return RequestSpec(
        model=name,
        prompt_words=1,
        max_tokens=row.max_tokens,
        temperature=TEMPERATURE,
        seed=i + 1,
        tokens_per_word=model.tokens_per_word,
        options=SAMPLING,
    )


class Runner:
    """Measures one system once. ``scale`` is a factor for the lengths of prompts."""

    def __init__(
        self, model: ComparedModel, peers: Path, default_peers: Path, scale: float
    ) -> None:
        self._model = model
        self._peers, self._default_peers = peers, default_peers
        self._scale = scale
        self._threads = os.cpu_count() or 1

    def measure(self, row: ComparisonRow, run: StoredRun) -> RunResult:
        """Measure what is not a load on a server. Raises StartupError if a program fails."""
        match row.kind:
            case "engine":
                return self._measure_engine(row, run)
            case "context":
                return self._measure_context(row, run)
            case "host":
                size = WorkSize(int(run.settings), ENGINE_WORDS, CURVE_TOKENS, TEMPERATURE, seed=0)
                return RunResult(measure(self._job(size.num_seqs, size, parts=True)))
            case "bound":
                return RunResult(measure(self._make_bound(row, run)))
            case "queue":
                return RunResult(measure(QueueJob()))
            case "restart":
                return RunResult(measure(RestoreJob(model=str(self._model.path))))
            case _:
                folder = self._peers if run.system == BUILD else self._default_peers
                program = find_required("llama-bench", folder)
                measured = llama_bench(
                    program, self._model.path, threads=self._threads, num_tokens=64
                )
                return RunResult({name: rates[0] for name, rates in measured.items()})

    def measure_server(self, row: ComparisonRow, run: StoredRun, opener: Opener) -> RunResult:
        """Start a server and send it the requests of a row. The system RESTARTED gets them before
        its restart, too.

        Raises StartupError if it does not start.
        """
        if run.system == RESTARTED:
            with opener() as server:
                self._send(server, row, run)
        with opener() as server:
            return self._send(server, row, run)

    def _send(self, server: RunningServer, row: ComparisonRow, run: StoredRun) -> RunResult:
        assert row.make is not None
        if row.keep_alive:
            server = msgspec.structs.replace(server, keep_alive=True)
        spec = make_spec(row, self._model, find_model(server), run.round)
        spec = msgspec.structs.replace(spec, api=server.api)
        return self._load(server, row, run, spec, row.make(spec, self._scale))

    def _load(
        self,
        server: RunningServer,
        row: ComparisonRow,
        run: StoredRun,
        spec: RequestSpec,
        stages: list[Stage],
    ) -> RunResult:
        """Warm the server up, send it the requests and return the measurements."""
        strangers = msgspec.structs.replace(
            spec,
            seed=spec.seed + STRANGERS,
            prompt_words=WARM_UP_WORDS,
            max_tokens=WARM_UP_TOKENS,
        )
        load(server, word_tasks(row.clients, strangers), row.clients, may_fail=True)
        is_cllm = run.system in CLLM_SYSTEMS
        api, before = read_cpu_seconds(server.pid), read_metrics(server) if is_cllm else {}
        watch = Watch()
        with pinned():
            outcome = run_stages(server, stages)
        others = watch.others()
        accept_without_usage(outcome)
        report = summarize(
            outcome, url=server.url, model=spec.model, settings={"workload": row.name}
        )
        values = collect_values(report)
        values[START] = server.start_s
        if (memory := memory_mb(server.pid)) is not None:
            values[MEMORY] = memory
        if row.figures:
            values |= row.figures(outcome.answers)
        if is_cllm and report.output_tokens and outcome.server_cpu:
            counts = {name: after - before[name] for name, after in read_metrics(server).items()}
            values[OUTSIDE] = 1 - counts["decode_cpu_seconds"] / outcome.server_cpu
            values[COMPUTED], values[PARKED] = counts["prefill_tokens_computed"], counts["parked"]
            api = read_cpu_seconds(server.pid) - api
            values[API_CPU] = 1e6 * api / report.output_tokens
        succeeded = report.num_requests - report.num_failed
        return RunResult(values, report.num_requests, succeeded, report.failures, others)

    def _measure_engine(self, row: ComparisonRow, run: StoredRun) -> RunResult:
        count = max(FEWEST, WAVES * row.clients)
        size = WorkSize(count, ENGINE_WORDS, row.max_tokens, TEMPERATURE, seed=0)
        work = Work(size, self._model.vocabulary, run.round + 1)
        if run.system == CLLM:
            with cllm(self._model.served, name=None) as server:
                name = find_model(server)
                group = Group(tasks=work.tasks_in(server.api, name), clients=row.clients)
                spec = make_spec(row, self._model, name, run.round)
                return self._load(server, row, run, spec, [[group]])
        if run.system == ENGINE:
            return RunResult(measure(self._job(row.clients, size, number=run.round + 1)))
        (line,) = self._batched_bench(
            context=row.clients * round_up(work.context),
            prompt_tokens=round(sum(map(len, work.prompts)) / len(work.prompts)),
            num_tokens=row.max_tokens,
            num_seqs=[row.clients],
        )
        speed = row.clients * row.max_tokens / line["t"]
        return RunResult({OUTPUT: speed, DECODE: line["speed_tg"]})

    def _measure_context(self, row: ComparisonRow, run: StoredRun) -> RunResult:
        """Measure prefill, and decoding after a prompt that is computed once and copied."""
        context = int(run.settings)
        room = round_up(context + 2 * CURVE_TOKENS)
        if run.system == ENGINE:
            size = WorkSize(1, ENGINE_WORDS, CURVE_TOKENS, TEMPERATURE, seed=0)
            return RunResult(measure(self._job(row.clients, size, depth=context, context=room)))
        lines = self._batched_bench(
            context=row.clients * room,
            prompt_tokens=context,
            num_tokens=CURVE_TOKENS,
            num_seqs=[1, row.clients],
            shared_prompt=True,
        )
        decoding = {at_a_time(line["pl"]): line["speed_tg"] for line in lines if line["speed_tg"]}
        return RunResult({PREFILL: lines[0]["speed_pp"], **decoding})

    def _job(self, num_seqs: int, size: WorkSize, *, number: int = 1, **changes: Any) -> EngineJob:
        path = str(self._model.path)
        return EngineJob(model=path, num_seqs=num_seqs, size=size, number=number, **changes)

    def _make_bound(self, row: ComparisonRow, run: StoredRun) -> SharedPrefixJob:
        """Return the least work for the texts of a row's requests."""
        assert row.make is not None
        spec = make_spec(row, self._model, "", run.round)
        tokenize = self._model.vocabulary.tokenize
        bodies = [
            msgspec.json.decode(task.body)
            for stage in row.make(spec, self._scale)
            for group in stage
            for task in group.tasks
        ]
        prompts = [
            tokenize(body["messages"][0]["content"], add_special=True, parse_special=False)
            for body in bodies
        ]
        return SharedPrefixJob(
            model=str(self._model.path),
            prompts=prompts,
            num_seqs=row.clients,
            num_tokens=row.max_tokens,
        )

    def _batched_bench(self, **sizes: Any) -> list[dict[str, Any]]:
        program = find_required("llama-batched-bench", self._peers)
        return batched_bench(program, self._model.path, threads=self._threads, **sizes)


def round_up(context: int) -> int:
    return -(-context // CELLS) * CELLS


def accept_without_usage(outcome: Outcome) -> None:
    """Accept answers that ended at their maximal length from a server that does not report usage:
    they have all their tokens.
    """
    for answer in outcome.answers:
        if answer.failure == "no usage" and answer.finish_reason == "length":
            answer.failure, answer.usage = "", TokenCounts(answer.task.num_tokens or 0, 0, 0)


def collect_values(report: Report) -> dict[str, float]:
    """Return the figures of a report, and the shares of requests that succeeded."""
    values = figures(report)
    values[SUCCEEDED] = 1 - report.num_failed / report.num_requests
    for name, part in report.parts.items():
        values[f"{name}: {SUCCEEDED}"] = 1 - part.num_failed / part.num_requests
    return values


def read(server: RunningServer, path: str) -> bytes:
    return read_local(server.url + path)


def read_metrics(server: RunningServer) -> dict[str, float]:
    """Return what cLLM has counted since its start, by the names of METRICS."""
    lines = read(server, "/metrics").decode().splitlines()
    return {
        name: sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"cllm:{name}_total")
        )
        for name in METRICS
    }


@contextmanager
def pinned() -> Iterator[None]:
    """Keep this thread on the last CPU, so that the client keeps off the server's."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cpus)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
