"""Measures the speed that is lost between llama_decode and the socket, with the same work at every
stage.

The work: N prompts together, each continued by D tokens. The prompts are already in the cells, so
this measures decoding, and not how the engine chunks prompts that arrive one after the other.
Stages: the backend alone; with sampling; with scheduler (the engine in this process); the engine in
its own process; with detokenizing (the service); over HTTP in one piece; over HTTP as streams.
Speed is N * D tokens divided by the time from the first request to the last token.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cllm.backends.base import Backend, Vocabulary
from cllm.bench.bare_engine import forget, make_sequences, prefill, step_parts
from cllm.bench.console import number_table
from cllm.bench.load.answer import printable
from cllm.bench.load.client import Endpoint, open_connections
from cllm.bench.load.workload import Task
from cllm.bench.servers import MODEL, cllm, load
from cllm.bench.work import Work, WorkSize
from cllm.core.batch import Batch, Row, Trim
from cllm.core.request import Request
from cllm.engine.build import build_backend, build_engine, build_vocabulary
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.observe.metrics import Metrics
from cllm.process.pool import Pool
from cllm.sampling.pipeline import Sampler
from cllm.serving.answer import Generation
from cllm.serving.model_texts import ModelTexts
from cllm.serving.service import Service

if TYPE_CHECKING:
    from rich.console import Console

STAGES = (
    "backend",
    "+ sampling",
    "+ scheduler",
    "+ process",
    "+ service",
    "+ HTTP, in one piece",
    "+ HTTP, streamed",
)
BY_HAND = STAGES[:2]
PAUSE = 0.3  # seconds between two runs, until spinning threads go to sleep

Progress = Callable[[float, str], None]


class StageResult(msgspec.Struct, frozen=True):
    """The speed of one stage. ``tokens_per_s`` has one value for each round."""

    stage: str
    tokens_per_s: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


class SizeResult(msgspec.Struct, frozen=True):
    """All stages of one size.

    ``step_us`` has the microseconds of each part of a decoding step of the engine in this process.
    """

    num_seqs: int
    stages: list[StageResult]
    step_us: dict[str, float]


def run_stages(
    path: Path, sizes: list[WorkSize], rounds: int, progress: Progress
) -> list[SizeResult]:
    """Measure all stages of each size, in turn, ``rounds`` times.

    Raises StartupError if the model cannot be loaded.
    """
    vocabulary = build_vocabulary(EngineParams(path=str(path)))
    results = []
    for i, size in enumerate(sizes):

        def report_share(share: float, i: int = i, size: WorkSize = size) -> None:
            progress((i + share) / len(sizes), sequences(size.num_seqs))

        results.append(run_size(path, size, vocabulary, rounds, report_share))
    return results


def run_size(
    path: Path,
    size: WorkSize,
    vocabulary: Vocabulary,
    rounds: int,
    progress: Callable[[float], None],
) -> SizeResult:
    measured: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with ExitStack() as stack:
        stages, engine = open_stages(path, Work(size, vocabulary), stack)
        count = 0
        for i in range(-1, rounds):  # round -1 is the warm-up
            for stage in STAGES if i % 2 else reversed(STAGES):
                count += 1
                work = Work(size, vocabulary, count)  # not cached anywhere
                if stage in BY_HAND:
                    prefill_by_hand(engine, work)
                else:
                    stages[stage](work.before())
                time.sleep(PAUSE)
                begun = time.perf_counter()
                stages[stage](work)
                if i >= 0:
                    measured[stage].append(
                        round(work.num_tokens / (time.perf_counter() - begun), 2)
                    )
                progress(count / (rounds + 1) / len(STAGES))
        parts = step_parts(engine, Work(size, vocabulary, count + 1))
    return SizeResult(
        size.num_seqs, [StageResult(stage, speeds) for stage, speeds in measured.items()], parts
    )


def open_stages(
    path: Path, work: Work, stack: ExitStack
) -> tuple[dict[str, Callable[[Work], object]], Engine]:
    """Return the function that runs each stage, and the engine.

    All is loaded once and closed with ``stack``.
    """
    num_seqs = work.size.num_seqs
    params = EngineParams(
        path=str(path),
        context_length=work.context,
        max_num_seqs=num_seqs,
        layout="partitioned",
        kv_memory=1 << 62,
        speculation="off",
    )
    backend = build_backend(params)
    stack.callback(backend.close)
    engine = build_engine(backend, params)
    runner = stack.enter_context(asyncio.Runner())
    pool = runner.run(start_pool(params))
    stack.callback(lambda: runner.run(pool.close()))
    service = Service(ModelTexts(pool, Metrics(MODEL)), MODEL)
    flags = ("--max-num-seqs", num_seqs, "--context", work.context, "--kv.layout", "partitioned")
    target = stack.enter_context(cllm(path, *flags, "--scheduler.speculation", "off"))
    return {
        "backend": lambda work: step_by_hand(backend, work, None),
        "+ sampling": lambda work: step_by_hand(backend, work, Sampler()),
        "+ scheduler": lambda work: step_engine(engine, work),
        "+ process": lambda work: runner.run(read_streams(pool, work)),
        "+ service": lambda work: runner.run(read_answers(service, work)),
        "+ HTTP, in one piece": lambda work: runner.run(post_all(target, work)),
        "+ HTTP, streamed": lambda work: load(target, work.tasks, num_seqs),
    }, engine


async def start_pool(params: EngineParams) -> Pool:
    pool = Pool(params)
    await pool.start()
    return pool


def losses(result: SizeResult) -> list[float]:
    """Return the share of the speed that each stage loses compared with the one before; 0 for the
    first.
    """
    medians = [stage.median for stage in result.stages]
    return [0.0, *(1 - after / before for before, after in pairwise(medians))]


def shares(results: list[SizeResult]) -> dict[str, dict[str, list[float]]]:
    """Return size -> stage -> the speed of each round as a share of the backend's median speed."""
    return {
        sequences(result.num_seqs): {
            stage.stage: [speed / result.stages[0].median for speed in stage.tokens_per_s]
            for stage in result.stages
        }
        for result in results
    }


