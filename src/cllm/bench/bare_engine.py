"""Runs an engine in this process, without the process border, the service and HTTP, and times its
steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from cllm.backends.base import Backend
from cllm.bench.work import Work
from cllm.core.batch import Batch, Row
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.process.messages import Stepped, frame
from cllm.scheduler.report import collect_stats

PARTS = ("schedule", "build", "decode", "sample", "advance", "send")


def forget(engine: Engine) -> None:
    """Empty all cells."""
    engine.backend.forward(Batch([], engine.scheduler.sequences.empty_cells()))


def make_sequences(requests: Iterable[Request], context: int) -> list[Sequence]:
    """Return sequences as the engine would make them, whose seq_id is their index."""
    seqs = [Sequence(request, 0, i, context) for i, request in enumerate(requests)]
    for seq_id, seq in enumerate(seqs):
        seq.seq_id = seq_id
    return seqs


def prefill(backend: Backend, seq: Sequence, end: int) -> None:
    """Compute the first ``end`` tokens of a sequence that has no cells."""
    space = backend.info.max_num_batched_tokens
    for start in range(0, end, space):
        backend.forward(Batch([Row(seq, start, min(space, end - start), 0)], []))


class Stopwatch:
    """Seconds spent in the timed functions, by part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timing(self, owner: Any, name: str, part: str) -> Iterator[None]:
        """Add the time of all calls of ``owner.name`` to ``part`` until the context ends."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - begun

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, function)


def step_parts(engine: Engine, work: Work) -> dict[str, float]:
    """Return the mean microseconds of each part of a decoding step, over the steps of one run in
    which all sequences decode.

    "decode" is the backend's forward without the filling of its arrays. "send" is what the engine
    process does in addition: it encodes the message about the step and writes it, here to the null
    device.
    """
    watch = Stopwatch()
    for request in work.requests():
        engine.handle(Add(request))
    while (
        any(seq.num_lacking_tokens > 1 for seq in engine.scheduler.sequences.running)
        or engine.scheduler.sequences.waiting
    ):
        engine.step()
    num_steps = 0
    with ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "wb", buffering=0))  # noqa: PTH123
        stack.enter_context(watch.timing(engine.scheduler, "schedule", "schedule"))
        stack.enter_context(watch.timing(engine.backend, "forward", "decode"))
        if arrays := getattr(engine.backend, "_arrays", None):
            stack.enter_context(watch.timing(arrays, "fill", "build"))
        stack.enter_context(watch.timing(engine.sampler, "sample", "sample"))
        stack.enter_context(watch.timing(engine.scheduler, "update", "advance"))
        while len(engine.scheduler.sequences.running) == work.size.num_seqs:
            outputs = engine.step()
            begun = time.perf_counter()
            nowhere.write(frame(Stepped(outputs, collect_stats(engine.scheduler))))
            watch.seconds["send"] += time.perf_counter() - begun
            num_steps += 1
    while engine.scheduler.sequences.has_work():
        engine.step()
    watch.seconds["decode"] -= watch.seconds["build"]
    return {
        part: round(seconds / max(1, num_steps) * 1e6, 1) for part, seconds in watch.seconds.items()
    }


def closed_loop(
    engine: Engine, requests: list[Request], num_seqs: int
) -> tuple[float, list[float]]:
    """Run ``requests``, ``num_seqs`` at a time.

    Return tokens/s of the steps in which ``num_seqs`` sequences decode (0 if there is none), and
    the TTFTs in seconds.
    """
    waiting = iter(requests)
    sent: dict[str, float] = {}
    ttfts: list[float] = []
    tokens, seconds = 0, 0.0

    def add(fresh: Iterator[Request]) -> None:
        for request in fresh:
            sent[request.request_id] = time.perf_counter()
            engine.handle(Add(request))

    add(islice(waiting, num_seqs))
    while engine.scheduler.sequences.has_work():
        decoding = all_decode(engine, num_seqs)
        begun = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        if decoding:
            tokens += len(outputs)
            seconds += now - begun
        ttfts += [
            now - sent.pop(output.request_id) for output in outputs if output.request_id in sent
        ]
        add(islice(waiting, sum(bool(output.finish) for output in outputs)))
    return tokens / seconds if seconds else 0.0, ttfts


def all_decode(engine: Engine, num_seqs: int) -> bool:
    running = engine.scheduler.sequences.running
    return len(running) == num_seqs and all(seq.num_lacking_tokens == 1 for seq in running)
