"""The engine alone, in a process of its own: what a server over it is compared with, and llama-batched-bench with it.

``measure`` starts the process, gives it a ``Job`` and gets a ``Found``, both as JSON.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from cllm.bench.stages import Size, Work, forget, step_parts
from cllm.config import Settings
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_backend, build_engine, build_vocabulary, fitted
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.settings import engine_params
from cllm.errors import StartupError
from cllm.process.launch import engine_environment


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One of three things, with ``num_seqs`` at a time, each with ``context`` tokens.

    By default the prompts of ``Work(size, ..., number)``, each end lets the next one start. ``parts``: a step of such
    prompts by its parts. ``depth``: one prompt of so many tokens, continued by one sequence and then by all.
    """

    model: str
    num_seqs: int
    context: int
    threads: int
    size: Size
    number: int
    parts: bool = False
    depth: int = 0


class Found(msgspec.Struct, kw_only=True):
    """load_s: until the model was loaded. Speeds in tokens/s; decoding is that of steps in which all sequences decode,
    for ``depth`` with one sequence and with all. TTFT in milliseconds. step_us by the parts of a step.
    """

    load_s: float
    system: str
    output_tokens_per_s: float = 0.0
    decode_tokens_per_s: list[float] = []
    prefill_tokens_per_s: float = 0.0
    ttft_ms: float = 0.0
    step_us: dict[str, float] = {}


def measure(job: Job) -> Found:
    """Raises StartupError if the process fails."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", "cllm.bench.in_process"],
        input=msgspec.json.encode(job),
        env=engine_environment(),
        capture_output=True,
        check=False,
    )
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        raise StartupError(f"the engine in a process of its own failed: {lines[-1] if lines else child.returncode}")
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=Found)


def params_of(job: Job) -> EngineParams:
    """What ``cllm serve`` would make of the flags that it is started with."""
    settings = Settings.model_validate(
        {
            "model": {"max_context_length": job.context},
            "scheduler": {"max_num_seqs": job.num_seqs, "speculation": "off"},
            "kv": {"layout": "partitioned" if job.depth else "auto", "ram_cache_mb": 0},
            "backend": {"llama_cpp": {"n_threads": job.threads}},
            "log": {"level": "error"},
        }
    )
    params = engine_params(settings, Path(job.model))
    if job.depth:  # all of them at once, even if that is more than a server would take for itself
        return msgspec.structs.replace(params, weight_bytes=0, kv_memory=1 << 62)
    return fitted(params)


def run(job: Job) -> Found:
    params = params_of(job)
    begun = time.perf_counter()
    backend = build_backend(params)
    found = Found(load_s=time.perf_counter() - begun, system=backend.info.system)
    engine = build_engine(backend, params)
    vocabulary = build_vocabulary(params)
    warm_up = Work(msgspec.structs.replace(job.size, num_seqs=job.num_seqs, prompt_words=4, num_tokens=4), vocabulary)
    closed_loop(engine, warm_up.requests(), job.num_seqs)
    forget(engine)
    if job.depth:
        go_deep(engine, job, found)
    elif job.parts:
        work = Work(msgspec.structs.replace(job.size, num_seqs=job.num_seqs), vocabulary, job.number)
        found.step_us = step_parts(engine, work)
    else:
        requests = Work(job.size, vocabulary, job.number).requests()
        begun = time.perf_counter()
        decode, ttfts = closed_loop(engine, requests, job.num_seqs)
        found.output_tokens_per_s = len(requests) * job.size.num_tokens / (time.perf_counter() - begun)
        found.decode_tokens_per_s = [decode]
        found.ttft_ms = 1e3 * statistics.fmean(ttfts)
    backend.close()
    return found


def closed_loop(engine: Engine, requests: list[Request], num_seqs: int) -> tuple[float, list[float]]:
    """Tokens per second of the steps in which ``num_seqs`` decode (0 if there is none), and seconds to first tokens."""
    waiting = iter(requests)
    sent: dict[str, float] = {}
    ttfts: list[float] = []
    tokens, seconds = 0, 0.0

    def add(fresh: Iterator[Request]) -> None:
        for request in fresh:
            sent[request.request_id] = time.perf_counter()
            engine.handle(Add(request))

    add(islice(waiting, num_seqs))
    while engine.scheduler.has_work():
        decoding = all_decode(engine, num_seqs)
        begun = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if decoding:
            tokens += len(outputs)
            seconds += now - begun
        ttfts += [now - sent.pop(output.request_id) for output in outputs if output.request_id in sent]
        add(islice(waiting, sum(bool(output.finish) for output in outputs)))
    return tokens / seconds if seconds else 0.0, ttfts


def all_decode(engine: Engine, num_seqs: int) -> bool:
    running = engine.scheduler.running
    return len(running) == num_seqs and all(seq.num_lacking_tokens == 1 for seq in running)


def go_deep(engine: Engine, job: Job, found: Found) -> None:
    """The first computes the prompt; all others of it begin with what is kept, but in cells of their own."""
    vocabulary_size = engine.backend.info.vocabulary_size
    prompt = [(7919 * (i + 1)) % (vocabulary_size - 300) for i in range(job.depth)]
    params = SamplingParams(temperature=0, max_tokens=job.size.num_tokens, ignore_eos=True)
    engine.handle(Add(Request("first", prompt, params)))
    begun, outputs = time.perf_counter(), 0
    while not outputs:
        outputs = len(engine.step())
    found.prefill_tokens_per_s = job.depth / (time.perf_counter() - begun)
    found.decode_tokens_per_s.append(closed_loop(engine, [], 1)[0])
    if job.num_seqs > 1:
        requests = [Request(str(i), prompt, params) for i in range(job.num_seqs)]
        found.decode_tokens_per_s.append(closed_loop(engine, requests, job.num_seqs)[0])


def main() -> None:
    print(msgspec.json.encode(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job))).decode())  # noqa: T201


if __name__ == "__main__":
    main()
