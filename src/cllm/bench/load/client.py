"""A load client for servers with OpenAI's chat completions or Ollama's own chat, streamed.

Closed loop: a fixed number of requests at a time; each finished request starts the next one. Open
loop: requests are sent at given times, even if earlier ones have not finished.

The client knows the server only through HTTP, and the API only through its ``ClientDialect``. On
small machines it shares the cores with the server, so reading a chunk must cost little.

Times are seconds of ``time.perf_counter``, taken when bytes are read. Events that arrive in one
packet have the same time.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing
from email.utils import parsedate
from typing import Any, NoReturn, TypeVar

import msgspec

from cllm.bench.load.answer import DETAIL, TimedAnswer, printable
from cllm.bench.load.dialects import DIALECTS, Api, ClientDialect
from cllm.bench.load.workload import Group, RequestSpec, Stage, Task, word_tasks
from cllm.errors import StartupError
from cllm.http_connection import BrokenHTTP, CannotConnect, HTTPClient
from cllm.observe.cpu_time import read_tree_cpu_seconds

T = TypeVar("T")

Progress = Callable[[int], None]
"""Called with the number of requests that have ended, warm-up included."""
Watch = Callable[["Answers"], None]
"""Called every LOOK seconds and at the end with the answers so far, without the warm-up's."""

NOTHING = Group(tasks=[], clients=1)
REFUSALS = {429, 503}
FIRST_TIMEOUT = 30.0  # seconds, for the list of models
POLL, WATCH = 0.02, 1.0  # seconds between looks at the stage, and at the server's progress
LOOK = 0.5  # seconds between two calls of a Watch


class Endpoint(msgspec.Struct, frozen=True):
    """The server to measure.

    ``url`` excludes the API's path. ``timeout`` is the limit in seconds for each request, from
    sending to the last byte. Without ``keep_alive``, each request opens a new connection. ``pid``
    is the server's first process, if it runs on this machine and its CPU time is to be measured;
    otherwise 0. The server may have only the TLS ``certificate`` in that file, if it names one.
    """

    url: str
    api_key: str | None = None
    timeout: float = 3600.0
    keep_alive: bool = True
    api: Api = "openai"
    pid: int = 0
    certificate: str | None = None

    @property
    def dialect(self) -> ClientDialect:
        return DIALECTS[self.api]


class RunningSequence(msgspec.Struct):
    """The part of a sequence in cLLM's /scheduler that the client uses."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int


class RunningSequences(msgspec.Struct):
    """The part of cLLM's /scheduler that the client uses."""

    running: list[RunningSequence]


class Outcome(msgspec.Struct, frozen=True):
    """A measured run.

    ``wall`` is the number of seconds from the first request sent to the last byte. ``cpu`` and
    ``server_cpu`` are the CPU seconds that this process and the server's processes used in that
    time; ``server_cpu`` is None if the processes are unknown. ``computed_tokens`` has a
    pair for each change that was seen: the time, and the computed tokens of the longest request.
    """

    answers: list[TimedAnswer]
    wall: float
    cpu: float
    server_cpu: float | None = None
    computed_tokens: list[tuple[float, int]] = []


def find_model(target: Endpoint, wanted: str | None = None) -> str:
    """Return the model to request: ``wanted``, or the first one that the server lists.

    Raises StartupError if the server cannot be reached or, without ``wanted``, lists none.
    """
    return _run(_find_model(target, wanted))


def measure_tokens_per_word(target: Endpoint, spec: RequestSpec) -> float:
    """Return the average number of tokens in a word of a prompt, for the server's model.

    Raises StartupError if a request fails or the server does not count prompt tokens.
    """
    counts = (20, 120)
    probe = msgspec.structs.replace(spec, max_tokens=1, shared_words=0, seed=spec.seed + 2)
    tasks = [
        word_tasks(1, msgspec.structs.replace(probe, prompt_words=count))[0] for count in counts
    ]
    outcome = run_stages(target, [[Group(tasks=tasks, clients=1)]])
    for answer in outcome.answers:
        if answer.failure:
            _refuse(target, f"{answer.failure}: {answer.detail}")
    few, many = (answer.prompt_tokens for answer in outcome.answers)
    if few >= many:
        _refuse(target, "it does not count the tokens of prompts")
    return (many - few) / (counts[1] - counts[0])


