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
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cllm.answer import Generation
from cllm.backends.base import Backend, Vocabulary
from cllm.bench.console import number_table
from cllm.bench.dialects import DIALECTS, Api
from cllm.bench.load import Target, connections, printable
from cllm.bench.servers import MODEL, cllm, load
from cllm.bench.workload import SYLLABLES, Task
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_backend, build_engine, build_vocabulary
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.observe.metrics import Metrics
from cllm.process.client import EngineClient
from cllm.process.messages import Stepped, frame
from cllm.sampling.pipeline import Sampler
from cllm.service import Service
from cllm.text.chat_template import ChatTemplate

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
PARTS = ("schedule", "build", "decode", "sample", "advance", "send")
# servers' own defaults differ
SENT = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos")
PAUSE = 0.3  # seconds between two runs, until spinning threads go to sleep

Progress = Callable[[float, str], None]


class Size(msgspec.Struct, frozen=True):
    """The work of each stage.

    ``temperature`` 0 is greedy; other temperatures use top-k 40 and top-p 0.95.
    """

    num_seqs: int
    prompt_words: int
    num_tokens: int
    temperature: float
    seed: int


class StageResult(msgspec.Struct, frozen=True):
    """The speed of one stage. tokens_per_s: one value for each round."""

    stage: str
    tokens_per_s: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.tokens_per_s)


class SizeResult(msgspec.Struct, frozen=True):
    """All stages of one size.

    step_us: microseconds of a decoding step of the engine in this process, by part.
    """

    num_seqs: int
    stages: list[StageResult]
    step_us: dict[str, float]


class Work:
    """The prompts of one size: as messages, as request bodies and as token ids."""

    def __init__(self, size: Size, vocabulary: Vocabulary, number: int = 0) -> None:
        """Works with different numbers share no prompt."""
        self.size = size
        self.number = number
        self._vocabulary = vocabulary
        self.params = SamplingParams(
            temperature=size.temperature,
            top_k=40,
            top_p=0.95,
            max_tokens=size.num_tokens,
            ignore_eos=True,
        )
        words = random.Random(f"{size.seed} {number}")
        texts = [
            "".join(words.choices(SYLLABLES, k=3)) for _ in range(size.num_seqs * size.prompt_words)
        ]
        starts = range(0, len(texts), size.prompt_words)
        prompts = [" ".join(texts[start : start + size.prompt_words]) for start in starts]
        self.talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        template = ChatTemplate(vocabulary)
        self.prompts = [template.encode(talk, []) for talk in self.talks]
        self.tasks = self.tasks_in("openai")

    def tasks_in(self, api: Api) -> list[Task]:
        body, options = DIALECTS[api].body, {name: getattr(self.params, name) for name in SENT}
        return [Task(body(MODEL, talk, options), self.size.num_tokens) for talk in self.talks]

    def before(self) -> Work:
        """Return the same prompts with one output token each.

        Running it computes the prompts into the cells.
        """
        return Work(msgspec.structs.replace(self.size, num_tokens=1), self._vocabulary, self.number)

    @property
    def context(self) -> int:
        """A context length that suffices for this work and for works of the same size with other
        words.
        """
        return int(1.2 * max(map(len, self.prompts))) + self.size.num_tokens + 32

    @property
    def num_tokens(self) -> int:
        return self.size.num_seqs * self.size.num_tokens

    def requests(self) -> list[Request]:
        return [
            Request(f"{time.monotonic_ns()}-{i}", prompt, self.params)
            for i, prompt in enumerate(self.prompts)
        ]


def run_stages(path: Path, sizes: list[Size], rounds: int, progress: Progress) -> list[SizeResult]:
    """Measure all stages of each size, in turn, ``rounds`` times.

    Raises StartupError if the model cannot be loaded.
    """
    vocabulary = build_vocabulary(EngineParams(path=str(path)))
    results = []
    for i, size in enumerate(sizes):

        def told(share: float, i: int = i, size: Size = size) -> None:
            progress((i + share) / len(sizes), sequences(size.num_seqs))

        results.append(run_size(path, size, vocabulary, rounds, told))
    return results


def run_size(
    path: Path, size: Size, vocabulary: Vocabulary, rounds: int, progress: Callable[[float], None]
) -> SizeResult:
    found: dict[str, list[float]] = {stage: [] for stage in STAGES}
    with ExitStack() as stack:
        stages, engine = open_stages(path, Work(size, vocabulary), vocabulary, stack)
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
                    found[stage].append(round(work.num_tokens / (time.perf_counter() - begun), 2))
                progress(count / (rounds + 1) / len(STAGES))
        parts = step_parts(engine, Work(size, vocabulary, count + 1))
    return SizeResult(
        size.num_seqs, [StageResult(stage, speeds) for stage, speeds in found.items()], parts
    )


