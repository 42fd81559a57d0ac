"""The engine: its loop and its step."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from cllm.backends.base import Backend, StateBuffer
from cllm.core.batch import Batch, Drop, Operation, Save
from cllm.core.model_info import ModelInfo
from cllm.core.output import NO_TOKEN, Embedded, FinishReason, Stats, TokenOutput
from cllm.core.sequence import Sequence
from cllm.engine.commands import Abort, Add, Close, Command, Embed, Explain
from cllm.engine.disk import DiskCache, Written
from cllm.engine.embeddings import Embeddings
from cllm.engine.grammars import Grammars
from cllm.errors import EngineError, StartupError
from cllm.kv_cache.layouts import Layout, LayoutChooser, Sharing
from cllm.sampling.grammar import Grammar
from cllm.sampling.pipeline import Sampler
from cllm.sampling.random import derive_seed
from cllm.scheduler.scheduler import Scheduler
from cllm.scheduler.trace import Explanation, explain


class Inbox(Protocol):
    def drain(self, block: bool) -> list[Command]:
        """Return the commands since the last call; if ``block``, wait until there is one."""
        ...


log = logging.getLogger("cllm.engine")

CHOOSE_EVERY = 8  # steps
WAIT = 0.02  # seconds that a step without rows waits for the disk or a grammar
# seconds that a closing engine spends on saving prefixes, and again on writing them
LAST_SAVES = 1.5


class Outbox(Protocol):
    """Receives the results of an engine."""

    def send(self, outputs: list[TokenOutput], stats: Stats) -> None:
        """Send the outputs of one step, and the state of the engine after it."""
        ...

    def embedded(self, embedded: Embedded) -> None:
        """Send embeddings of a request."""
        ...

    def explain(self, explanation: Explanation) -> None:
        """Send the answer to Explain."""
        ...


Clock = Callable[[], float]


def layout_of(info: ModelInfo) -> Layout:
    unified = info.layout == "unified"
    return Layout(
        shares=unified, dense=not unified, trims=info.can_trim, num_spare_ids=info.num_spare_ids
    )


class Engine:
    """A backend, a scheduler and a sampler, stepped by one thread."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Clock,
        grammars: Grammars,
        disk: DiskCache | None = None,
        chooser: LayoutChooser | None = None,
        *,
        check: bool = False,
    ) -> None:
        """``clock`` returns seconds; with a ``chooser``, the KV layout follows the load; ``check``
        verifies the conservation laws after every step, which costs time.
        """
        self.backend = backend
        self.scheduler = scheduler
        self.sampler = sampler
        self.clock = clock
        self._grammars = grammars
        # by grammar, until it is compiled: arrival, sequence
        self._held: dict[str, list[tuple[float, Sequence]]] = {}
        self.embeddings = Embeddings(backend)
        self._embeds = False  # whether there are texts to embed
        self._disk = disk
        self._chooser = chooser
        self._check = check
        self._state_buffers: dict[int, StateBuffer] = {}  # by snapshot key, being filled from disk
        self._num_steps_since = 0  # since the layout was last considered
        if disk is not None:
            for file, tokens, salt in disk.find():
                disk.name(scheduler.ledger.found_on_disk(tokens, salt).key, file)

    def run(self, inbox: Inbox, outbox: Outbox) -> None:
        """Step until a Close command arrives; wait in the inbox while there is nothing to
        compute.
        """
        while True:
            outputs: list[TokenOutput] = []
            if self._chooser is not None and not self.has_work():
                outputs += self._choose_layout(self._chooser)
            for command in inbox.drain(block=not self.has_work() and not self._save_one_idle()):
                match command:
                    case Close():
                        self._save_all_idle()
                        return
                    case Explain():
                        outbox.explain(explain(self.scheduler, self.clock(), command.num_steps))
                    case Add() | Abort() | Embed():
                        outputs += self.handle(command)
            embeds = self._embeds
            outputs += self.step()
            if embeds:
                for embedded in self.embeddings.take():
                    outbox.embedded(embedded)
            outbox.send(outputs, self.stats())

    def has_work(self) -> bool:
        return self._embeds or self.scheduler.has_work() or bool(self._held)

    def stats(self) -> Stats:
        stats = self.scheduler.stats()
        if self.embeddings.num_tokens:
            stats = msgspec.structs.replace(stats, num_embedding_tokens=self.embeddings.num_tokens)
        return stats

    def handle(self, command: Add | Abort | Embed) -> list[TokenOutput]:
        """Execute a command; return the outputs of sequences that it ends.

        A request that raises an exception ends.
        """
        outputs: list[TokenOutput] = []
        try:
            self._obey(command, outputs)
        except Exception as error:
            log.exception("a command failed")
            outputs += self._recover(error)
            if isinstance(command, Add):
                request = command.request
                self._abort(Abort(request.request_id), outputs)
                ended = {
                    output.index for output in outputs if output.request_id == request.request_id
                }
                for index in set(range(request.params.n)) - ended:
                    outputs.append(
                        TokenOutput(request.request_id, index, NO_TOKEN, FinishReason.ERROR, False)
                    )
        return outputs

    def _obey(self, command: Add | Abort | Embed, outputs: list[TokenOutput]) -> None:
        match command:
            case Embed(request):
                self.embeddings.add(request)
                self._embeds = True
            case Abort():
                self.embeddings.abort(command.request_id)
                self._abort(command, outputs)
            case Add(request):
                seed = (
                    request.params.seed if request.params.seed is not None else secrets.randbits(64)
                )
                for index in range(request.params.n):
                    seq = Sequence(
                        request, index, derive_seed(seed, index), self.backend.info.context_length
                    )
                    grammar = (
                        self._grammars.find(request.params.grammar)
                        if request.params.grammar
                        else None
                    )
                    if grammar is None and request.params.grammar:
                        self._held.setdefault(request.params.grammar, []).append(
                            (self.clock(), seq)
                        )
                    else:
                        outputs += self._queue(seq, grammar, self.clock())

    def _abort(self, abort: Abort, outputs: list[TokenOutput]) -> None:
        outputs += self._stop_holding(abort)
        outputs += self.scheduler.abort(abort.request_id, abort.index)

    def _queue(self, seq: Sequence, grammar: Grammar | None, since: float) -> list[TokenOutput]:
        """Add a sequence that arrived at ``since`` to the scheduler; return its final output if it
        is refused.
        """
        if grammar is not None and grammar.error and seq.request.params.is_bound:
            return [seq.end_output(FinishReason.GRAMMAR)]
        try:
            seq.matcher = grammar.matcher() if grammar is not None and not grammar.error else None
            self.scheduler.add(seq, since)
        except Exception as error:
            log.exception("a request was refused")  # the sender should have checked it
            if self.scheduler.knows(seq):
                return self._recover(error)
            return [seq.end_output(FinishReason.ERROR)]
        return []

    def _take_compiled(self) -> list[TokenOutput]:
        """Queue the sequences whose grammar has been compiled since the last step."""
        outputs = []
        is_idle = not (self.scheduler.has_work() or self.embeddings.has_work())
        for text, grammar in self._grammars.results(WAIT if is_idle else 0.0).items():
            for since, seq in self._held.pop(text, []):
                outputs += self._queue(seq, grammar, since)
        return outputs

    def _stop_holding(self, abort: Abort) -> list[TokenOutput]:
        ended = []
        for text, held in self._held.items():
            kept = [entry for entry in held if not abort.means(entry[1])]
            ended += [seq.end_output(FinishReason.ABORT) for _, seq in held if abort.means(seq)]
            self._held[text] = kept
        return ended

    def step(self) -> list[TokenOutput]:
        """Compute one batch; return the outputs of all sequences, or [] if there are none.

        If there are texts to embed, also embeds some of them; fetch the results with
        ``embeddings.take``. An exception ends the sequences that caused it, and the engine
        continues.
        """
        outputs = self._take_compiled() if self._held else []
        if self._embeds:
            self.scheduler.reserved = (self.scheduler.params.target_itl or 0.0) / 2
        try:
            batch = self.scheduler.schedule(self.clock())
            if self._disk is not None:
                self._begin_reads(self._disk)
            outputs += self.scheduler.take_outputs() if batch is None else self._compute(batch)
        except Exception as error:
            log.exception("a step failed")
            batch = None
            outputs += self._recover(error)
        is_idle = batch is None or not batch.rows
        if self._disk is not None:
            try:
                self._take_in(
                    self._disk, wait=WAIT if is_idle and self.scheduler.has_work() else 0.0
                )
            except Exception as error:
                log.exception("results of the disk cache could not be processed")
                outputs += self._recover(error)
        if self._chooser is not None and not is_idle:
            self._num_steps_since += 1
            if self._num_steps_since >= CHOOSE_EVERY or self.scheduler.deferred:
                outputs += self._choose_layout(self._chooser)
        if self._embeds:
            self._embed()
        if self._check:
            self.scheduler.check()
        return outputs

    def _recover(self, error: Exception) -> list[TokenOutput]:
        """End the sequences whose computation raised ``error``; the others continue."""
        if self._check:
            raise error
        return self.scheduler.recover()

    def _embed(self) -> None:
        """Embed as many tokens as fit into the rest of the step's target time, at least one
        tile.
        """
        begun, target = self.clock(), self.scheduler.params.target_itl
        left = None
        if target is not None and self.scheduler.running:
            left = target - (begun - self.scheduler.begun)
        try:
            num_tokens = self.embeddings.bite(self.embeddings.num_tokens_for(left))
            self.embeddings.observe(num_tokens, self.clock() - begun)
        except Exception as error:
            log.exception("embeddings failed")
            self.embeddings.fail_all(str(error))
        self._embeds = self.embeddings.has_work()
        if not self._embeds:
            self.scheduler.reserved = 0.0

    def _compute(self, batch: Batch) -> list[TokenOutput]:
        try:
            logits = self.backend.forward(batch)
            tokens = self.sampler.sample(batch, logits) if batch.num_samples else []
            if self._disk is not None:
                self._write(self._disk, batch.operations)
        except EngineError as error:
            log.error("a step failed: %s", error)
            return self.scheduler.fail(batch)
        except Exception:
            log.exception("a step failed")
            return self.scheduler.fail(batch)
        except BaseException:  # Ctrl-C in a process that steps its own engine
            self.scheduler.fail(batch)
            raise
        return self.scheduler.update(batch, tokens, self.clock(), self.sampler.logprobs)

    def _carry_out(self, operations: list[Operation]) -> bool:
        """Run operations without a step.

        If they fail, forget the cells that they touch and return False.
        """
        batch = Batch([], operations)
        try:
            self.backend.forward(batch)
            if self._disk is not None:
                self._write(self._disk, operations)
        except Exception:
            log.exception("cells could not be saved or copied")
            self.scheduler.fail(batch)
            return False
        return True

    def _choose_layout(self, chooser: LayoutChooser) -> list[TokenOutput]:
        """Change the layout of the cells if that pays. After a failure, never try again."""
        try:
            self._change_layout_if_it_pays(chooser)
        except StartupError:  # the backend cannot be used any longer
            raise
        except Exception as error:
            log.exception("the KV layout could not be changed")
            self._chooser = None
            return self._recover(error)
        return []

    def _change_layout_if_it_pays(self, chooser: LayoutChooser) -> None:
        """Change the layout of the cells if that pays.

        Parks all running sequences; they resume in the new layout.

        Deferred sequences count too: they will soon run and share their prefix, and the best time
        to change is before.
        """
        scheduler, unified = self.scheduler, self.backend.info.layout == "unified"
        sharing = scheduler.ledger.sharing()
        chooser.observe(sharing, self._num_steps_since, unified=unified)
        self._num_steps_since = 0
        expected = sharing, 0.0
        if scheduler.deferred:
            expected = self._with_followers(sharing), scheduler.expected.output
        decoding = any(seq.num_lacking_tokens == 1 for seq in scheduler.running)
        tiers = scheduler.ledger.tiers
        # they would be recomputed
        if decoding and tiers.size_of(expected[0].num_tokens) > tiers.ram_bytes:
            return
        if not chooser.wants_change(*expected, unified=unified, decoding=decoding):
            return
        chooser.seconds_lost = 0.0
        begun = self.clock()
        if not self._carry_out(self.scheduler.empty_cells()):
            return
        self.backend.change_layout("partitioned" if unified else "unified")
        info = self.backend.info
        self.scheduler.ledger = self.scheduler.ledger.with_layout(info.num_cells, layout_of(info))
        log.info(
            "the KV layout is %s now; the change took %.2f s", info.layout, self.clock() - begun
        )

    def _with_followers(self, sharing: Sharing) -> Sharing:
        """Return the expected sharing after the deferred followers have joined their leaders."""
        num_seqs, num_tokens, num_distinct, num_idle = sharing
        for leader, awaited in self.scheduler.deferred.leaders():
            missing = max(awaited) - self.scheduler.ledger.num_cells_of(leader.seq_id)
            num_seqs += len(awaited)
            num_tokens += missing + sum(awaited)
            num_distinct += missing
        return Sharing(num_seqs, num_tokens, num_distinct, num_idle)

    # --- disk ------------------------------------------------------------------------------------

    def _begin_reads(self, disk: DiskCache) -> None:
        reads, self.scheduler.reads = self.scheduler.reads, []
        for snapshot in reads:
            try:
                buffer = self.backend.new_state_buffer(disk.size(snapshot.key))
                disk.read(snapshot.key, buffer.data)
                self._state_buffers[snapshot.key] = buffer
            except Exception:
                log.exception("a prefix cannot be read from disk")
                self.scheduler.was_read(snapshot.key, succeeded=False)

    def _take_in(self, disk: DiskCache, wait: float) -> None:
        """Process finished reads and writes, after the batch's operations: one may drop an old copy
        of a snapshot.
        """
        for result in disk.results(wait):
            if isinstance(result, Written):
                for old in self.scheduler.ledger.written(result.key):
                    disk.delete(old)
                continue
            filled, succeeded = self._state_buffers.pop(result.key), result.succeeded
            try:
                if succeeded:
                    self.backend.install_snapshot(result.key, filled)
            except Exception:
                log.exception("a prefix that was read from disk cannot be used")
                succeeded = False
            self.scheduler.was_read(result.key, succeeded=succeeded)

    def _write(self, disk: DiskCache, operations: Collection[Operation]) -> None:
        dropped = {operation.snapshot for operation in operations if isinstance(operation, Drop)}
        for operation in operations:
            if isinstance(operation, Save) and operation.snapshot not in dropped:
                snapshot = self.scheduler.ledger.tiers.ram[operation.snapshot]
                try:
                    disk.write(
                        snapshot.key,
                        snapshot.tokens,
                        self.backend.snapshot(snapshot.key),
                        snapshot.salt,
                    )
                except Exception:
                    log.exception("a prefix cannot be written to disk")

    def _save_one_idle(self) -> bool:
        """Save an idle prefix that is in no file, while there is nothing to compute; return whether
        there was one.
        """
        if self._disk is None:
            return False
        try:
            operations = self.scheduler.ledger.save_one_idle()
            return bool(operations) and self._carry_out(
                [*self.scheduler.drain_pending_operations(), *operations]
            )
        except Exception as error:
            log.exception("an idle prefix could not be saved")
            self._recover(error)  # no sequence runs now
            return False

    def _save_all_idle(self) -> None:
        until = self.clock() + LAST_SAVES
        while self.clock() < until and self._save_one_idle():
            pass
        if self._disk is not None:
            self._disk.flush(LAST_SAVES)
