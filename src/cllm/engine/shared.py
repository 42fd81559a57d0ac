"""One engine for several threads. One of the threads that wait for outputs computes the next step
for all of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cllm.core.output import EmbeddingOutput, TokenOutput
from cllm.engine.commands import Abort, Add, Embed
from cllm.engine.engine import Engine

Output = TokenOutput | EmbeddingOutput


class Inbox:
    """The outputs for some requests that their thread has not taken yet."""

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.outputs: deque[Output] = deque()


class SharedEngine:
    """Commands wait for the next step. ``_is_stepping`` is true while a thread computes one.

    All other attributes change only under ``_turn``, which no thread holds during a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.Condition()
        self._commands: list[Add | Embed | Abort] = []
        self._inboxes: dict[str, Inbox] = {}  # by request id
        self._is_stepping = False
        self._num_users = 0
        self._is_closed = False

    def submit(self, commands: list[Add] | list[Embed]) -> Inbox:
        """Hand requests to the engine. The caller must call ``drop`` later.

        Raises RuntimeError after ``close``.
        """
        inbox = Inbox([command.request.request_id for command in commands])
        with self._turn:
            self._check_open()
            self._commands += commands
            self._inboxes |= dict.fromkeys(inbox.request_ids, inbox)
        return inbox

    def take(self, inbox: Inbox) -> Output:
        """Return the next output for ``inbox``, waiting for it.

        Raises RuntimeError after ``close``.
        """
        while True:
            steps = False
            try:
                with self._turn:
                    self._turn.wait_for(lambda: inbox.outputs or not self._is_stepping)
                    self._check_open()
                    if inbox.outputs:
                        return inbox.outputs.popleft()
                    steps = self._is_stepping = True
                self._step()
            finally:
                if steps:
                    with self._turn:
                        self._is_stepping = False
                        self._turn.notify_all()

    def abort(self, request_id: str, index: int) -> None:
        """End one sequence of a request in the next step."""
        with self._turn:
            self._commands.append(Abort(request_id, index))

    def drop(self, inbox: Inbox) -> None:
        """Abort the unfinished requests of ``inbox`` and forget it."""
        with self._turn:
            for request_id in inbox.request_ids:
                del self._inboxes[request_id]
            if not self._is_closed:
                self._commands += map(Abort, inbox.request_ids)
                if not self._is_stepping:
                    self._deliver(self._handle_commands())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model loaded inside the ``with`` block. Raises RuntimeError after ``close``."""
        with self._turn:
            self._check_open()
            self._num_users += 1
        try:
            yield
        finally:
            with self._turn:
                self._num_users -= 1
                self._turn.notify_all()

    def close(self, free: Callable[[], None]) -> None:
        """Reject further requests, wait until no thread uses the model, and call ``free``. Further
        calls do nothing.
        """
        with self._turn:
            if self._is_closed:
                return
            self._is_closed = True
            self._turn.wait_for(lambda: not (self._is_stepping or self._num_users))
            free()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")

    def _step(self) -> None:
        with self._turn:
            outputs = self._handle_commands()
        outputs += self._engine.step()
        outputs += self._engine.embeddings.take()
        with self._turn:
            self._deliver(outputs)

    def _handle_commands(self) -> list[Output]:
        commands, self._commands = self._commands, []
        return [output for command in commands for output in self._engine.handle(command)]

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if inbox := self._inboxes.get(output.request_id):
                inbox.outputs.append(output)
