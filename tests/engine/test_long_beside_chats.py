"""One long request beside many short chats, on the built-in model."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import pytest

from cllm import LLM
from cllm.core.output import FinishReason
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.commands import Add

pytestmark = [pytest.mark.llama, pytest.mark.slow]

CHATS = 31
PROMPT, ANSWER = 30, 60  # tokens
LONG, LONG_ANSWER = 3000, 60
NUM_LONG = 4  # one after the other: a single one is computed in about ten parts


class Load:
    """As many chats as CHATS at all times, each with a prompt of its own.

    Time is the CPU time of this process, so other processes hardly change it.
    """

    def __init__(self, llm: LLM) -> None:
        self.engine = llm._engine
        self.engine.clock = time.process_time
        self.random, self.numbers = random.Random(5), itertools.count()
        self.num_tokens = 0  # of all chats
        self.long: list[float] = []  # when each token of the long request came
        self.finished: list[str] = []
        for _ in range(CHATS):
            self.add(f"chat{next(self.numbers)}", PROMPT, ANSWER)

    def add(self, name: str, size: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokens = self.random.choices(range(50, 900), k=size)
        assert self.engine.handle(Add(Request(name, tokens, params))) == []

    def step(self) -> None:
        for output in self.engine.step():
            if output.request_id.startswith("long"):
                self.long.append(time.process_time())
            else:
                self.num_tokens += 1
            if output.finish:
                assert output.finish == FinishReason.LENGTH
                self.finished.append(output.request_id)
                if output.request_id.startswith("chat"):
                    self.add(f"chat{next(self.numbers)}", PROMPT, ANSWER)

    def measure(self, until) -> float:
        """Return the chats' tokens per second until ``until()`` holds."""
        begun, tokens = time.process_time(), self.num_tokens
        while not until():
            self.step()
        return (self.num_tokens - tokens) / (time.process_time() - begun)

    def measure_chats(self, count: int) -> float:
        end = self.num_tokens + count * CHATS
        return self.measure(lambda: self.num_tokens >= end)


def test_chats_keep_half_of_their_speed_beside_a_long_request():
    """All are served, the long request advances, and the chats are as fast as before once it has
    ended.
    """
    with LLM() as llm:
        load = Load(llm)
        load.measure_chats(2 * ANSWER)  # learns the costs
        before = statistics.median(load.measure_chats(ANSWER) for _ in range(3))
        added = time.process_time()
        during = []
        for i in range(NUM_LONG):
            load.add(f"long{i}", LONG, LONG_ANSWER)
            during.append(load.measure(lambda i=i: f"long{i}" in load.finished))
        after = max(load.measure_chats(ANSWER) for _ in range(3))
    assert len(load.long) == NUM_LONG * LONG_ANSWER
    gaps = [later - earlier for earlier, later in itertools.pairwise([added, *load.long])]
    assert max(gaps) < 10
    # half and all of the speed, with a margin for noise
    assert statistics.mean(during) >= 0.4 * before
    assert after >= 0.8 * before
