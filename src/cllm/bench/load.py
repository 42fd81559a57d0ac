"""A load client for servers with OpenAI's chat completions or Ollama's own chat, streamed.

Closed loop: a fixed number of requests at a time; each finished request starts the next one. Open
loop: requests are sent at given times, even if earlier ones have not finished.

The client knows the server only through HTTP, and the API only through its ``Dialect``. On small
machines it shares the cores with the server, so reading a chunk must cost little.

Times are seconds of ``time.perf_counter``, taken when bytes are read. Events that arrive in one
packet have the same time.
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
DETAIL = 200  # characters kept of a server's message


class Target(msgspec.Struct, frozen=True):
    """The server to measure. ``url`` excludes the API's path. ``timeout``: seconds for each
    request, from sending to the last byte. Without ``keep_alive``, each request has a connection of
    its own.
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
    """The answer to one task, parsed as it arrives."""

    def __init__(self, task: Task, sent: float, dialect: Dialect = DIALECTS["openai"]) -> None:
        self.task = task
        self.dialect = dialect
        self.sent = self.ended = sent
        self.content_times: list[float] = []
        """The arrival time of each chunk that contains text."""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.cancelled = False
        """The client disconnected, as the task required."""
        self.refused = False
        """The server rejected the request because of overload (429 or 503). A failure unless
        the task allows it.
        """
        self.failure = ""
        """Why the request did not succeed, in a few words that all failures of the kind share.
        Empty for a success.
        """
        self.detail = ""
        self._rest = b""
        self._content: list[bytes] = []

    def feed(self, data: bytes, now: float) -> bool:
        """Process bytes that were read at ``now``, cut anywhere.

        Return True if the client must disconnect now.
        """
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
        """Record a failure. Only the first one counts."""
        if not self.failure:
            self.failure, self.detail = reason, printable(detail)

    def judge(self) -> None:
        """Record a failure if the answer is not what the task requires."""
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
        """Return the whole text. It is kept only for tasks whose text matters."""
        return "".join(self._decode(line).text for line in self._content)

    @property
    def succeeded(self) -> bool:
        return not (self.failure or self.cancelled or self.refused)

    @property
    def stopped_early(self) -> bool:
        """Whether the model ended the text before the requested length, at a server that cannot
        ignore end tokens.
        """
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
        """The arrival time of the first text. A token without text is noticed only at the end."""
        return self.content_times[0] if self.content_times else self.ended


class Outcome(msgspec.Struct, frozen=True):
    """A measured run. ``wall``: seconds from the first request sent to the last byte. ``cpu``: CPU
    seconds of this process in that time.
    """

    answers: list[Answer]
    wall: float
    cpu: float


def find_model(target: Target, wanted: str | None = None) -> str:
    """Return the model to request: ``wanted``, or the first one that the server lists.

    Raises StartupError if the server cannot be reached or, without ``wanted``, lists none.
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

    The first ``warmup`` tasks are sent before the clock starts and are not part of the outcome. The
    measured tasks reuse the connections of the warm-up. With ``arrivals``, in seconds, they are
    sent at these times, and ``concurrency`` applies to the warm-up only. A failure is an answer,
    never an exception.
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

    async def closed_loop(
        self, tasks: Sequence[Task], concurrency: int, ended: Callable[[], None]
    ) -> list[Answer]:
        """Send ``tasks``, ``concurrency`` at a time.

        Return the answers in the order in which they ended.
        """
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
        """Send each task at its time. Return the answers in the order in which they ended."""
        answers: list[Answer] = []
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for task, at in zip(tasks, arrivals, strict=True):
                await asyncio.sleep(begun + at - time.perf_counter())
                group.create_task(self._talk(task, answers, ended))
        return answers

    async def _talk(self, task: Task, answers: list[Answer], ended: Callable[[], None]) -> None:
        """Send ``task`` and the tasks that follow it, until one fails."""
        following: Task | None = task
        while following is not None:
            answer = await self.ask(following)
            answers.append(answer)
            ended()
            following = (
                following.follow(answer.text()) if following.follow and not answer.failure else None
            )

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
        response = await self._server.request(
            self._dialect.chat_path, answer.task.body, answer.feed
        )
        if response.status == 200:
            return
        answer.refused = response.status in REFUSALS
        if not (answer.refused and answer.task.may_be_refused):
            answer.fail(f"HTTP {response.status}", response.body.decode(errors="replace"))
        elif not says_when(
            retry_after := response.headers.get(b"retry-after", b"").decode(errors="replace")
        ):
            answer.fail(f"HTTP {response.status} without Retry-After", retry_after)


def says_when(retry_after: str) -> bool:
    """Return whether the value is valid for the header Retry-After: seconds, or a date (RFC 9110,
    10.2.3).
    """
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
        _refuse(
            target,
            f"{path} answered {response.status}: {response.body[:DETAIL].decode(errors='replace')}",
        )
    try:
        return target.dialect.decode_models(response.body)[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        _refuse(target, f"{path} names no model; name it with --model")


def _refuse(target: Target, reason: str) -> NoReturn:
    raise StartupError(f"{printable(target.url)} cannot be measured: {printable(reason)}")


def connections(target: Target) -> Connections:
    """Return connections, which the caller closes.

    Raises StartupError if the target's URL is not an HTTP URL.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    try:
        return Connections(target.url, headers, keep_alive=target.keep_alive)
    except ValueError as error:
        _refuse(target, str(error))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in an event loop of its own, uvloop if installed, and return its result."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def printable(text: object) -> str:
    """Return untrusted text, shortened, for one line of a terminal."""
    line = " ".join(str(text)[: 2 * DETAIL].split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."
