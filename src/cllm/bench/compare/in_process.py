"""Measures the engine alone in a process of its own, for comparison with the servers and with
llama-batched-bench.

``measure`` starts the process, sends it a ``Job`` and receives its values, both as JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import msgspec

from cllm.bench.bare_engine import closed_loop, forget, step_parts
from cllm.bench.compare.rows import DECODE, OUTPUT, PREFILL, START, TTFT
from cllm.bench.compare.scheduler_jobs import QueueJob, RestoreJob, SharedPrefixJob
from cllm.bench.programs import run_program
from cllm.bench.work import Work, WorkSize
from cllm.config.settings import Settings
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_backend, build_engine, build_vocabulary, fit_memory
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.settings import make_engine_params
from cllm.process.launch import build_engine_environment


class EngineJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One of three measurements with ``num_seqs`` concurrent sequences.

    The default runs the prompts of ``Work(size, ..., number)``: each finished request starts the
    next one. ``parts`` times the parts of a step with such prompts, in microseconds. ``depth``
    computes one prompt of that many tokens, and continues it with one sequence and then with all.
    Each of these sequences has ``context`` tokens.
    """

    model: str
    num_seqs: int
    size: WorkSize
    number: int
    parts: bool = False
    depth: int = 0
    context: int = 0

    def run(self) -> dict[str, float]:
        """Return the values by name and unit. Decoding speed covers the steps in which all
        sequences decode, and is left out if there is no such step.
        """
        params = make_params(self)
        begun = time.perf_counter()
        backend = build_backend(params)
        load_s = time.perf_counter() - begun
        engine = build_engine(backend, params)
        vocabulary = build_vocabulary(params)
        size = msgspec.structs.replace(self.size, num_seqs=self.num_seqs)
        warm_up = Work(msgspec.structs.replace(size, prompt_words=4, num_tokens=4), vocabulary)
        closed_loop(engine, warm_up.requests(), self.num_seqs)
        forget(engine)
        if self.depth:
            values = go_deep(engine, self)
        elif self.parts:
            values = step_parts(engine, Work(size, vocabulary, self.number))
        else:
            requests = Work(self.size, vocabulary, self.number).requests()
            begun = time.perf_counter()
            decode, ttfts = closed_loop(engine, requests, self.num_seqs)
            seconds = time.perf_counter() - begun
            values = {
                OUTPUT: len(requests) * self.size.num_tokens / seconds,
                TTFT: 1e3 * statistics.fmean(ttfts),
                START: load_s,
                DECODE: decode,
            }
        backend.close()
        return {name: value for name, value in values.items() if value or name != DECODE}


Job = EngineJob | SharedPrefixJob | RestoreJob | QueueJob


def measure(job: Job) -> dict[str, float]:
    """Run a job in a child process. Raises StartupError if the process fails."""
    output = run_program(
        "the engine in a process of its own",
        [sys.executable, "-P", "-m", "cllm.bench.compare.in_process"],
        msgspec.json.encode(job),
        build_engine_environment(),
    )
    return msgspec.json.decode(output.splitlines()[-1], type=dict[str, float])


def make_params(job: EngineJob) -> EngineParams:
    """Return the parameters of ``cllm serve`` without options; for ``depth``, those of a pool for
    each sequence, even if a server would not take that much memory.
    """
    if not job.depth:
        settings = Settings.model_validate({"log": {"level": "error"}})
        return fit_memory(make_engine_params(settings, Path(job.model)))
    settings = Settings.model_validate(
        {
            "model": {"max_context_length": job.context},
            "scheduler": {"max_num_seqs": job.num_seqs, "speculation": "off"},
            "kv": {"layout": "partitioned", "ram_cache_mb": 0},
            "log": {"level": "error"},
        }
    )
    params = make_engine_params(settings, Path(job.model))
    return msgspec.structs.replace(params, weight_bytes=0, kv_memory=1 << 62)


def go_deep(engine: Engine, job: EngineJob) -> dict[str, float]:
    """Measure ``job.depth``.

    The first request computes the prompt; the others reuse it in cells of their own.
    """
    vocabulary_size = engine.backend.info.vocabulary_size
    prompt = [(7919 * (i + 1)) % (vocabulary_size - 300) for i in range(job.depth)]
    params = SamplingParams(temperature=0, max_tokens=job.size.num_tokens, ignore_eos=True)
    engine.handle(Add(Request("first", prompt, params)))
    begun, outputs = time.perf_counter(), 0
    while not outputs:
        outputs = len(engine.step())
    values = {PREFILL: job.depth / (time.perf_counter() - begun)}
    for count in sorted({1, job.num_seqs}):
        requests = [Request(str(i), prompt, params) for i in range(count)] if count > 1 else []
        if speed := closed_loop(engine, requests, count)[0]:
            values[at_a_time(count)] = speed
    return values


def at_a_time(count: int) -> str:
    """Return the name of the decoding speed of a number of sequences."""
    return f"{DECODE}, {count} at a time"


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    print(msgspec.json.encode(job.run()).decode())  # noqa: T201


if __name__ == "__main__":
    main()
