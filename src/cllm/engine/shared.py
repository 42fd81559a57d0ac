"""One engine for several threads and event loops.

A thread that waits for outputs computes the next step for all of them. Coroutines do not wait in a
thread, so while there are requests of coroutines, a thread of the engine's own computes steps too.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cllm.core.output import EmbeddingOutput, TokenOutput
from cllm.engine.commands import Abort, Add, Embed
from cllm.engine.engine import Engine
from cllm.errors import EngineError

Output = TokenOutput | EmbeddingOutput

EXIT_SECONDS = 10.0  # for the last step of a process to end


class PendingOutputs:
    """The outputs for some requests that their reader has not taken yet.

    If the reader is a coroutine, the thread that computes calls ``wake`` when there is something to
    take. It raises RuntimeError if the coroutine's event loop is closed.
    """

    def __init__(self, request_ids: list[str], wake: Callable[[], None] | None) -> None:
        self.request_ids = request_ids
        self.wake = wake
        self.outputs: deque[Output] = deque()
        self.error: EngineError | None = None  # why no outputs will come


class SharedEngine:
    """Commands wait for the next step. ``_is_stepping`` is true while a thread computes one.

    All other attributes change only under ``_turn``, which no thread holds during a step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: list[Add | Embed | Abort] = []
        self._pending: dict[str, PendingOutputs] = {}  # by request id
        self._num_awaited = 0  # those that coroutines read
        self._driver: threading.Thread | None = None  # computes for coroutines
        self._is_stepping = False
        self._num_users = 0
        self._is_closed = False
        self._is_exiting = False
        self._free: Callable[[], None] | None = None  # to be called when nothing uses the model
        self.after_fork(is_child=False)
        _engines.add(self)

    def after_fork(self, *, is_child: bool) -> None:
        """Create a new lock after a fork, because the child has none of its parent's threads."""
        self._turn = threading.Condition()
        self._was_forked = is_child

    def submit(
        self, commands: list[Add] | list[Embed], wake: Callable[[], None] | None = None
    ) -> PendingOutputs:
        """Hand requests to the engine; return their outputs, which the caller must ``drop``.

        ``wake`` wakes a coroutine that reads them, see PendingOutputs.

        Raises RuntimeError after ``close``.
        """
        pending = PendingOutputs([command.request.request_id for command in commands], wake)
        with self._turn:
            self._check_open()
            self._commands += commands
            self._pending |= dict.fromkeys(pending.request_ids, pending)
            if wake is not None and pending.request_ids:
                self._num_awaited += 1
                if self._driver is None:
                    self._driver = threading.Thread(
                        target=self._drive, name="cllm-engine", daemon=True
                    )
                    self._driver.start()
                self._turn.notify_all()
        return pending

    def take(self, pending: PendingOutputs) -> Output:
        """Return the next output for ``pending``, waiting for it.

        Raises RuntimeError after ``close``.
        """
        while True:
            steps = False
            try:
                with self._turn:
                    self._check_open()
                    self._turn.wait_for(lambda: pending.outputs or not self._is_stepping)
                    self._check_open()
                    if pending.outputs:
                        return pending.outputs.popleft()
                    steps = self._is_stepping = True
                with late_interrupt():
                    self._step()
            finally:
                if steps:
                    self._end_step()

    def take_all(self, pending: PendingOutputs) -> list[Output]:
        """Return the outputs that have come for ``pending``, without waiting.

        Raises RuntimeError after ``close``, and EngineError if the engine's own thread has failed.
        """
        with self._turn:
            self._check_open()
            if pending.error is not None:
                raise pending.error
            outputs = [*pending.outputs]
            pending.outputs.clear()
            return outputs

    def abort(self, request_id: str, index: int) -> None:
        """End one sequence of a request in the next step."""
        with self._turn:
            self._commands.append(Abort(request_id, index))

    def drop(self, pending: PendingOutputs) -> None:
        """Abort the unfinished requests of ``pending`` and forget it. May be called again."""
        if self._is_exiting:
            return  # a thread that the interpreter has ended may hold the lock for ever
        with self._turn:
            self._forget(pending)
            if not (self._is_closed or self._is_stepping):
                self._deliver(self._handle_commands())
            self._turn.notify_all()

    def _forget(self, pending: PendingOutputs) -> None:
        known = [name for name in pending.request_ids if self._pending.pop(name, None)]
        self._commands += map(Abort, known)
        if known and pending.wake is not None:
            self._num_awaited -= 1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model loaded inside the ``with`` block. Raises RuntimeError after ``close``."""
        is_counted = False
        try:
            with self._turn:
                self._check_open()
                self._num_users, is_counted = self._num_users + 1, True
            yield
        finally:
            with self._turn:
                self._num_users -= is_counted
                self._free_if_unused()
                self._turn.notify_all()

    def close(self, free: Callable[[], None], *, waits: bool = True) -> None:
        """Reject further requests, and call ``free`` once no thread uses the model. Further calls
        do nothing.

        With ``waits``, return when that has happened. The garbage collector must not wait, because
        it may interrupt the thread that uses the model.
        """
        if self._was_forked or self._is_exiting:
            return
        with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self._free = free
                self._wake({*self._pending.values()})
                self._free_if_unused()
                self._turn.notify_all()
            if waits:
                self._turn.wait_for(lambda: self._free is None)

    def _free_if_unused(self) -> None:
        if self._free is not None and not (self._is_stepping or self._num_users):
            free, self._free = self._free, None
            free()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed")
        if self._is_exiting and threading.current_thread() is threading.main_thread():
            raise RuntimeError("the interpreter exits")
        if self._was_forked:
            raise RuntimeError(
                "this LLM was loaded before a fork; load it in the process that uses it"
            )

    def _step(self) -> None:
        with self._turn:
            outputs = self._handle_commands()
        outputs += self._engine.step()
        outputs += self._engine.embeddings.take()
        with self._turn:
            self._deliver(outputs)

    def _end_step(self) -> None:
        with self._turn:
            self._is_stepping = False
            self._free_if_unused()
            self._turn.notify_all()

    def _handle_commands(self) -> list[Output]:
        commands, self._commands = self._commands, []
        return [output for command in commands for output in self._engine.handle(command)]

    def _deliver(self, outputs: list[Output]) -> None:
        awaited = set()
        for output in outputs:
            if pending := self._pending.get(output.request_id):
                pending.outputs.append(output)
                if pending.wake is not None:
                    awaited.add(pending)
        self._wake(awaited)

    def _wake(self, awaited: set[PendingOutputs]) -> None:
        """Wake the coroutines that read ``awaited``; abort the requests of those that cannot
        run.
        """
        for pending in awaited:
            try:
                if pending.wake is not None:
                    pending.wake()
            except RuntimeError:
                self._forget(pending)

    def _drive(self) -> None:
        """Compute steps while coroutines wait for outputs."""
        while True:
            with self._turn:
                self._turn.wait_for(self._may_drive)
                if self._is_closed or self._is_exiting:
                    self._driver = None
                    self._turn.notify_all()
                    return
                self._is_stepping = True
            try:
                self._step()
            except BaseException as error:  # noqa: BLE001  # the coroutines raise it
                self._fail(error)
            finally:
                self._end_step()

    def _may_drive(self) -> bool:
        if self._is_closed or self._is_exiting:
            return True
        if self._is_stepping:
            return False
        # a command may be the abort of the last request
        return bool(self._commands or (self._num_awaited and self._engine.has_work()))

    def _fail(self, error: BaseException) -> None:
        """End the requests of all coroutines with an EngineError."""
        with self._turn:
            awaited = {pending for pending in self._pending.values() if pending.wake is not None}
            for pending in awaited:
                pending.error = EngineError(f"the engine failed: {error}")
                pending.error.__cause__ = error
                self._forget(pending)
            self._wake(awaited)

    def end_driver(self) -> None:
        """End the engine's own thread, and let no thread begin a step, because the interpreter
        exits: a thread that still runs native code then could crash it.
        """
        if self._was_forked:
            return
        with self._turn:
            self._is_exiting = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not (self._driver or self._is_stepping), EXIT_SECONDS)
            self._is_stepping = True


@contextmanager
def late_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the ``with`` block instead of inside.

    An interrupted step would lose outputs of other threads, and leave sequences and cells that the
    engine never frees.
    """
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            raise KeyboardInterrupt


_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


@atexit.register
def _end_drivers() -> None:
    for engine in [*_engines]:
        engine.end_driver()


def _note_fork() -> None:
    for engine in [*_engines]:
        engine.after_fork(is_child=True)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)
