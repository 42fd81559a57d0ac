"""The engine: its loop and its step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from cllm.backends.base import Backend
from cllm.core.batch import Batch
from cllm.core.output import NO_TOKEN, STAGES, FinishReason, Stats, TokenOutput
from cllm.core.request import SequenceProgress
from cllm.core.sequence import Sequence
from cllm.core.timeline import Timeline
from cllm.engine.commands import (
    Abort,
    AdapterLoaded,
    Add,
    AddPrefix,
    Close,
    Command,
    Embed,
    EndReasoning,
    Explain,
    Explained,
    LoadAdapter,
    RecordTimeline,
    Reply,
    Resume,
    SetFaults,
    SetWeights,
    SetYielding,
    TakeTimeline,
    TimelineTaken,
    Withdraw,
    Withdrawn,
)
from cllm.engine.disk import DiskTier
from cllm.engine.embeddings import Embeddings
from cllm.engine.faults import Faults
from cllm.engine.grammars import Grammars
from cllm.engine.shared_cores import SharedCores
from cllm.engine.side_jobs import Record, SideJob
from cllm.engine.timeline import StepMoments, TimelineRecorder
from cllm.errors import EngineError, StartupError
from cllm.sampling.pipeline import Sampler
from cllm.sampling.random import derive_seed
from cllm.scheduler.report import collect_stats, explain
from cllm.scheduler.scheduler import Scheduler

log = logging.getLogger("cllm.engine")

T = TypeVar("T")

ADAPTER_SECONDS = 60.0  # allowed for loading a LoRA adapter from a slow disk


class Inbox(Protocol):
    def drain(self, block: bool) -> list[Command]:
        """Return the commands since the last call; if ``block``, wait until there is one."""
        ...


class Outbox(Protocol):
    """Receives the results of an engine."""

    def send(self, outputs: list[TokenOutput], stats: Stats) -> None:
        """Send the outputs of one step, and the state of the engine after it."""
        ...

    def send_message(self, message: Reply) -> None:
        """Send embeddings of a request, or the reply to another command."""
        ...


class Engine:
    """A backend, a scheduler, a sampler and side jobs, stepped by one thread."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Callable[[], float],
        grammars: Grammars,
        embeddings: Embeddings,
        disk: DiskTier | None = None,
        *,
        check: bool = False,
        weights: dict[str, float] | None = None,
    ) -> None:
        """``clock`` returns seconds; ``check`` verifies the conservation laws after every step,
        which costs time. ``weights`` are the shares of accounts, which the scheduler reads and
        SetWeights changes.
        """
        self.backend = backend
        self.scheduler = scheduler
        self.sampler = sampler
        self.clock = clock
        self.embeddings = embeddings
        self._grammars = grammars
        self._disk = disk
        # grammars and embeddings join when a request needs them, and cost nothing before
        self.side_jobs: list[SideJob] = [] if disk is None else [disk]
        self._batch: Batch | None = None  # being computed
        self._check = check
        self._record: Record | None = None
        self._cores: SharedCores | None = None
        self._num_busy = 1  # engines that share the cores now
        self._step_seconds = 0.0  # of the last step
        self._stages = dict.fromkeys(STAGES, 0.0)  # seconds of all steps
        self._timeline: TimelineRecorder | None = None  # while somebody asks for it
        self._computed: tuple[Batch, StepMoments] | None = None  # in this step, for the timeline
        self._faults = Faults()
        self._weights = {} if weights is None else weights

    def run(self, inbox: Inbox, outbox: Outbox) -> None:
        """Step until a Close command arrives; wait in the inbox while there is nothing to
        compute.
        """
        while True:
            outputs: list[TokenOutput] = []
            withdrawn: dict[str, bool] = {}
            for command in inbox.drain(block=not self.has_work() and not self.idle()):
                match command:
                    case Close(seconds):
                        self.close(seconds)
                        return
                    case Explain():
                        explanation = explain(self.scheduler, self.clock(), command.num_steps)
                        outbox.send_message(Explained(explanation))
                    case RecordTimeline():
                        self._timeline = TimelineRecorder(self.scheduler)
                    case TakeTimeline():
                        outbox.send_message(TimelineTaken(self._take_timeline()))
                    case Withdraw(request_id):
                        withdrawn[request_id] = self.scheduler.sequences.withdraw(request_id)
                    case LoadAdapter(name, path):
                        outbox.send_message(AdapterLoaded(name, self._load_adapter(name, path)))
                    case AddPrefix(name) if self._disk is not None:
                        self._attempt(partial(self._disk.add, name))
                    case SetFaults(faults):
                        self._faults.set(faults)
                    case SetWeights(weights):
                        self._weights.clear()
                        self._weights.update(weights)
                    case SetYielding(request_id, yields):
                        self.scheduler.sequences.set_yielding(request_id, yields=yields)
                    case EndReasoning(request_id):
                        self.end_reasoning(request_id)
                    case Add() | Resume() | Abort() | Embed():
                        outputs += self.handle(command)
            outputs += self.step()
            for embedded in self.embeddings.take():
                outbox.send_message(embedded)
            outbox.send(outputs, self.stats())
            for request_id, done in withdrawn.items():
                outbox.send_message(Withdrawn(request_id, done))

    def close(self, seconds: float = Close().seconds) -> None:
        """Save prefixes on disk, and write them, each for up to ``seconds``."""
        if self._disk is not None:
            self._attempt(self._disk.close, seconds)

    def use_record(self, record: Record) -> None:
        """Record in ``record`` what is being computed from now on."""
        self._record = self.embeddings.record = record

    def share_cores(self, cores: SharedCores) -> None:
        """Leave some of the cores to other engines while those compute."""
        self._cores = cores

    def has_work(self) -> bool:
        return self.scheduler.sequences.has_work() or any(job.has_work() for job in self.side_jobs)

    def idle(self) -> bool:
        """Let side jobs work while there is nothing to compute; return whether there may be more
        to do.
        """
        more = [
            self._attempt(job.idle) for job in self.side_jobs
        ]  # call all of them, so that none starves another
        return any(more)

    def stats(self) -> Stats:
        return msgspec.structs.replace(
            collect_stats(self.scheduler),
            num_embedding_tokens=self.embeddings.num_tokens,
            **self._stages,
        )

    # --- commands --------------------------------------------------------------------------------

    def handle(self, command: Add | Resume | Abort | Embed) -> list[TokenOutput]:
        """Execute a command; return the outputs of sequences that it ends.

        If adding a request raises an exception, the request ends.
        """
        outputs: list[TokenOutput] = []
        try:
            self._execute(command, outputs)
        except Exception as error:
            log.exception("cannot execute a command")
            outputs += self._recover(error)
            if isinstance(command, Add | Resume):
                request = command.request
                self._abort(Abort(request.request_id), outputs)
                ended = {
                    output.index for output in outputs if output.request_id == request.request_id
                }
                for index in list_sequences(command).keys() - ended:
                    outputs.append(
                        TokenOutput(request.request_id, index, NO_TOKEN, FinishReason.ERROR, False)
                    )
        return outputs

    def _execute(self, command: Add | Resume | Abort | Embed, outputs: list[TokenOutput]) -> None:
        match command:
            case Embed(request):
                self._use(self.embeddings)
                self.embeddings.add(request)
            case Abort():
                self.embeddings.abort(command.request_id)
                self._abort(command, outputs)
            case Add(request) | Resume(request):
                params, length = request.params, self.backend.info.context_length
                seed = params.seed or 0  # Request.with_seed draws one, unless the request is greedy
                add = self.scheduler.add
                if params.grammar:
                    self._use(self._grammars)
                    add = self._grammars.add
                pieces = self.backend.vocabulary.pieces if params.thinking else None
                for index, progress in list_sequences(command).items():
                    seq = Sequence(request, index, derive_seed(seed, index), length, pieces)
                    if progress is not None:
                        seq.resume(progress)
                    outputs += add(seq, self.clock())

    def end_reasoning(self, request_id: str) -> None:
        """See EndReasoning."""
        held = self._grammars.list_held(request_id)
        for seq in [*held, *self.scheduler.sequences.list_all(request_id)]:
            seq.end_reasoning()

    def _load_adapter(self, name: str, path: str) -> str:
        """Load an adapter. Return why it cannot be loaded, or ""."""
        if self._record is not None:
            self._record.begin((), ADAPTER_SECONDS)
        try:
            self.backend.load_adapter(name, path)
        except StartupError as error:
            return str(error)
        return ""

    def _use(self, job: SideJob) -> None:
        if job not in self.side_jobs:
            self.side_jobs.append(job)

    def _abort(self, abort: Abort, outputs: list[TokenOutput]) -> None:
        outputs += self._grammars.abort(abort)
        outputs += self.scheduler.sequences.abort(abort.request_id, abort.index)

    # --- the step --------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Compute one batch, if there is one, and work on side jobs; return the outputs of all
        sequences.

        Fetch embeddings with ``embeddings.take``.
        """
        if self._cores is not None and self.has_work():
            self._divide_cores(self._cores)
        begun = self.clock()
        outputs: list[TokenOutput] = []
        for job in self.side_jobs:
            outputs += self._attempt(job.before, begun)
        generating = self.clock()
        outputs += self._attempt(self._generate, generating)
        if self.side_jobs:
            generated = self.clock()
            for job in self.side_jobs:
                outputs += self._attempt(job.after, self.clock())
            self._stages["side_job_seconds"] += generating - begun + self.clock() - generated
        if self._check:
            self.scheduler.sequences.check()
        if self._record is not None:
            self._record.end()
        ended = self.clock()
        self._step_seconds = ended - begun
        if self._timeline is not None and self._computed is not None:
            batch, moments = self._computed
            self._timeline.add(batch, begun, moments, ended)
            self._computed = None
        return outputs

    def _take_timeline(self) -> Timeline:
        recorder, self._timeline = self._timeline, None
        return Timeline() if recorder is None else recorder.finish(self.clock())

    def _divide_cores(self, cores: SharedCores) -> None:
        num_busy = cores.begin(self._step_seconds)  # this step may take as long as the last one
        if num_busy != self._num_busy:
            self._num_busy = num_busy
            self.backend.share_cores(num_busy)

    def _generate(self, now: float) -> list[TokenOutput]:
        running = self.scheduler.sequences.running
        if self._record is not None and running:  # a draft model computes as well
            self._record.begin([seq.request.request_id for seq in running], 0.0)
        batch = self._batch = self.scheduler.schedule(now)
        if batch is None:
            return self.scheduler.sequences.take_outputs()
        if self._record is not None:
            names = [row.seq.request.request_id for row in batch.rows]
            self._record.begin(names, self.scheduler.pacing.estimate_seconds(batch.rows))
        self._faults.cause_due(batch)
        scheduled = self.clock()
        logits = self.backend.forward(batch)
        computed = self.clock()
        tokens = self.sampler.sample(batch, logits)
        self._batch = None
        sampled = self.clock()
        outputs = self.scheduler.update(batch, tokens, sampled, self.sampler.logprobs)
        stages = self._stages
        stages["schedule_seconds"] += scheduled - now
        stages["forward_seconds"] += computed - scheduled
        stages["sample_seconds"] += sampled - computed
        updated = self.clock()
        stages["update_seconds"] += updated - sampled
        if self._timeline is not None:
            self._computed = batch, StepMoments(now, scheduled, computed, sampled, updated)
        return outputs

    def _attempt(self, part: Callable[..., T], *args: float) -> T | list[TokenOutput]:
        """Return the result of a part of the step. If it raises an exception, end the sequences
        that caused it and return their outputs.
        """
        try:
            return part(*args)
        except StartupError:  # the backend cannot be used any longer
            self._batch = None
            raise
        except Exception as error:
            is_expected = isinstance(error, EngineError)
            log.error("a step failed: %s", error, exc_info=not is_expected)
            return self._recover(error)
        except BaseException:  # Ctrl-C in a process that steps its own engine
            batch, self._batch = self._batch, None
            if batch is not None:
                self.scheduler.sequences.fail(batch)
            raise

    def _recover(self, error: Exception) -> list[TokenOutput]:
        """End the sequences whose computation raised ``error``; the others continue."""
        batch, self._batch = self._batch, None
        try:
            if batch is not None:
                return self.scheduler.sequences.fail(batch)
        except Exception:
            log.exception("cannot undo a failed step")
        if self._check:
            raise error
        return self.scheduler.sequences.recover()


def list_sequences(command: Add | Resume) -> Mapping[int, SequenceProgress | None]:
    """Return the sequences of a request by index, with what they have delivered already."""
    if isinstance(command, Resume):
        return command.sequences
    return dict.fromkeys(range(command.request.params.n))
