"""The step."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Protocol

import msgspec

from cllm.backends.base import Backend
from cllm.core.output import Stats, TokenOutput
from cllm.core.request import Request
from cllm.core.sequence import FinishReason, Sequence
from cllm.errors import EngineError
from cllm.sampling.pipeline import Sampler
from cllm.sampling.random import derive_seed
from cllm.scheduler.scheduler import Scheduler


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or the one of its sequences with ``index``; unknown ones are ignored."""

    request_id: str
    index: int | None = None


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Leave the loop, whatever is running."""


Command = Add | Abort | Close


class Inbox(Protocol):
    def drain(self, block: bool) -> list[Command]:
        """What has arrived since the last call; if ``block``, wait until there is something."""
        ...


log = logging.getLogger("cllm.engine")

Outbox = Callable[[list[TokenOutput], Stats], None]


class Engine:
    """A backend, a scheduler and a sampler, stepped by one thread."""

    def __init__(self, backend: Backend, scheduler: Scheduler, sampler: Sampler, *, check: bool = False) -> None:
        """``check`` verifies the conservation laws after every step, which costs time."""
        self.backend = backend
        self.scheduler = scheduler
        self.sampler = sampler
        self._check = check

    def run(self, inbox: Inbox, send: Outbox) -> None:
        """Step until told to close; sleep in the inbox while there is nothing to compute."""
        while True:
            outputs: list[TokenOutput] = []
            for command in inbox.drain(block=not self.scheduler.has_work()):
                if isinstance(command, Close):
                    return
                outputs += self.handle(command)
            outputs += self.step()
            send(outputs, self.scheduler.stats())

    def handle(self, command: Add | Abort) -> list[TokenOutput]:
        if isinstance(command, Abort):
            return self.scheduler.abort(command.request_id, command.index)
        request = command.request
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(64)
        try:
            for index in range(request.params.n):
                seq_seed = derive_seed(seed, index)
                self.scheduler.add(Sequence(request, index, seq_seed, self.backend.info.context_length))
        except ValueError:  # whoever sent it should have checked
            log.exception("a request was refused")
            return [TokenOutput(request.request_id, i, -1, FinishReason.ERROR) for i in range(request.params.n)]
        return []

    def step(self) -> list[TokenOutput]:
        """Compute one batch; returns what was sampled, nothing if there is nothing to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            logits = self.backend.forward(batch)
            tokens = self.sampler.sample(batch, logits) if batch.num_samples else []
        except EngineError as error:
            log.error("a step failed: %s", error)
            return self.scheduler.fail(batch)
        except Exception:
            log.exception("a step failed")
            return self.scheduler.fail(batch)
        except BaseException:  # Ctrl-C in a process that steps its own engine
            self.scheduler.fail(batch)
            raise
        outputs = self.scheduler.update(batch, tokens)
        if self._check:
            self.scheduler.check()
        return outputs
