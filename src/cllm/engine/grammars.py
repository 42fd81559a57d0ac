"""Compiles grammars in a separate thread, so that no step waits for one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from cllm.core.output import FinishReason, TokenOutput
from cllm.core.sequence import Sequence
from cllm.engine.commands import Abort
from cllm.engine.embeddings import Embeddings
from cllm.engine.side_jobs import WAIT, SideJob
from cllm.sampling.grammar import Grammar
from cllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger("cllm.engine")

# Limits of the kept grammars: their number, and the total of their characters. Every set of tools
# is a grammar that takes up to half a second to compile, so dozens must fit. A compiled grammar
# takes about 70 bytes for each character. The lexer of a hostile one grows to 20 MB before it
# reaches MAX_LEXER_STATES.
MAX_GRAMMARS, MAX_SIZE = 64, 2_000_000


Key = tuple[str, str]
"""The cache salt of a request and the text of its grammar."""


class Grammars(SideJob):
    """Compiles grammars, and holds sequences until theirs is compiled.

    A text is compiled once for each cache salt; otherwise its time would show whether other tenants
    use it. The least recently used grammars are evicted when there are too many or they are too
    large.
    """

    def __init__(
        self,
        make_tokenizer: Callable[[], LLTokenizer],
        scheduler: Scheduler,
        embeddings: Embeddings,
    ) -> None:
        """``make_tokenizer`` is called by the thread, for the first grammar: it may take a
        second. A step waits for a grammar only if ``scheduler`` and ``embeddings`` have no work.
        """
        self._make_tokenizer = make_tokenizer
        self._scheduler = scheduler
        self._embeddings = embeddings
        # grammar that is not compiled yet -> (arrival, sequence) of those that wait for it
        self._held: dict[Key, list[tuple[float, Sequence]]] = {}
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[Key, Grammar] = OrderedDict()
        self._awaited: set[Key] = set()
        self._jobs: queue.SimpleQueue[Key] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Key, Grammar]] = queue.SimpleQueue()
        self._is_running = False

    def add(self, seq: Sequence, now: float) -> list[TokenOutput]:
        """Queue a sequence that arrived at ``now`` as soon as its grammar is compiled.

        Returns its last output if it is rejected.
        """
        key = seq.request.cache_salt, seq.request.params.grammar
        grammar = self.find(key)
        if grammar is not None:
            return self._queue(seq, grammar, now)
        self._held.setdefault(key, []).append((now, seq))
        return []

    def _queue(self, seq: Sequence, grammar: Grammar, since: float) -> list[TokenOutput]:
        if grammar.error and seq.request.params.is_bound:
            return [seq.make_end_output(FinishReason.GRAMMAR)]
        try:
            if not grammar.error:
                seq.follow(grammar.matcher())
            return self._scheduler.add(seq, since)
        except Exception:  # continue with the other sequences that wait for a grammar
            log.exception("cannot queue %s", seq.name)
            return [seq.make_end_output(FinishReason.ERROR)]

    def abort(self, abort: Abort) -> list[TokenOutput]:
        """End the sequences that wait for a grammar and to which ``abort`` applies."""
        ended = []
        for key, held in self._held.items():
            remaining = [entry for entry in held if not abort.applies_to(entry[1])]
            ended += [
                seq.make_end_output(FinishReason.ABORT) for _, seq in held if abort.applies_to(seq)
            ]
            self._held[key] = remaining
        return ended

    def list_held(self, request_id: str) -> list[Sequence]:
        """Return the sequences of a request that wait for a grammar."""
        return [
            seq
            for held in self._held.values()
            for _, seq in held
            if seq.request.request_id == request_id
        ]

    def has_work(self) -> bool:
        return bool(self._held)

    def before(self, now: float) -> list[TokenOutput]:
        """Queue the sequences whose grammar has been compiled since the last step."""
        outputs: list[TokenOutput] = []
        if self._held:
            is_idle = not (self._scheduler.sequences.has_work() or self._embeddings.has_work())
            for key, grammar in self.results(WAIT if is_idle else 0.0).items():
                for since, seq in self._held.pop(key, []):
                    outputs += self._queue(seq, grammar, since)
        return outputs

    def find(self, key: Key) -> Grammar | None:
        """Return the compiled grammar, or None while it is being compiled. ``results`` will then
        return it.
        """
        grammar = self._known.get(key)
        if grammar is not None and not grammar.error:
            self._known.move_to_end(key)
            return grammar
        if key not in self._awaited:
            self._awaited.add(key)
            self._jobs.put(key)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, daemon=True).start()
        return None

    def results(self, wait: float) -> dict[Key, Grammar]:
        """Return the grammars compiled since the last call; wait up to ``wait`` seconds
        for the first one.
        """
        compiled: dict[Key, Grammar] = {}
        try:
            while True:
                key, grammar = self._results.get(timeout=0 if compiled else wait)
                self._awaited.remove(key)
                self._known[key] = compiled[key] = grammar
        except queue.Empty:
            pass
        size = sum(len(text) for _, text in self._known) if compiled else 0
        while len(self._known) > MAX_GRAMMARS or size > MAX_SIZE:
            (_, text), _ = self._known.popitem(last=False)
            size -= len(text)
        return compiled

    def _work(self) -> None:
        while True:
            key = self._jobs.get()
            started = time.perf_counter()
            try:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
                grammar = Grammar(key[1], self._tokenizer)
            except Exception:  # sequences wait for a result, even if it is an error
                log.exception("cannot compile a grammar")
                grammar = Grammar.failed("it cannot be compiled")
            log.debug(
                "compiled a grammar in %.0f ms %s",
                (time.perf_counter() - started) * 1000,
                grammar.error[:200],
            )
            self._results.put((key, grammar))