def run_stages(
    target: Endpoint,
    stages: Sequence[Stage],
    *,
    warmup: Group = NOTHING,
    progress: Progress = lambda _: None,
    watch: Watch | None = None,
    seconds: float = math.inf,
) -> Outcome:
    """Run the stages one after the other, after the warm-up, which is not part of the outcome. They
    reuse the connections of the warm-up. ``seconds`` after the warm-up, no further request begins.

    A failure is an answer, never an exception.
    """
    return _run(_run_stages(target, stages, warmup, progress, watch, seconds))


async def _run_stages(
    target: Endpoint,
    stages: Sequence[Stage],
    warmup: Group,
    progress: Progress,
    watch: Watch | None,
    seconds: float,
) -> Outcome:
    with closing(open_connections(target)) as server:
        client = Client(server, target, progress)
        await client.run_stage([warmup])
        client.seen = Answers()
        watching = asyncio.ensure_future(client.tell(watch)) if watch else None
        wall, cpu, server_cpu = time.perf_counter(), time.process_time(), server_seconds(target)
        client.ends_at = wall + seconds
        for stage in stages:
            if not client.is_over:
                await client.run_stage(stage)
        cpu, server_cpu = time.process_time() - cpu, server_seconds(target) - server_cpu
        if watch and watching:
            watching.cancel()
            watch(client.seen)
    answers = client.seen.ended
    wall = max((answer.ended for answer in answers), default=wall) - wall
    return Outcome(answers, wall, cpu, server_cpu if target.pid else None, client.computed_tokens)


def server_seconds(target: Endpoint) -> float:
    return read_tree_cpu_seconds(target.pid) if target.pid else 0.0


class Answers:
    """The answers of a stage, or of all: those to all requests that were ``sent``, and those that
    have ``ended``.
    """

    def __init__(self) -> None:
        self.sent: list[TimedAnswer] = []
        self.ended: list[TimedAnswer] = []
        self.num_groups = 0  # groups that are sending requests

    @property
    def num_chunks(self) -> int:
        return sum(len(answer.content_times) for answer in self.sent)


