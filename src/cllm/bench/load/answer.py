"""An answer to the load client, parsed as it arrives.

Times are seconds of ``time.perf_counter``, taken when bytes are read.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cllm.bench.load.dialects import DIALECTS, ClientDialect, Event, TokenCounts
from cllm.bench.load.workload import Task

FINISH_REASONS = {"stop", "length"}
DETAIL = 200  # characters kept of a server's message


class TimedAnswer:
    """The answer to one task."""

    def __init__(
        self, task: Task, sent: float, dialect: ClientDialect = DIALECTS["openai"]
    ) -> None:
        self.task = task
        self.dialect = dialect
        self.sent = self.ended = sent
        self.content_times: list[float] = []
        """The arrival time of each chunk that contains text."""
        self.finish_reason: str | None = None
        self.usage: TokenCounts | None = None
        self.cancelled = False
        """The client disconnected, as the task required."""
        self.refused = False
        """The server rejected the request because of overload (429 or 503). This is a
        failure unless the task allows it.
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


def split_parts(answers: Iterable[TimedAnswer]) -> dict[str, list[TimedAnswer]]:
    """Return the answers of each part of the workload."""
    parts: dict[str, list[TimedAnswer]] = {}
    for answer in answers:
        parts.setdefault(answer.task.part, []).append(answer)
    return parts


def printable(text: object) -> str:
    """Return untrusted text, shortened, for one line of a terminal."""
    line = " ".join(str(text)[: 2 * DETAIL].split())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."
