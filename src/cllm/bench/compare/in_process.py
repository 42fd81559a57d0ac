"""Measures the engine alone in its own process, for comparison with the servers and with
llama-batched-bench.

``measure`` starts the process, sends it a ``Job`` and receives ``EngineFigures``, both as JSON.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from cllm.bench.bare_engine import closed_loop, forget, step_parts
from cllm.bench.work import Size, Work
from cllm.config.settings import Settings
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_backend, build_engine, build_vocabulary, fit_memory
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.settings import engine_params
from cllm.errors import StartupError
from cllm.process.launch import build_engine_environment


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One of three measurements with ``num_seqs`` concurrent sequences.

    The default runs the prompts of ``Work(size, ..., number)``: each finished request starts the
    next one. ``parts`` times the parts of a step with such prompts. ``depth`` computes one prompt
    of that many tokens, continues it with one sequence and then with all; ``context``: tokens of
    each of these sequences.
    """

    model: str
    num_seqs: int
    size: Size
    number: int
    parts: bool = False
    depth: int = 0
    context: int = 0


class EngineFigures(msgspec.Struct, kw_only=True):
    """Results. load_s: seconds to load the model. Speeds are in tokens/s. Decoding speed covers the
    steps in which all sequences decode; ``depth`` measures it with one sequence and with all.
    ttft_ms: mean. step_us: microseconds of a step by part.
    """

    load_s: float
    system: str
    output_tokens_per_s: float = 0.0
    decode_tokens_per_s: list[float] = []
    prefill_tokens_per_s: float = 0.0
    ttft_ms: float = 0.0
    step_us: dict[str, float] = {}


def measure(job: Job) -> EngineFigures:
    """Run a job in a child process. Raises StartupError if the process fails."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", "cllm.bench.compare.in_process"],
        input=msgspec.json.encode(job),
        env=build_engine_environment(),
        capture_output=True,
        check=False,
    )
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        raise StartupError(
            f"the engine in a process of its own failed: {lines[-1] if lines else child.returncode}"
        )
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=EngineFigures)


def make_params(job: Job) -> EngineParams:
    """Return the parameters of ``cllm serve`` without options; for ``depth``, those of a pool for
    each sequence, even if a server would not take that much memory.
    """
    if not job.depth:
        settings = Settings.model_validate({"log": {"level": "error"}})
        return fit_memory(engine_params(settings, Path(job.model)))
    settings = Settings.model_validate(
        {
            "model": {"max_context_length": job.context},
            "scheduler": {"max_num_seqs": job.num_seqs, "speculation": "off"},
            "kv": {"layout": "partitioned", "ram_cache_mb": 0},
            "log": {"level": "error"},
        }
    )
    params = engine_params(settings, Path(job.model))
    return msgspec.structs.replace(params, weight_bytes=0, kv_memory=1 << 62)


def run(job: Job) -> EngineFigures:
    params = make_params(job)
    begun = time.perf_counter()
    backend = build_backend(params)
    measured = EngineFigures(load_s=time.perf_counter() - begun, system=backend.info.system)
    engine = build_engine(backend, params)
    vocabulary = build_vocabulary(params)
    warm_up = Work(
        msgspec.structs.replace(job.size, num_seqs=job.num_seqs, prompt_words=4, num_tokens=4),
        vocabulary,
    )
    closed_loop(engine, warm_up.requests(), job.num_seqs)
    forget(engine)
    if job.depth:
        go_deep(engine, job, measured)
    elif job.parts:
        work = Work(
            msgspec.structs.replace(job.size, num_seqs=job.num_seqs), vocabulary, job.number
        )
        measured.step_us = step_parts(engine, work)
    else:
        requests = Work(job.size, vocabulary, job.number).requests()
        begun = time.perf_counter()
        decode, ttfts = closed_loop(engine, requests, job.num_seqs)
        measured.output_tokens_per_s = (
            len(requests) * job.size.num_tokens / (time.perf_counter() - begun)
        )
        measured.decode_tokens_per_s = [decode]
        measured.ttft_ms = 1e3 * statistics.fmean(ttfts)
    backend.close()
    return measured


def go_deep(engine: Engine, job: Job, measured: EngineFigures) -> None:
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
    measured.prefill_tokens_per_s = job.depth / (time.perf_counter() - begun)
    measured.decode_tokens_per_s.append(closed_loop(engine, [], 1)[0])
    if job.num_seqs > 1:
        requests = [Request(str(i), prompt, params) for i in range(job.num_seqs)]
        measured.decode_tokens_per_s.append(closed_loop(engine, requests, job.num_seqs)[0])


def main() -> None:
    print(msgspec.json.encode(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job))).decode())  # noqa: T201


if __name__ == "__main__":
    main()