class Client:
    """Sends tasks to one server, until ``ends_at``. Outcome explains ``computed_tokens``. ``seen``
    has all answers.
    """

    def __init__(
        self, server: HTTPClient, target: Endpoint, report: Progress = lambda _: None
    ) -> None:
        self.computed_tokens: list[tuple[float, int]] = []
        self.seen = Answers()
        self.ends_at = math.inf
        self._server = server
        self._dialect = target.dialect
        self._timeout = target.timeout
        self._report = report
        self._num_ended = 0

    @property
    def is_over(self) -> bool:
        """Whether no further request may begin."""
        return time.perf_counter() >= self.ends_at

    async def tell(self, watch: Watch) -> None:
        """Call ``watch`` again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            watch(self.seen)

    async def run_stage(self, stage: Stage) -> None:
        """Run the groups of a stage."""
        running = Answers()
        async with asyncio.TaskGroup() as groups:
            background = [
                groups.create_task(self._run_group(group, running))
                for group in stage
                if group.background
            ]
            async with asyncio.TaskGroup() as others:
                for group in stage:
                    if not group.background:
                        others.create_task(self._run_group(group, running))
            wanted = running.num_chunks + max((group.tail for group in stage), default=0)
            await wait_for_chunks(running, wanted)
            for task in background:
                task.cancel()

    async def _run_group(self, group: Group, running: Answers) -> None:
        await wait_for_chunks(running, group.start_after)
        running.num_groups += 1
        watcher = asyncio.ensure_future(self._watch()) if group.watched else None
        try:
            if group.arrivals is None:
                await self._closed_loop(group, running)
            else:
                await self._open_loop(group.tasks, group.arrivals, running)
        finally:
            running.num_groups -= 1
            if watcher is not None:
                watcher.cancel()

    async def _closed_loop(self, group: Group, running: Answers) -> None:
        waiting = iter(group.tasks)

        async def take_turns() -> None:
            for task in waiting:
                if self.is_over:
                    return
                # otherwise, an endless group would never stop if the server fails
                if not await self._talk(task, running) and group.background:
                    return

        async with asyncio.TaskGroup() as clients:
            for _ in range(group.clients):
                clients.create_task(take_turns())

    async def _open_loop(
        self, tasks: Iterable[Task], arrivals: Sequence[float], running: Answers
    ) -> None:
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for task, at in zip(tasks, arrivals, strict=True):
                if begun + at >= self.ends_at:
                    return
                await asyncio.sleep(begun + at - time.perf_counter())
                clients.create_task(self._talk(task, running))

    async def _watch(self) -> None:
        """Record the computed tokens of the server's longest request, until cancelled."""
        most = -1
        while True:
            computed = await count_computed_tokens(self._server)
            if computed > most:
                most = computed
                self.computed_tokens.append((time.perf_counter(), computed))
            await asyncio.sleep(WATCH)

    async def _talk(self, task: Task, running: Answers) -> bool:
        """Send ``task`` and the tasks that follow it, until one fails. Return whether none has."""
        following: Task | None = task
        while following is not None:
            answer = TimedAnswer(following, time.perf_counter(), self._dialect)
            for answers in (running, self.seen):
                answers.sent.append(answer)
            try:
                await self.read(answer)
            finally:
                for answers in (running, self.seen):
                    answers.ended.append(answer)
                self._num_ended += 1
                self._report(self._num_ended)
            if answer.failure:
                return False
            if self.is_over:
                return True
            following = following.follow(answer.text()) if following.follow else None
        return True

    async def read(self, answer: TimedAnswer) -> None:
        """Send the answer's task and read the answer. If cancelled, the client disconnects."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(answer)
        except TimeoutError as error:
            answer.fail("timeout", error)
        except CannotConnect as error:
            answer.fail("cannot connect", error)
        except BrokenHTTP as error:
            answer.fail("broken HTTP", error)
        except OSError as error:
            answer.fail("connection lost", error)
        except asyncio.CancelledError:
            answer.cancelled = True
            raise
        finally:
            if answer.failure or answer.refused or answer.cancelled:
                answer.ended = time.perf_counter()
            answer.judge()

    async def _read(self, answer: TimedAnswer) -> None:
        response = await self._server.request(
            self._dialect.chat_path, answer.task.body, answer.feed
        )
        if response.status == 200:
            return
        answer.refused = response.status in REFUSALS
        if not (answer.refused and answer.task.may_be_refused):
            answer.fail(f"HTTP {response.status}", response.body.decode(errors="replace"))
        elif not is_retry_after(
            retry_after := response.headers.get(b"retry-after", b"").decode(errors="replace")
        ):
            answer.fail(f"HTTP {response.status} without Retry-After", retry_after)


async def wait_for_chunks(running: Answers, num_chunks: int) -> None:
    """Wait until a stage has received ``num_chunks`` chunks, or none of its groups is running."""
    # an event would cost time at every chunk
    while running.num_chunks < num_chunks and running.num_groups:  # noqa: ASYNC110
        await asyncio.sleep(POLL)


async def count_computed_tokens(server: HTTPClient) -> int:
    """Return how many tokens of its longest running sequence cLLM has computed; -1 if unknown."""
    try:
        response = await server.request("/scheduler?steps=1")
        running = msgspec.json.decode(response.body, type=RunningSequences).running
    except (OSError, msgspec.DecodeError):
        return -1
    counts = [
        (seq.num_prompt_tokens + seq.num_output_tokens, seq.num_computed_tokens) for seq in running
    ]
    return max(counts, default=(0, -1))[1]


def is_retry_after(retry_after: str) -> bool:
    """Return whether the value is valid for the header Retry-After: seconds, or a date (RFC 9110,
    10.2.3).
    """
    return retry_after.isdecimal() or parsedate(retry_after) is not None


async def _find_model(target: Endpoint, wanted: str | None) -> str:
    path = target.dialect.models_path
    try:
        with closing(open_connections(target)) as server:
            async with asyncio.timeout(FIRST_TIMEOUT):
                response = await server.request(path)
    except BrokenHTTP as error:
        _refuse(target, f"broken HTTP: {error}")
    except OSError as error:
        _refuse(target, str(error) or type(error).__name__)
    if wanted is not None:
        return wanted
    if response.status != 200:
        _refuse(
            target,
            f"{path} answered {response.status}: {response.body[:DETAIL].decode(errors='replace')}",
        )
    try:
        return target.dialect.decode_models(response.body)[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        _refuse(target, f"{path} names no model; name it with --model")


def _refuse(target: Endpoint, reason: str) -> NoReturn:
    raise StartupError(f"{printable(target.url)} cannot be measured: {printable(reason)}")


def open_connections(target: Endpoint) -> HTTPClient:
    """Return connections, which the caller closes.

    Raises StartupError if the target's URL is not an HTTP URL.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        tls = trust_only(target.certificate) if target.certificate else None
        return HTTPClient(target.url, headers, keep_alive=target.keep_alive, tls=tls)
    except ValueError as error:
        _refuse(target, str(error))


def trust_only(certificate: str) -> ssl.SSLContext:
    """Return a context for connections to the server that has a certificate, by any name."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be that of an authority
    return context


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in an event loop of its own, uvloop if installed, and return its result."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
