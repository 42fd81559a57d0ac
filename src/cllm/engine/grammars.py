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

# Every set of functions is a grammar that takes up to half a second to compile, so dozens must fit.
# A compiled grammar takes about 70 bytes for each character. The lexer of a hostile one grows to 20
# MB before it reaches MAX_LEXER_STATES. maximum number of grammars to keep, and of their characters
MAX_GRAMMARS, MAX_SIZE = 64, 2_000_000


class Grammars(SideJob):
    """Compiles each text once, and holds sequences until their grammar is compiled.

    Forgets the least recently used grammars when they are too many or too large.
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
        # by grammar, until it is compiled: arrival, sequence
        self._held: dict[str, list[tuple[float, Sequence]]] = {}
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._awaited: set[str] = set()
        self._jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, Grammar]] = queue.SimpleQueue()
        self._is_running = False

    def add(self, seq: Sequence, now: float) -> list[TokenOutput]:
        """Queue a sequence that arrived at ``now`` as soon as its grammar is compiled.

        Returns its last output if it is refused.
        """
        text = seq.request.params.grammar
        grammar = self.find(text)
        if grammar is not None:
            return self._queue(seq, grammar, now)
        self._held.setdefault(text, []).append((now, seq))
        return []

    def _queue(self, seq: Sequence, grammar: Grammar, since: float) -> list[TokenOutput]:
        if grammar.error and seq.request.params.is_bound:
            return [seq.end_output(FinishReason.GRAMMAR)]
        try:
            seq.matcher = None if grammar.error else grammar.matcher()
            return self._scheduler.add(seq, since)
        except Exception:  # the other sequences that wait for a grammar must not be lost
            log.exception("%s was refused", seq.name)
            return [seq.end_output(FinishReason.ERROR)]

    def abort(self, abort: Abort) -> list[TokenOutput]:
        """End the sequences that wait for a grammar and that ``abort`` means."""
        ended = []
        for text, held in self._held.items():
            kept = [entry for entry in held if not abort.means(entry[1])]
            ended += [seq.end_output(FinishReason.ABORT) for _, seq in held if abort.means(seq)]
            self._held[text] = kept
        return ended

    def has_work(self) -> bool:
        return bool(self._held)

    def before(self, now: float) -> list[TokenOutput]:
        """Queue the sequences whose grammar has been compiled since the last step."""
        outputs: list[TokenOutput] = []
        if self._held:
            is_idle = not (self._scheduler.has_work() or self._embeddings.has_work())
            for text, grammar in self.results(WAIT if is_idle else 0.0).items():
                for since, seq in self._held.pop(text, []):
                    outputs += self._queue(seq, grammar, since)
        return outputs

    def find(self, text: str) -> Grammar | None:
        """Return the compiled grammar, or None.

        Then it is being compiled and ``results`` will return it.
        """
        grammar = self._known.get(text)
        if grammar is not None and not grammar.error:
            self._known.move_to_end(text)
            return grammar
        if text not in self._awaited:
            self._awaited.add(text)
            self._jobs.put(text)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, daemon=True).start()
        return None

    def results(self, wait: float) -> dict[str, Grammar]:
        """Return the grammars compiled since the last call, by text; wait up to ``wait`` seconds
        for the first one.
        """
        compiled: dict[str, Grammar] = {}
        try:
            while True:
                text, grammar = self._results.get(timeout=0 if compiled else wait)
                self._awaited.remove(text)
                self._known[text] = compiled[text] = grammar
        except queue.Empty:
            pass
        size = sum(map(len, self._known)) if compiled else 0
        while len(self._known) > MAX_GRAMMARS or size > MAX_SIZE:
            text, _ = self._known.popitem(last=False)
            size -= len(text)
        return compiled

    def _work(self) -> None:
        while True:
            text = self._jobs.get()
            begun = time.perf_counter()
            try:
                if self._tokenizer is None:
                    self._tokenizer = self._make_tokenizer()
                grammar = Grammar(text, self._tokenizer)
            except Exception:  # sequences wait for the result, whatever it is
                log.exception("a grammar cannot be compiled")
                grammar = Grammar.failed("it cannot be compiled")
            log.debug(
                "a grammar was compiled in %.0f ms %s",
                (time.perf_counter() - begun) * 1000,
                grammar.error[:200],
            )
            self._results.put((text, grammar))
