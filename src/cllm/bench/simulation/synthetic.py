"""Synthetic traces: chats, shared prefixes, long prompts."""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import count, islice

import msgspec
import numpy as np

from cllm.observe.trace_file import TraceEntry

# tokens; small, so that short prompts can share. Every prompt is a whole number of blocks
BLOCK_SIZE = 16
NUM_SYSTEM_PROMPTS, SYSTEM_PROMPT = 8, 1024
MEAN_TURNS = 5
NUM_MODELS = 3


class EntrySource:
    """A source of lengths, times and new blocks. The same seed gives the same ones."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rng = np.random.default_rng(seed)
        self._rate = rate
        self._ids = count()

    def arrivals(self, share: float = 1.0) -> Iterator[float]:
        """Yield arrival times in milliseconds: a Poisson process with ``share`` of the rate."""
        at = 0.0
        while True:
            at += self.rng.exponential(1000 / (self._rate * share))
            yield at

    def lognormal(self, median: float, sigma: float = 0.8) -> float:
        """Return a random value of at most 16 times the median, so that one request does not decide
        the result.
        """
        return min(float(self.rng.lognormal(np.log(median), sigma)), 16 * median)

    def blocks(self, num_tokens: float) -> list[int]:
        """Return new blocks for ``num_tokens`` tokens, at least one block."""
        return [next(self._ids) for _ in range(max(1, round(num_tokens / BLOCK_SIZE)))]

    def entry(
        self, at: float, blocks: list[int], output_length: float, account: str = ""
    ) -> TraceEntry:
        return TraceEntry(
            timestamp=round(at),
            input_length=len(blocks) * BLOCK_SIZE,
            output_length=max(1, round(output_length)),
            hash_ids=blocks,
            account=account,
            block_size=BLOCK_SIZE,
        )


def chat(source: EntrySource) -> Iterator[TraceEntry]:
    for at in source.arrivals():
        yield source.entry(at, source.blocks(source.lognormal(200)), source.lognormal(200))


def shared_prefix(source: EntrySource) -> Iterator[TraceEntry]:
    systems = [source.blocks(SYSTEM_PROMPT) for _ in range(NUM_SYSTEM_PROMPTS)]
    shares = np.array([1 / (i + 1) for i in range(NUM_SYSTEM_PROMPTS)])
    for at in source.arrivals():
        system = systems[int(source.rng.choice(NUM_SYSTEM_PROMPTS, p=shares / shares.sum()))]
        yield source.entry(at, system + source.blocks(source.lognormal(100)), source.lognormal(100))


def multi_turn(source: EntrySource) -> Iterator[TraceEntry]:
    """Yield requests in order of time.

    Conversations are generated whole, so later requests wait in a heap.
    """
    ahead: list[tuple[float, int, TraceEntry]] = []
    numbers = count()
    for begun in source.arrivals(1 / MEAN_TURNS):
        while ahead and ahead[0][0] <= begun:
            yield heapq.heappop(ahead)[-1]
        at, said = begun, list[int]()
        for _ in range(source.rng.geometric(1 / MEAN_TURNS)):
            said = said + source.blocks(source.lognormal(60))
            answer = source.lognormal(150)
            heapq.heappush(ahead, (at, next(numbers), source.entry(at, said, answer)))
            said = said + source.blocks(answer)
            at += 1000 * source.lognormal(20)


def long_prefill(source: EntrySource) -> Iterator[TraceEntry]:
    for number, at in enumerate(source.arrivals()):
        is_long = number % 5 == 4
        question, answer = (8000, 100) if is_long else (200, 200)
        yield source.entry(at, source.blocks(source.lognormal(question)), source.lognormal(answer))


def two_accounts(source: EntrySource) -> Iterator[TraceEntry]:
    for at in source.arrivals():
        account = "heavy" if source.rng.random() < 0.9 else "light"
        yield source.entry(at, source.blocks(source.lognormal(200)), source.lognormal(200), account)


def hot_prefix(source: EntrySource) -> Iterator[TraceEntry]:
    system = source.blocks(SYSTEM_PROMPT)
    for at in source.arrivals():
        prefix = system if source.rng.random() < 0.5 else []
        yield source.entry(at, prefix + source.blocks(source.lognormal(100)), source.lognormal(100))


def hot_account(source: EntrySource) -> Iterator[TraceEntry]:
    system = source.blocks(SYSTEM_PROMPT)
    for at in source.arrivals():
        if source.rng.random() < 0.8:
            prompt, account = system + source.blocks(source.lognormal(100)), "hot"
        else:
            prompt, account = (
                source.blocks(source.lognormal(200)),
                f"other-{source.rng.integers(8)}",
            )
        yield source.entry(at, prompt, source.lognormal(100), account)


def models(source: EntrySource) -> Iterator[TraceEntry]:
    shares = 1 / np.arange(1, NUM_MODELS + 1)
    for entry in chat(source):
        number = bisect(np.cumsum(shares / shares.sum()), source.rng.random())
        yield msgspec.structs.replace(entry, model=f"model-{number}")


WORKLOADS: dict[str, tuple[Callable[[EntrySource], Iterator[TraceEntry]], str]] = {
    "chat": (chat, "unrelated prompts of about 200 tokens, answers of about 200"),
    "shared-prefix": (
        shared_prefix,
        "one of 8 system prompts of 1,024 tokens, then about 100; answers of about 100",
    ),
    "multi-turn": (
        multi_turn,
        "conversations of about 5 turns, 20 s apart; each prompt contains all earlier turns",
    ),
    "long-prefill": (long_prefill, "chat, but every fifth prompt has about 8,000 tokens"),
    "models": (models, "chat with three models, requested in the proportions of 6, 3 and 2"),
    "hot-prefix": (
        hot_prefix,
        "half of the prompts begin with the same 1,024 tokens; about 100 tokens follow, or are all",
    ),
    "hot-key": (
        hot_account,
        "four of five requests are of one account and share 1,024 tokens; eight others send chat",
    ),
    "two-keys": (
        two_accounts,
        "chat with two accounts: heavy sends nine of ten requests, light one",
    ),
}


def synthesize(workload: str, num_requests: int, rate: float, seed: int) -> list[TraceEntry]:
    """Return the first ``num_requests`` requests of a workload, ``rate`` per second on average."""
    make, _ = WORKLOADS[workload]
    return list(islice(make(EntrySource(seed, rate)), num_requests))