def print_stages(results: list[SizeResult], console: Console) -> None:
    """Print a table of the stages and the parts of a step for each size."""
    for result in results:
        table = number_table(
            "stage",
            "tokens/s",
            "least",
            "most",
            "of the backend",
            "loss",
            title=sequences(result.num_seqs),
        )
        first = result.stages[0].median
        for stage, loss in zip(result.stages, losses(result), strict=True):
            speeds = stage.tokens_per_s
            cells = [f"{value:,.1f}" for value in (stage.median, min(speeds), max(speeds))]
            table.add_row(stage.stage, *cells, f"{stage.median / first:.3f}", f"{loss:.1%}")
        console.print(table)
        parts = ", ".join(f"{part} {us:,.0f}" for part, us in result.step_us.items())
        host = sum(us for part, us in result.step_us.items() if part != "decode")
        console.print(
            f"a decoding step in microseconds: {parts}; {host:,.0f} outside the decode",
            highlight=False,
        )


def sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


# --- the stages ---------------------------------------------------------------------------------


def prefill_by_hand(engine: Engine, work: Work) -> None:
    """Empty the engine's cells, and compute all tokens of each prompt except the last one into
    them.
    """
    forget(engine)
    for seq in make_sequences(work.requests(), engine.backend.info.context_length):
        prefill(engine.backend, seq, seq.num_prompt_tokens - 1)


def step_by_hand(backend: Backend, work: Work, sampler: Sampler | None) -> None:
    """Run the batches that the engine would make, without the engine.

    Without a sampler, every token is 1.
    """
    seqs = make_sequences(work.requests(), backend.info.context_length)
    for _ in range(work.size.num_tokens):
        batch = Batch([Row(seq, seq.num_tokens - 1, 1, 1) for seq in seqs], [])
        logits = backend.forward(batch)
        tokens = sampler.sample(batch, logits) if sampler else [1] * len(seqs)
        for seq, token in zip(seqs, tokens, strict=True):
            seq.append(token)
    # empty, as the engine left them
    backend.forward(Batch([], [Trim(seq_id, 0) for seq_id in range(len(seqs))]))


def step_engine(engine: Engine, work: Work) -> None:
    for request in work.requests():
        engine.handle(Add(request))
    while engine.scheduler.sequences.has_work():
        engine.step()


async def read_streams(pool: Pool, work: Work) -> None:
    async def read(request: Request) -> None:
        stream = pool.submit([request])
        ended = False
        while not ended:
            await stream.arrival()
            ended = any(output.finish for output in stream.take())
        pool.close_stream(stream)

    await asyncio.gather(*map(read, work.requests()))


async def read_answers(service: Service, work: Work) -> None:
    async def read(request: Request) -> None:
        with service.submit(
            Generation(request.request_id, [request.prompt], work.params)
        ) as answer:
            async for _ in answer:
                pass

    await asyncio.gather(*map(read, work.requests()))


async def post_all(target: Endpoint, work: Work) -> None:
    with closing(open_connections(target)) as server:

        async def post(task: Task) -> None:
            body = msgspec.json.decode(task.body) | {"stream": False}
            del body["stream_options"]
            response = await server.request(target.dialect.chat_path, msgspec.json.encode(body))
            if response.status != 200:
                raise StartupError(
                    f"a request failed: HTTP {response.status}: {printable(response.body.decode())}"
                )
            assert (
                msgspec.json.decode(response.body)["usage"]["completion_tokens"]
                == work.size.num_tokens
            )

        async with asyncio.timeout(target.timeout):
            await asyncio.gather(*map(post, work.tasks))
