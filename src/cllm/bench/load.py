"""A load client for servers that speak OpenAI's chat completions or Ollama's own chat, streamed.

Closed loop: a fixed number of requests at a time, each end lets the next one start. Open loop: requests are sent at
given times, whatever has become of the earlier ones.

It knows the server by HTTP alone, and the API by its ``Dialect``. On small machines it shares the cores with the
server, so reading a chunk must cost little.

Times are seconds of ``time.perf_counter``, taken when bytes are read: events that came in one packet have one time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from email.utils import parsedate
from typing import Any, NoReturn, TypeVar

import msgspec

from cllm.bench.connection import BrokenHTTP, CannotConnect, Connections
from cllm.bench.dialects import DIALECTS, Api, Dialect, Event, Usage
from cllm.bench.workload import Task
from cllm.errors import StartupError

T = TypeVar("T")

Progress = Callable[[int], None]
"""Called with the number of requests that have ended, warm-up included."""

REFUSALS = {429, 503}
FINISH_REASONS = {"stop", "length"}
FIRST_TIMEOUT = 30.0  # seconds, for the list of models
DETAIL = 200  # characters that are kept of what a server says


class Target(msgspec.Struct, frozen=True):
    """The server. ``url`` is without the API's path; ``timeout`` in seconds for each request, from sending to the last
    byte. Without ``keep_alive`` each request has a connection of its own.
    """

    url: str
    api_key: str | None = None
    timeout: float = 600.0
    keep_alive: bool = True
    api: Api = "openai"

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.api]


class Answer:
    """What came for one task, read as it comes."""

    def __init__(self, task: Task, sent: float, dialect: Dialect = DIALECTS["openai"]) -> None:
        self.task = task
        self.dialect = dialect
        self.sent = self.ended = sent
        self.content_times: list[float] = []
        """One for each chunk that holds text."""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.cancelled = False
        """The client went away, as the task wanted."""
        self.refused = False
        """The server had too much to do, and said so (429 or 503): a failure too, unless the task allows it."""
        self.failure = ""
        """Why this is no success, in a few words that are the same for all such; empty for a success."""
        self.detail = ""
        self._rest = b""
        self._content: list[bytes] = []

    def feed(self, data: bytes, now: float) -> bool:
        """Take the bytes that were read at ``now``, cut anywhere. True if the task wants to go away now."""
        self.ended = now
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self.dialect.content.search(line):
                self.content_times.append(now)
                if self.task.answer is not None or self.task.follow is not None:
                    self._content.append(line)
            if self.dialect.last.search(line):
                self._feed_last(line)
        if self.task.cancel_after is not None and len(self.content_times) >= self.task.cancel_after:
            self.cancelled = True
        return self.cancelled

    def _feed_last(self, line: bytes) -> None:
        event = self._decode(line)
        if event.error is not None:
            self.fail("error in the stream", event.error)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.usage = event.usage or self.usage

    def _decode(self, line: bytes) -> Event:
        try:
            return self.dialect.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail("broken event", f"{error}: {line!r}")
            return Event()

    def fail(self, reason: str, detail: object = "") -> None:
        """The first failure counts."""
        if not self.failure:
            self.failure, self.detail = reason, printable(detail)

    def judge(self) -> None:
        """Compare what came with what the task wants."""
        tokens, wanted = self.output_tokens, self.task.num_tokens
        if self.cancelled or self.refused:
            return
        if self.finish_reason is None:
            self.fail("no finish_reason")
        elif self.finish_reason not in FINISH_REASONS:
            self.fail("invalid finish_reason", self.finish_reason)
        elif self.usage is None:
            self.fail("no usage")
        elif tokens == 0:
            self.fail("0 tokens")
        elif wanted is not None and tokens != wanted and not self.stopped_early:
            self.fail("wrong number of tokens", f"{tokens} instead of {wanted}")
        elif self.task.answer is not None and self.text() != self.task.answer:
            self.fail("wrong answer", f"{self.text()!r} instead of {self.task.answer!r}")

    def text(self) -> str:
        """The whole answer; it is kept only for tasks whose text matters."""
        return "".join(self._decode(line).text for line in self._content)

    @property
    def succeeded(self) -> bool:
        return not (self.failure or self.cancelled or self.refused)

    @property
    def stopped_early(self) -> bool:
        """The text had an end before the tokens that were wanted, and the server could not be told to ignore it."""
        wanted = self.task.num_tokens
        return (
            not self.dialect.exact_lengths
            and wanted is not None
            and self.output_tokens < wanted
            and self.finish_reason == "stop"
        )

    @property
    def output_tokens(self) -> int:
        return self.usage.output if self.usage else 0

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt if self.usage else 0

    @property
    def cached_tokens(self) -> int:
        return self.usage.cached if self.usage else 0

    @property
    def first(self) -> float:
        """When the first text came; a token without text is not seen before the end."""
        return self.content_times[0] if self.content_times else self.ended


class Outcome(msgspec.Struct, frozen=True):
    """A measured run: ``wall`` from the first request sent to the last byte, ``cpu`` of this process in that time."""

    answers: list[Answer]
    wall: float
    cpu: float


def find_model(target: Target, wanted: str | None = None) -> str:
    """The model to ask for: ``wanted``, or else the first that the server names.

    Raises StartupError if the server cannot be reached or, without ``wanted``, names none.
    """
    return _run(_find_model(target, wanted))


def run_load(
    target: Target,
    tasks: Sequence[Task],
    *,
    concurrency: int,
    warmup: int,
    progress: Progress,
    arrivals: Sequence[float] | None = None,
) -> Outcome:
    """Send all tasks, ``concurrency`` at a time, each as soon as an earlier one has ended.

    The first ``warmup`` of them are sent before the clock starts and appear nowhere in the outcome. Connections are
    kept, and those that warm-up has opened are used. With ``arrivals``, in seconds, the others are sent at these times
    and ``concurrency`` is that of the warm-up. A failure is an answer, never an exception.
    """
    return _run(_run_load(target, tasks, concurrency, warmup, progress, arrivals))


async def _run_load(
    target: Target,
    tasks: Sequence[Task],
    concurrency: int,
    warmup: int,
    progress: Progress,
    arrivals: Sequence[float] | None,
) -> Outcome:
    num_ended = 0

    def ended() -> None:
        nonlocal num_ended
        num_ended += 1
        progress(num_ended)

    with closing(connections(target)) as server:
        client = Client(server, target)
        await client.closed_loop(tasks[:warmup], concurrency, ended)
        wall, cpu = time.perf_counter(), time.process_time()
        if arrivals is None:
            answers = await client.closed_loop(tasks[warmup:], concurrency, ended)
        else:
            answers = await client.open_loop(tasks[warmup:], arrivals, ended)
        cpu = time.process_time() - cpu
    wall = max((answer.ended for answer in answers), default=wall) - wall
    return Outcome(answers, wall, cpu)


class Client:
    """Sends tasks to one server."""

    def __init__(self, server: Connections, target: Target) -> None:
        self._server = server
        self._dialect = target.dialect
        self._timeout = target.timeout

    async def closed_loop(self, tasks: Sequence[Task], concurrency: int, ended: Callable[[], None]) -> list[Answer]:
        """The answers in the order in which they ended."""
        waiting = iter(tasks)
        answers: list[Answer] = []

        async def take_turns() -> None:
            for task in waiting:
                await self._talk(task, answers, ended)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(tasks))):
                group.create_task(take_turns())
        return answers

    async def open_loop(
        self, tasks: Sequence[Task], arrivals: Sequence[float], ended: Callable[[], None]
    ) -> list[Answer]:
        """The same, each task at its time."""
        answers: list[Answer] = []
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for task, at in zip(tasks, arrivals, strict=True):
                await asyncio.sleep(begun + at - time.perf_counter())
                group.create_task(self._talk(task, answers, ended))
        return answers

    async def _talk(self, task: Task, answers: list[Answer], ended: Callable[[], None]) -> None:
        """``task`` and what follows it; after a failure nothing does."""
        following: Task | None = task
        while following is not None:
            answer = await self.ask(following)
            answers.append(answer)
            ended()
            following = following.follow(answer.text()) if following.follow and not answer.failure else None

    async def ask(self, task: Task) -> Answer:
        answer = Answer(task, time.perf_counter(), self._dialect)
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
        if answer.failure or answer.refused:
            answer.ended = time.perf_counter()
        answer.judge()
        return answer

    async def _read(self, answer: Answer) -> None:
        response = await self._server.request(self._dialect.chat_path, answer.task.body, answer.feed)
        if response.status == 200:
            return
        answer.refused = response.status in REFUSALS
        if not (answer.refused and answer.task.may_be_refused):
            answer.fail(f"HTTP {response.status}", response.body.decode(errors="replace"))
        elif not says_when(retry_after := response.headers.get(b"retry-after", b"").decode(errors="replace")):
            answer.fail(f"HTTP {response.status} without Retry-After", retry_after)


def says_when(retry_after: str) -> bool:
    """Whether it is a value of that header: seconds, or a date (RFC 9110, 10.2.3)."""
    return retry_after.isdecimal() or parsedate(retry_after) is not None


async def _find_model(target: Target, wanted: str | None) -> str:
    path = target.dialect.models_path
    try:
        with closing(connections(target)) as server:
            async with asyncio.timeout(FIRST_TIMEOUT):
                response = await server.request(path)
    except BrokenHTTP as error:
        _refuse(target, f"broken HTTP: {error}")
    except OSError as error:
        _refuse(target, str(error) or type(error).__name__)
    if wanted is not None:
        return wanted
    if response.status != 200:
        _refuse(target, f"{path} answered {response.status}: {response.body[:DETAIL].decode(errors='replace')}")
    try:
        return target.dialect.decode_models(response.body)[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        _refuse(target, f"{path} names no model; name it with --model")


def _refuse(target: Target, reason: str) -> NoReturn:
    raise StartupError(f"{printable(target.url)} cannot be measured: {printable(reason)}")


def connections(target: Target) -> Connections:
    """To be closed. Raises StartupError if the target's URL is none of HTTP."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        return Connections(target.url, headers, keep_alive=target.keep_alive)
    except ValueError as error:
        _refuse(target, str(error))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work`` in an event loop of its own: uvloop where there is one."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def printable(text: object) -> str:
    """Foreign text for one line of a terminal, shortened."""
    line = " ".join(str(text)[: 2 * DETAIL].split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."
