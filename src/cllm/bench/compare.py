"""Compare cLLM with its peers on one machine: the same model, threads, context per sequence and
requests, in turn.

Each run starts its own server and stops it afterwards. So no other model is loaded during a run,
and every start is timed. Every second round runs in reverse order. No prompt is sent twice. Before
the clock starts, each server answers one short request for each concurrent client.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cllm.bench.answer import Answer
from cllm.bench.comparison import (
    BOUND,
    CLLM,
    DEFAULT_SERVER,
    ENGINE,
    LLAMA_SERVER,
    OLLAMA,
    Depth,
    Parts,
    Results,
    Run,
)
from cllm.bench.in_process import Found, Job, measure
from cllm.bench.llama_bench import batched_bench, llama_bench
from cllm.bench.load import Outcome
from cllm.bench.peers import DEFAULT_FOLDER, needed
from cllm.bench.report import latencies_of
from cllm.bench.servers import MODEL, Server, load, memory_mb
from cllm.bench.systems import find_servers
from cllm.bench.work import Size, Work
from cllm.bench.workload import Task, Words, word_tasks
from cllm.engine.build import build_vocabulary
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.gguf import compute_kv_bytes_per_token, read_header
from cllm.models.memory import measure_available_bytes
from cllm.observe.cpu_time import read_cpu_seconds

TEMPERATURE = 0.8
WAVES = 2  # requests per client
FEWEST = 4  # least number of requests in a run
KEPT_WAVES, KEPT_TOKENS, KEPT_SEQS = 8, 4, 8  # for the run over kept-alive connections
SHARED = {  # the run whose prompts share a prefix
    "shared_requests": 24,
    "shared_seqs": 8,
    "shared_words": 300,
    "own_words": 10,
    "shared_tokens": 32,
    "shared_context": 2048,
}
CURVE_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
CURVE_CONTEXT = (100, 500, 1000, 2000, 4000, 8000)  # tokens
CURVE_SEQS = 8
CURVE_TOKENS = 32
CELLS = 256  # llama.cpp rounds the context of a sequence up to a multiple of this

Progress = Callable[[float, str], None]
Step = tuple[str, float, Callable[[], None]]
"""Description, amount of work in any unit, and the function that does the step."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare.

    ``peers``: folder of llama.cpp's programs. ``default_peers``: folder of its default build.
    """

    model: Path
    peers: Path
    default_peers: Path = DEFAULT_FOLDER
    concurrency: list[int]
    rounds: int
    prompt_words: int
    max_tokens: int
    threads: int
    curves: bool
    seed: int = 0


def compare(
    options: Options, machine: dict[str, str], progress: Progress, keep: Callable[[Results], None]
) -> Results:
    """Run all measurements. ``machine`` describes the machine on the page. ``keep`` is called with
    the results so far after each step.

    Raises StartupError if cLLM, llama-server or llama-batched-bench cannot be run. Other peers are
    skipped instead.
    """
    comparison = Comparison(options, machine)
    steps = [*comparison.steps()]
    total, done = sum(weight for _, weight, _ in steps), 0.0
    for text, weight, do in steps:
        progress(done / total, text)
        do()
        keep(comparison.results)
        done += weight
    progress(1.0, "done")
    return comparison.results


class Comparison:
    def __init__(self, options: Options, machine: dict[str, str]) -> None:
        self.options = options
        self._header = read_header(options.model)
        program = needed("llama-batched-bench", options.peers)
        self._batched_bench = partial(
            batched_bench, program, options.model, threads=options.threads
        )
        self._vocabulary = build_vocabulary(EngineParams(path=str(options.model)))
        self._num_works = 0
        sample = self._work(8, options.max_tokens)
        self.context = -(-sample.context // CELLS) * CELLS
        self._prompt_tokens = round(sum(map(len, sample.prompts)) / len(sample.prompts))
        setup = {
            "model": options.model.name,
            "model_bytes": self._header.file_bytes,
            "prompt_words": options.prompt_words,
            "prompt_tokens": self._prompt_tokens,
            "max_tokens": options.max_tokens,
            "context": self.context,
            "threads": options.threads,
            "rounds": options.rounds,
            "concurrency": options.concurrency,
            **SHARED,
        }
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.results = Results(date=today, machine=dict(machine), setup=setup)
        self.servers = find_servers(
            options.model,
            options.threads,
            options.peers,
            options.default_peers,
            self.results.skipped,
        )

    def steps(self) -> Iterator[Step]:
        options, results = self.options, self.results
        builds = {"llama-bench": (options.peers, results.llama_bench)}
        builds["llama-bench, default build"] = (options.default_peers, results.default_bench)
        for i in range(options.rounds):
            for name, (folder, rates) in builds.items() if i % 2 == 0 else reversed(builds.items()):
                if (program := folder / "llama-bench").exists():
                    yield name, 5, partial(self._llama_bench, program.absolute(), rates)
                else:
                    results.skipped[name] = f"not in {folder}"
        for num_seqs in options.concurrency:
            for name, settings in self.servers.items():
                for which in settings if len(settings) > 1 and name != DEFAULT_SERVER else ():
                    yield self._step(results.trials, name, num_seqs, 0, which=which, waves=1)
        for i in range(options.rounds):
            for num_seqs in options.concurrency:
                names = [BOUND, ENGINE, *self.servers]
                for name in names if i % 2 == 0 else reversed(names):
                    yield self._step(results.runs, name, num_seqs, i)
        for i in range(options.rounds):
            names = [name for name in (CLLM, LLAMA_SERVER, DEFAULT_SERVER) if name in self.servers]
            for name in names if i % 2 == 0 else reversed(names):
                yield f"{name}, shared prefix", 60, partial(self._shared_run, name, i)
        for name in self.servers:
            if name != DEFAULT_SERVER:
                yield self._step(
                    results.kept,
                    name,
                    KEPT_SEQS,
                    0,
                    waves=KEPT_WAVES,
                    num_tokens=KEPT_TOKENS,
                    keep_alive=True,
                )
        if options.curves:
            yield from self._curve_steps()

    def _curve_steps(self) -> Iterator[Step]:
        results = self.results
        for i, num_seqs in enumerate(CURVE_CONCURRENCY):
            names = [CLLM, LLAMA_SERVER]
            for name in names if i % 2 == 0 else reversed(names):
                yield self._step(results.curve, name, num_seqs, 0, waves=1, num_tokens=CURVE_TOKENS)
            yield f"a step of {num_seqs}", num_seqs + 4, partial(self._parts, num_seqs)
        trained = self._header.get_number("context_length")
        most = trained - 2 * CURVE_TOKENS if isinstance(trained, int) else CURVE_CONTEXT[-1]
        room = (
            (measure_available_bytes() or 1 << 62)
            / 2
            / (compute_kv_bytes_per_token(self._header) or 1)
        )
        for context in CURVE_CONTEXT:
            if context > most or CURVE_SEQS * (context + 2 * CELLS) > room:
                results.skipped[f"context of {context}"] = (
                    "more than the model was made for, or than fits into memory"
                )
                continue
            for do in (self._depth, self._depth_bound):
                yield f"context of {context}", context / 50, partial(self._try_depth, do, context)

    def _try_depth(self, do: Callable[[int], None], context: int) -> None:
        try:
            do(context)
        except StartupError as error:
            self.results.skipped[f"context of {context}"] = str(error)

    def _step(
        self,
        runs: list[Run],
        name: str,
        num_seqs: int,
        i: int,
        *,
        which: str = "",
        waves: int = WAVES,
        num_tokens: int | None = None,
        keep_alive: bool = False,
    ) -> Step:
        num_tokens = num_tokens or self.options.max_tokens

        def do() -> None:
            work = self._work(max(FEWEST, waves * num_seqs), num_tokens)
            if name == BOUND:
                runs.append(self._bound_run(num_seqs, i, work))
            elif name == ENGINE:
                runs.append(self._engine_run(num_seqs, i, work))
            elif name not in self.results.skipped:
                settings = which or self._fastest(name, num_seqs)
                try:
                    runs.append(
                        self._server_run(name, settings, num_seqs, i, work, keep_alive=keep_alive)
                    )
                except StartupError as error:
                    if name in (CLLM, LLAMA_SERVER):
                        raise
                    self.results.skipped[name] = str(error)

        return f"{name}, {num_seqs} at a time", waves * num_seqs * (num_tokens + 32) / 100 + 4, do

    def _fastest(self, name: str, num_seqs: int) -> str:
        """Return the settings that were fastest in the trials with the concurrency closest to
        ``num_seqs``.

        llama-server's default build uses the trials of the other build.
        """
        tried = LLAMA_SERVER if name == DEFAULT_SERVER else name
        trials = [run for run in self.results.trials if run.system == tried]
        if not trials:
            return next(iter(self.servers[name]))
        nearest = min({run.num_seqs for run in trials}, key=lambda tried: abs(tried - num_seqs))
        best = max(
            (run for run in trials if run.num_seqs == nearest),
            key=lambda run: run.output_tokens_per_s,
        )
        return best.settings

    # --- runs ------------------------------------------------------------------------------------

    def _work(self, num_requests: int, num_tokens: int) -> Work:
        """Return work with prompts that no other work has."""
        self._num_works += 1
        size = Size(
            num_requests, self.options.prompt_words, num_tokens, TEMPERATURE, self.options.seed
        )
        return Work(size, self._vocabulary, self._num_works)

    def _job(self, num_seqs: int, work: Work, **changes: Any) -> Job:
        options: dict[str, Any] = {"context": self.context, "number": self._num_works, **changes}
        return Job(
            model=str(self.options.model),
            num_seqs=num_seqs,
            threads=self.options.threads,
            size=work.size,
            **options,
        )

    def _measure(self, job: Job) -> Found:
        found = measure(job)
        self.results.machine["llama.cpp uses"] = ", ".join(re.findall(r"(\w+) = 1", found.system))
        return found

    def _server_run(
        self, name: str, settings: str, num_seqs: int, i: int, work: Work, *, keep_alive: bool
    ) -> Run:
        with self.servers[name][settings](num_seqs, self.context) as server:
            if keep_alive:
                server = msgspec.structs.replace(server, keep_alive=True)  # noqa: PLW2901  # the same server
            return self._load(server, work.tasks_in(server.api), name, settings, num_seqs, i)

    def _shared_run(self, name: str, i: int) -> None:
        num_seqs, settings = SHARED["shared_seqs"], self._fastest(name, SHARED["shared_seqs"])
        words = Words(
            model=MODEL,
            prompt_words=SHARED["shared_words"] + SHARED["own_words"],
            shared_words=SHARED["shared_words"],
            max_tokens=SHARED["shared_tokens"],
            temperature=TEMPERATURE,
            seed=i,
        )
        with self.servers[name][settings](num_seqs, SHARED["shared_context"]) as server:
            tasks = word_tasks(SHARED["shared_requests"], words)
            self.results.shared.append(self._load(server, tasks, name, settings, num_seqs, i))

    def _load(
        self, server: Server, tasks: list[Task], name: str, settings: str, num_seqs: int, i: int
    ) -> Run:
        """Warm the server up, send it ``tasks`` and return the measurements."""
        load(
            server, self._work(num_seqs, KEPT_TOKENS).tasks_in(server.api), num_seqs, may_fail=True
        )
        cpu = read_cpu_seconds(server.pid)
        outcome = load(server, tasks, num_seqs, may_fail=True)
        cpu = read_cpu_seconds(server.pid) - cpu
        memory = memory_mb(server.pid)
        run = run_of(outcome, name, settings, num_seqs, i)
        # it loads the model on the first request
        run.start_s = None if name == OLLAMA else server.start_s
        run.memory_mb = memory
        if name == CLLM and run.num_succeeded and cpu:
            run.cpu_us_per_token = 1e6 * cpu / (run.output_tokens_per_s * outcome.wall)
        return run

    def _engine_run(self, num_seqs: int, i: int, work: Work) -> Run:
        found = self._measure(self._job(num_seqs, work))
        return Run(
            system=ENGINE,
            num_seqs=num_seqs,
            round=i,
            num_requests=work.size.num_seqs,
            num_succeeded=work.size.num_seqs,
            output_tokens_per_s=found.output_tokens_per_s,
            # 0: there was no step in which all decoded
            decode_tokens_per_s=found.decode_tokens_per_s[0] or None,
            ttft_ms=found.ttft_ms,
            load_s=found.load_s,
        )

    def _bound_run(self, num_seqs: int, i: int, work: Work) -> Run:
        tokens = work.size.num_tokens
        (found,) = self._batched_bench(
            context=num_seqs * self.context,
            prompt_tokens=self._prompt_tokens,
            num_tokens=tokens,
            num_seqs=[num_seqs],
        )
        return Run(
            system=BOUND,
            num_seqs=num_seqs,
            round=i,
            num_requests=num_seqs,
            num_succeeded=num_seqs,
            output_tokens_per_s=num_seqs * tokens / found["t"],
            decode_tokens_per_s=found["speed_tg"],
        )

    def _parts(self, num_seqs: int) -> None:
        work = self._work(num_seqs, CURVE_TOKENS)
        self.results.parts.append(
            Parts(num_seqs, self._measure(self._job(num_seqs, work, parts=True)).step_us)
        )

    def _depth(self, context: int) -> None:
        work = self._work(1, CURVE_TOKENS)
        room = -(-(context + 2 * CURVE_TOKENS) // CELLS) * CELLS
        found = self._measure(self._job(CURVE_SEQS, work, depth=context, context=room))
        decoding = dict(zip((1, CURVE_SEQS), found.decode_tokens_per_s, strict=True))
        depth = Depth(
            system=ENGINE,
            context=context,
            prefill_tokens_per_s=found.prefill_tokens_per_s,
            decode_tokens_per_s=decoding,
        )
        self.results.depths.append(depth)

    def _depth_bound(self, context: int) -> None:
        """Measure the bound. The prompt is computed once and copied, as in the engine."""
        room = -(-(context + 2 * CURVE_TOKENS) // CELLS) * CELLS
        lines = self._batched_bench(
            context=CURVE_SEQS * room,
            prompt_tokens=context,
            num_tokens=CURVE_TOKENS,
            num_seqs=[1, CURVE_SEQS],
            shared_prompt=True,
        )
        depth = Depth(
            system=BOUND,
            context=context,
            prefill_tokens_per_s=lines[0]["speed_pp"],
            decode_tokens_per_s={line["pl"]: line["speed_tg"] for line in lines},
        )
        self.results.depths.append(depth)

    def _llama_bench(self, program: Path, rates: dict[str, list[float]]) -> None:
        """Run each test once and add its tokens/s to ``rates``."""
        options = self.options
        for name, found in llama_bench(
            program, options.model, threads=options.threads, num_tokens=options.max_tokens
        ).items():
            rates.setdefault(name, []).extend(found)


def run_of(outcome: Outcome, system: str, settings: str, num_seqs: int, i: int) -> Run:
    """Return the measurements of a load."""
    good = [
        answer for answer in outcome.answers if answer.succeeded or complete_without_usage(answer)
    ]
    latencies = latencies_of(good)
    gaps = latencies["itl"]
    return Run(
        system=system,
        settings=settings,
        num_seqs=num_seqs,
        round=i,
        num_requests=len(outcome.answers),
        num_succeeded=len(good),
        failures=Counter(answer.failure for answer in outcome.answers if answer not in good),
        output_tokens_per_s=sum(map(num_tokens, good)) / outcome.wall if good else 0.0,
        ttft_ms=1e3 * float(np.mean(latencies["ttft"])) if good else None,
        itl_p50_ms=1e3 * float(np.percentile(gaps, 50)) if gaps else None,
        itl_p99_ms=1e3 * float(np.percentile(gaps, 99)) if gaps else None,
    )


def complete_without_usage(answer: Answer) -> bool:
    """Return whether the answer reached its length limit at a server that reports no usage: it has
    all its tokens.
    """
    return answer.failure == "no usage" and answer.finish_reason == "length"


def num_tokens(answer: Answer) -> int:
    return answer.output_tokens or answer.task.num_tokens or 0
