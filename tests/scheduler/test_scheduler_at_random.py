"""Random requests: every sequence gets the expected text or a reason, and the invariants always
hold.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import ClassVar

import pytest
from conftest import FakeEngine, repeat
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from naive_cache import NaiveCache

import cllm.scheduler
from cllm.backends.fake.backend import Costs, FailingSteps
from cllm.core.request import Priority, Request
from cllm.kv_cache import cache, checkpoints, layouts, matching, model_state, snapshots

CONTEXT = 64
PROMPTS = st.sampled_from([1, 2, 7, 17, 30, 38, 50, 63])
OUTPUTS = st.sampled_from([0, 1, 2, 3, 20, 55, None])


BOOKKEEPING = {str(path) for path in Path(cllm.scheduler.__path__[0]).glob("*.py")} | {
    module.__file__ for module in (cache, checkpoints, layouts, matching, model_state, snapshots)
}


class Bug(Exception):
    """An exception that no code expects."""


@contextmanager
def raise_in_call(number: int) -> Iterator[None]:
    """Make the ``number``-th call of a function of the scheduler or the KV cache raise Bug instead
    of doing anything.
    """

    def trace(frame: FrameType, event: str, arg: object) -> None:
        nonlocal number
        if frame.f_code.co_filename in BOOKKEEPING and not frame.f_code.co_name.startswith("<"):
            number -= 1
            if number == 0:
                sys.settrace(before)
                raise Bug

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class SchedulerMachine(RuleBasedStateMachine):
    """Sends more than the pool holds: sequences of all classes and lengths that share prefixes,
    expire, and are aborted.

    The engine checks the conservation laws after every step. The fake backend raises an error if a
    row or an operation does not match the contents of its cells.
    """

    options: ClassVar[dict] = {}
    is_naive = False
    uses_adapters = False
    other_ends: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @initialize(
        num_cells=st.integers(CONTEXT + 1, 300),
        num_tokens=st.integers(8, 20),
        num_talkers=st.integers(0, 7),
    )
    def start(self, num_cells: int, num_tokens: int, num_talkers: int) -> None:
        """Create an engine with a pool and a step of some size, and sequences that decode for long."""
        limits = {
            "context_length": CONTEXT,
            "max_num_seqs": 8,
            "length": CONTEXT,
            "max_num_batched_tokens": num_tokens,
        }
        pool = {} if "max_num_seqs" in self.options else {"num_cells": num_cells}
        self.engine = FakeEngine(**limits | pool | self.options)
        if self.is_naive:
            cache = self.engine.scheduler.sequences.kv_cache
            self.engine.scheduler.sequences.kv_cache = NaiveCache(
                cache.cells.size, CONTEXT, cache.seq_ids.size, cache.layout
            )
        # far too low, so that more sequences are admitted than fit
        self.engine.scheduler.sequences.length_estimates.estimate_length = lambda seq: (
            seq.num_tokens
        )
        for _ in range(num_talkers):
            self.send([7 * len(self.requests)] * 2)

    def send(self, prompt: list[int], **params) -> None:
        name = f"R{len(self.requests)}"
        self.requests[name] = self.engine.add(
            name, [token % 250 for token in prompt], ignore_eos=True, **params
        )

    @rule(
        size=PROMPTS,
        output=OUTPUTS,
        priority=st.sampled_from(Priority),
        account=st.sampled_from("ab"),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        begin=st.integers(0, 9),
        queue_timeout=st.sampled_from([None, None, None, 3.0]),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        num_base_tokens=st.sampled_from([None, None, None, 0, 5, 16, 20, 40]),
        boundaries=st.sampled_from([(), (6,), (12, 30), (3, 36)]),
    )
    def arrive(
        self,
        size: int,
        output: int | None,
        priority: Priority,
        account: str,
        n: int,
        begin: int,
        queue_timeout: float | None,
        prompt_logprobs: int | None,
        num_base_tokens: int | None,
        boundaries: tuple[int, ...],
    ) -> None:
        """Send a request whose prompt may begin like that of an earlier one, and which may have an
        adapter from its beginning or from a later token on.
        """
        before = [*self.requests.values()][-begin].prompt if 0 < begin <= len(self.requests) else []
        prompt = [*before, *(len(self.requests) + i for i in range(CONTEXT))][:size]
        adapters = {}
        if self.uses_adapters and num_base_tokens is not None:
            begin = num_base_tokens if num_base_tokens < len(prompt) else 0
            adapters = {
                "adapters": (("poet", 1.0),),
                "num_base_tokens": begin,
                "cache_salt": "" if begin else "poet",
            }
        self.send(
            prompt,
            **adapters,
            account=account,
            priority=priority,
            n=n,
            max_tokens=output,
            queue_timeout=queue_timeout,
            prompt_logprobs=prompt_logprobs,
            boundaries=tuple(at for at in boundaries if at < size),
        )

    @rule(count=st.sampled_from([1, 1, 2, 4, 15, 30]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.now += 0.1
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        name = data.draw(st.sampled_from([*self.requests]))
        index = None if whole else data.draw(st.integers(0, self.requests[name].params.n - 1))
        self.engine.abort(name, index)
        self.aborted.add(name)

    @rule(number=st.integers(0, 50), yields=st.booleans())
    def stop_or_go_on_reading(self, number: int, yields: bool) -> None:
        """The client of a request, which may have ended, does not read, or does again."""
        self.engine.scheduler.sequences.set_yielding(f"R{number}", yields=yields)
        self.engine.scheduler.sequences.check()

    def teardown(self) -> None:
        self.engine.finish(max_steps=20_000)
        ends = self.engine.ends()
        assert ends.keys() == {
            f"{name}.{i}" for name in self.requests for i in range(self.requests[name].params.n)
        }
        assert sum(bool(output.finish) for output in self.engine.outputs) == len(ends), (
            "no sequence ends twice"
        )
        for name, request in self.requests.items():
            space = CONTEXT - len(request.prompt)
            limit = (
                space
                if request.params.max_tokens is None
                else min(space, request.params.max_tokens)
            )
            stride = 2 if request.adapters else 1
            expected = [(request.prompt[-1] + stride * (1 + i)) % 256 for i in range(limit)]
            for index in range(request.params.n):
                tokens, end = self.engine.tokens(name, index), ends[f"{name}.{index}"]
                assert tokens == expected[: len(tokens)], f"{name}.{index} has a wrong text"
                assert end != "length" or len(tokens) == len(expected), (
                    f"{name}.{index} ended too early"
                )
                assert end in ("length", "abort", "timeout", *self.other_ends), end
                assert end != "abort" or name in self.aborted
                assert end != "timeout" or request.queue_timeout is not None
        assert self.engine.scheduler.sequences.kv_cache.cells.num_held == 0


class FaultyMachine(SchedulerMachine):
    """The same, while the backend fails and functions of the scheduler raise exceptions that no
    code expects.
    """

    options: ClassVar[dict] = {"engine_check": False, "engine_ram_cache_bytes": 500}
    other_ends = ("error",)

    @rule(times=st.integers(1, 3))
    def let_the_backend_fail(self, times: int) -> None:
        self.engine.backend._failing = FailingSteps(
            raise_at_step=self.engine.backend.num_steps + 1, raise_times=times
        )

    @rule(number=st.integers(1, 60))
    def step_with_a_bug(self, number: int) -> None:
        with raise_in_call(number):
            outputs = self.engine.engine.step()
        self.engine.outputs += outputs
        self.engine.scheduler.sequences.check()


LAYOUTS = {
    "unified": {},
    "saved": {"num_spare_ids": 3, "engine_ram_cache_bytes": 300},
    "partitioned": {"max_num_seqs": 3, "engine_ram_cache_bytes": 300},
    "checkpoint": {"max_num_seqs": 3, "max_taken_back": 0, "engine_ram_cache_bytes": 300},
    "hybrid": {
        "max_num_seqs": 3,
        "max_taken_back": 0,
        "checkpoint_bytes": 5,
        "engine_ram_cache_bytes": 300,
    },
    "taking back": {
        "max_num_seqs": 3,
        "max_taken_back": 2,
        "checkpoint_bytes": 5,
        "engine_speculation": "prompt_lookup",
        "engine_ram_cache_bytes": 300,
    },
    "hybrid that shares cells": {
        "max_taken_back": 4,
        "checkpoint_bytes": 5,
        "engine_ram_cache_bytes": 300,
        "engine_disk_cache_bytes": 300,
    },
    "speculating": {"engine_speculation": "prompt_lookup"},
    "first come first served": {"engine_policy": "fcfs"},
    # prompts of more than 12 tokens are long
    "long and short prompts": {
        "engine_prefill_share": 0.5,
        "layout": "paged",
        "costs": Costs(step=0.01, row=0.005, token=0.05),
    },
}


@pytest.fixture(autouse=True)
def save_short_prefixes(monkeypatch):
    monkeypatch.setattr(snapshots, "MIN_SAVED_TOKENS", 10)
    monkeypatch.setattr(checkpoints, "MIN_SAVED_TOKENS", 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overcommitted_pool_keeps_invariants(layout: str) -> None:
    machine = type("Machine", (SchedulerMachine,), {"options": LAYOUTS[layout]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=repeat(25, 8), stateful_step_count=30)
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, "paged"])
def test_adapters_never_compute_with_cells_of_others(layout: str, caplog) -> None:
    options = LAYOUTS.get(layout, {"layout": "paged"})
    machine = type("Machine", (SchedulerMachine,), {"options": options, "uses_adapters": True})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=repeat(25, 8), stateful_step_count=30)
    )
    assert not caplog.records, "a step failed and was repeated"


@pytest.mark.parametrize("layout", ["unified", "partitioned"])
def test_scheduler_works_with_naive_cache(layout: str) -> None:
    machine = type("Machine", (SchedulerMachine,), {"options": LAYOUTS[layout], "is_naive": True})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=30))


def test_exceptions_end_only_sequences_involved() -> None:
    run_state_machine_as_test(
        FaultyMachine, settings=settings(max_examples=repeat(40, 10), stateful_step_count=30)
    )


def test_pool_runs_out_during_prompts_of_two_classes() -> None:
    """Decoding sequences take the last cells in a step that was to serve an interactive and a batch
    prompt.

    Such a step is rare, so the numbers come from many seeds.
    """
    for seed in range(repeat(200, 40)):
        random = Random(seed)
        num_talkers, sizes = random.randint(1, 6), [random.randint(8, 60), random.randint(8, 60)]
        num_tokens = max(8, num_talkers + random.randint(1, 12))
        before, num_steps = random.randint(0, 15), sum(sizes) // (num_tokens - num_talkers)
        num_cells = (
            num_talkers * (2 + before) + sum(sizes) + random.randint(0, num_talkers * num_steps)
        )
        limits = {"context_length": CONTEXT, "max_num_seqs": 8, "length": CONTEXT}
        engine = FakeEngine(
            **limits, max_num_batched_tokens=num_tokens, num_cells=max(CONTEXT + 1, num_cells)
        )
        # far too low, so that more sequences are admitted than fit
        engine.scheduler.sequences.length_estimates.estimate_length = lambda seq: seq.num_tokens
        requests = [engine.add(f"T{i}", [7 * i] * 2, ignore_eos=True) for i in range(num_talkers)]
        for _ in range(before):
            engine.step()
        requests.append(engine.add("B", [100] * sizes[0], priority=Priority.BATCH, max_tokens=3))
        for _ in range(random.randint(0, sizes[0] // (num_tokens - num_talkers))):
            engine.step()
        requests.append(
            engine.add("A", [200] * sizes[1], priority=Priority.INTERACTIVE, max_tokens=3)
        )
        engine.finish()
        assert all(engine.tokens(r.request_id) == engine.right_tokens(r) for r in requests), (
            f"seed {seed}"
        )