def open_stages(
    path: Path, work: Work, vocabulary: Vocabulary, stack: ExitStack
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
    client = runner.run(started(params))
    stack.callback(lambda: runner.run(client.close()))
    service = Service(client, vocabulary, Metrics(MODEL), MODEL)
    flags = ("--max-num-seqs", num_seqs, "--context", work.context, "--kv.layout", "partitioned")
    target = stack.enter_context(cllm(path, *flags, "--scheduler.speculation", "off"))
    return {
        "backend": lambda work: step_by_hand(backend, work, None),
        "+ sampling": lambda work: step_by_hand(backend, work, Sampler()),
        "+ scheduler": lambda work: step_engine(engine, work),
        "+ process": lambda work: runner.run(read_streams(client, work)),
        "+ service": lambda work: runner.run(read_answers(service, work)),
        "+ HTTP, in one piece": lambda work: runner.run(post_all(target, work)),
        "+ HTTP, streamed": lambda work: load(target, work.tasks, num_seqs),
    }, engine


async def started(params: EngineParams) -> EngineClient:
    client = EngineClient(params)
    await client.start()
    return client


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
            f"a decoding step in microseconds: {parts}; {host:,.0f} beside the decode",
            highlight=False,
        )


def sequences(count: int) -> str:
    return "1 sequence" if count == 1 else f"{count} sequences"


# --- the stages ---------------------------------------------------------------------------------


def sequences_of(backend: Backend, work: Work) -> list[Sequence]:
    """Return the work's sequences as the engine would make them. The seq_id is the index."""
    seqs = [
        Sequence(request, 0, i, backend.info.context_length)
        for i, request in enumerate(work.requests())
    ]
    for seq_id, seq in enumerate(seqs):
        seq.seq_id = seq_id
    return seqs


def prefill_by_hand(engine: Engine, work: Work) -> None:
    """Empty the engine's cells, and compute all tokens of each prompt except the last one into
    them.
    """
    forget(engine)
    space = engine.backend.info.max_num_batched_tokens
    for seq in sequences_of(engine.backend, work):
        for start in range(0, seq.num_prompt_tokens - 1, space):
            engine.backend.forward(
                Batch([Row(seq, start, min(space, seq.num_prompt_tokens - 1 - start), 0)], [])
            )


def forget(engine: Engine) -> None:
    """Empty all cells."""
    engine.backend.forward(Batch([], engine.scheduler.empty_cells()))


def step_by_hand(backend: Backend, work: Work, sampler: Sampler | None) -> None:
    """Run the batches that the engine would make, without the engine.

    Without a sampler, every token is 1.
    """
    seqs = sequences_of(backend, work)
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
    while engine.scheduler.has_work():
        engine.step()


async def read_streams(client: EngineClient, work: Work) -> None:
    async def read(request: Request) -> None:
        stream = client.submit([request])
        ended = False
        while not ended:
            await stream.arrival()
            ended = any(output.finish for output in stream.take())
        client.close_stream(stream)

    await asyncio.gather(*map(read, work.requests()))


async def read_answers(service: Service, work: Work) -> None:
    async def read(request: Request) -> None:
        with service.submit(
            Generation(request.request_id, [request.prompt], work.params)
        ) as answer:
            async for _ in answer:
                pass

    await asyncio.gather(*map(read, work.requests()))


async def post_all(target: Target, work: Work) -> None:
    with closing(connections(target)) as server:

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


# --- the parts of a step ------------------------------------------------------------------------


class Stopwatch:
    """Seconds spent in the timed functions, by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timing(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Add the time of all calls of ``owner.name`` to ``part`` until the context ends."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - begun

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, function)


def step_parts(engine: Engine, work: Work) -> dict[str, float]:
    """Return the microseconds of a decoding step by part: the mean over the steps of one run in
    which all decode.

    "decode" is the backend's forward without the filling of its arrays. "send" is what the engine
    process does in addition: it encodes the message about the step and writes it, here to the null
    device.
    """
    watch = Stopwatch()
    for request in work.requests():
        engine.handle(Add(request))
    while (
        any(seq.num_lacking_tokens > 1 for seq in engine.scheduler.running)
        or engine.scheduler.waiting
    ):
        engine.step()
    num_steps = 0
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "wb", buffering=0))  # noqa: PTH123
        stack.enter_context(watch.timing(engine.scheduler, "schedule", "schedule"))
        stack.enter_context(watch.timing(engine.backend, "forward", "decode"))
        if hasattr(engine.backend, "_fill"):
            stack.enter_context(watch.timing(engine.backend, "_fill", "build"))
        stack.enter_context(watch.timing(engine.sampler, "sample", "sample"))
        stack.enter_context(watch.timing(engine.scheduler, "update", "advance"))
        while len(engine.scheduler.running) == work.size.num_seqs:
            outputs = engine.step()
            begun = time.perf_counter()
            nowhere.write(frame(Stepped(outputs, engine.scheduler.stats())))
            watch.seconds["send"] += time.perf_counter() - begun
            num_steps += 1
    while engine.scheduler.has_work():
        engine.step()
    watch.seconds["decode"] -= watch.seconds["build"]
    return {
        part: round(seconds / max(1, num_steps) * 1e6, 1) for part, seconds in watch.seconds.items()
    }
