"""Measurements of the backend and of the scheduler alone, by which the rows about scheduling are
judged. Each runs in a process of its own: see in_process.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import msgspec
import numpy as np

from cllm.backends.base import Backend
from cllm.backends.fake.backend import FakeBackend
from cllm.bench.bare_engine import make_sequences, prefill
from cllm.bench.compare.rows import COMPUTED, OUTPUT, QUEUED, RESTORED, TTFT
from cllm.core.batch import Batch, Copy, Load, Operation, Row, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_backend, build_engine
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.scheduler.report import collect_stats

LAYOUTS = ("unified", "partitioned")
RESTORED_TOKENS = 1000
FEW_WAITING, MANY_WAITING = 10, 10_000
STEPS, WARM_UP_STEPS = 500, 50


class SharedPrefixJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The least work for ``prompts`` with the same beginning. The beginning is computed once. Then
    the rest of ``num_seqs`` prompts is computed in one batch, they are continued by ``num_tokens``
    tokens each, and the next prompts follow.
    """

    model: str
    prompts: list[list[int]]
    num_seqs: int
    num_tokens: int

    def run(self) -> dict[str, float]:
        """Return the speed, the mean TTFT and the computed prompt tokens of the faster layout."""
        results = []
        for layout in LAYOUTS:
            longest = max(map(len, self.prompts))
            backend = open_backend(
                self.model,
                context_length=longest + self.num_tokens,
                max_num_seqs=self.num_seqs,
                max_num_batched_tokens=self.num_seqs * (longest - count_shared(self.prompts)),
                layout=layout,
            )
            results.append(self._run(backend))
            backend.close()
        return max(results, key=lambda values: values[OUTPUT])

    def _run(self, backend: Backend) -> dict[str, float]:
        seqs = make_sequences(map(greedy, self.prompts), backend.info.context_length)
        num_shared = count_shared(self.prompts)
        prefill(backend, seqs[0], min(num_shared, backend.info.max_num_batched_tokens))  # warm-up
        backend.forward(Batch([], [Trim(0, 0)]))
        begun = sent = time.perf_counter()
        waits = 0.0
        prefill(backend, seqs[0], num_shared)
        for first in range(0, len(seqs), self.num_seqs):
            wave = seqs[first : first + self.num_seqs]
            waits += len(wave) * (self._start(backend, wave, num_shared) - sent)
            for _ in range(self.num_tokens - 1):
                rows = [Row(seq, seq.num_tokens - 1, 1, 1) for seq in wave]
                logits = backend.forward(Batch(rows, []))
                for seq, token in zip(wave, np.argmax(logits, axis=1).tolist(), strict=True):
                    seq.append(token)
            sent = time.perf_counter()
        return {
            OUTPUT: len(seqs) * self.num_tokens / (sent - begun),
            TTFT: 1e3 * waits / len(seqs),
            COMPUTED: num_shared + sum(len(prompt) - num_shared for prompt in self.prompts),
        }

    def _start(self, backend: Backend, wave: list[Sequence], num_shared: int) -> float:
        """Compute the prompts of a wave. Return the time of their first tokens."""
        for seq_id, seq in enumerate(wave):
            seq.seq_id = seq_id
        operations: list[Operation] = [Trim(0, num_shared)]
        for seq_id in range(1, len(wave)):
            operations += [Trim(seq_id, 0), Copy(0, seq_id, num_shared)]
        rows = [Row(seq, num_shared, seq.num_tokens - num_shared, 1) for seq in wave]
        np.argmax(backend.forward(Batch(rows, operations)), axis=1)
        now = time.perf_counter()
        for seq in wave:
            seq.append(1)
        return now


class RestoreJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The time to load a prefix from RAM, divided by the time to compute it."""

    model: str

    def run(self) -> dict[str, float]:
        backend = open_backend(self.model, context_length=RESTORED_TOKENS + 1, max_num_seqs=2)
        tokens = [7 * i % 1000 for i in range(RESTORED_TOKENS)]
        (seq,) = make_sequences([greedy(tokens)], backend.info.context_length)
        begun = time.perf_counter()
        prefill(backend, seq, RESTORED_TOKENS)
        computed = time.perf_counter()
        backend.forward(Batch([], [Save(0, 0), Trim(1, 0)]))
        saved = time.perf_counter()
        backend.forward(Batch([], [Load(0, 1, RESTORED_TOKENS)]))
        loaded = time.perf_counter()
        backend.close()
        return {RESTORED: (loaded - saved) / (computed - begun)}


class QueueJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The time that the scheduler takes for a step with many waiting requests, and with few."""

    def run(self) -> dict[str, float]:
        gc.disable()  # as in the engine process
        few, many = (1e6 * measure_step(count) for count in (FEW_WAITING, MANY_WAITING))
        return {
            f"µs to schedule a step, {FEW_WAITING} waiting": few,
            f"µs to schedule a step, {MANY_WAITING:,} waiting": many,
            QUEUED: many / few,
        }


def measure_step(num_waiting: int) -> float:
    """Return the mean seconds to schedule a step and to take its results, while a number of
    requests of 500 accounts waits.
    """
    backend = FakeBackend(
        context_length=512, max_num_seqs=32, max_num_batched_tokens=512, length=10**9
    )
    engine = build_engine(backend, EngineParams(speculation="off"))
    num_sent, seconds = 0, []
    for step in range(STEPS):
        while num_sent == 0 or len(engine.scheduler.sequences.waiting) < num_waiting:
            engine.handle(Add(queued_request(num_sent)))
            num_sent += 1
        seconds.append(time_step(engine, step * 0.01))
    return statistics.fmean(seconds[WARM_UP_STEPS:])


def queued_request(number: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = [number % 250, *range(40)]
    return Request(str(number), prompt, params, account=f"key{number % 500}")


def time_step(engine: Engine, now: float) -> float:
    """Run a step, and return the seconds that the scheduler takes for it."""
    begun = time.perf_counter()
    batch = engine.scheduler.schedule(now)
    seconds = time.perf_counter() - begun
    assert batch is not None
    logits = engine.backend.forward(batch)
    tokens = engine.sampler.sample(batch, logits) if batch.num_samples else []
    begun = time.perf_counter()
    engine.scheduler.update(batch, tokens, now + 0.005)
    collect_stats(engine.scheduler)
    return seconds + time.perf_counter() - begun


def open_backend(model: str, **params: Any) -> Backend:
    return build_backend(EngineParams(path=model, kv_memory=1 << 40, **params))


def greedy(prompt: list[int]) -> Request:
    return Request("", prompt, SamplingParams(temperature=0))


def count_shared(prompts: list[list[int]]) -> int:
    """Return how many tokens at their beginning all prompts share: fewer than the shortest has."""
    shortest = min(map(len, prompts))
    columns = np.array([prompt[:shortest] for prompt in prompts])
    return int((columns == columns[0]).all(axis=0).argmin())
