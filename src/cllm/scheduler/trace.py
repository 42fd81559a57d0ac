"""A record of the last steps and their reasons, for ``cllm explain``."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from cllm.core.output import Stats

if TYPE_CHECKING:
    from cllm.core.batch import Batch
    from cllm.scheduler.scheduler import Scheduler

MAX_STEPS = 512
MAX_NAMED = 100  # waiting sequences listed in one answer


class Step(msgspec.Struct, frozen=True):
    """One step: its contents, its duration in seconds, and why the head of the queue was not
    admitted.
    """

    number: int
    at: float
    seconds: float
    num_rows: int
    num_prefill_tokens: int
    prefill_budget: int
    num_guesses: int
    num_accepted: int
    num_operations: int
    num_running: int
    num_waiting: int
    blocked: str


class Waiter(msgspec.Struct, frozen=True):
    """A waiting sequence: how long it has waited (seconds), its state, and what it waits for."""

    name: str
    key: str
    priority: str
    num_tokens: int
    waited: float
    status: str
    reason: str


class Explanation(msgspec.Struct, frozen=True):
    """The state of the engine: the last steps, the running sequences, the first MAX_NAMED waiting
    ones, and costs.

    row_seconds: seconds of a step, by its number of decoding rows. token_seconds: seconds per
    prefill token.
    """

    steps: list[Step]
    running: list[str]
    num_waiting: int
    waiting: list[Waiter]
    row_seconds: dict[int, float]
    token_seconds: float | None
    cells: str


def explain(scheduler: Scheduler, now: float, num_steps: int) -> Explanation:
    """Return the last ``num_steps`` steps, the running sequences, and why the others wait."""
    head = scheduler.waiting.head(now)
    reasons = [] if head is None else [(head, scheduler.blocked or "the next step")]
    behind = "" if head is None else f"behind {head.name}, the head of the queue"
    others = ((seq, behind) for seq in scheduler.waiting if seq is not head)
    waiting = chain(reasons, scheduler.deferred.reasons.items(), others)
    return Explanation(
        steps=list(scheduler.trace)[-num_steps:],
        running=[repr(seq) for seq in scheduler.running],
        num_waiting=len(scheduler.deferred) + len(scheduler.waiting),
        waiting=[
            Waiter(
                name=seq.name,
                key=seq.request.key,
                priority=seq.request.priority.name.lower(),
                num_tokens=seq.num_tokens,
                waited=now - seq.arrived,
                status=seq.status.value,
                reason=reason,
            )
            for seq, reason in islice(waiting, MAX_NAMED)
        ],
        row_seconds=dict(sorted(scheduler.cost.per_rows.items())),
        token_seconds=scheduler.cost.per_token,
        cells=str(scheduler.ledger),
    )


def step_of(
    scheduler: Scheduler,
    batch: Batch,
    now: float,
    num_rows: int,
    num_prefill_tokens: int,
    num_guesses: int,
    num_accepted: int,
) -> Step:
    """Return the record of the step that has just ended with ``batch``."""
    return Step(
        number=scheduler.num_steps,
        at=scheduler.begun,
        seconds=now - scheduler.begun,
        num_rows=num_rows,
        num_prefill_tokens=num_prefill_tokens,
        prefill_budget=scheduler.budget,
        num_guesses=num_guesses,
        num_accepted=num_accepted,
        num_operations=len(batch.operations),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.deferred),
        blocked=scheduler.blocked,
    )


def stats_of(scheduler: Scheduler) -> Stats:
    """Return the state of the scheduler, for gauges and counters."""
    cells, ledger = scheduler.ledger.cells, scheduler.ledger
    return Stats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.deferred),
        num_seq_ids=ledger.seq_ids.size,
        num_seq_ids_in_use=ledger.seq_ids.num_leased,
        num_cells=cells.size,
        num_cells_held=cells.num_held,
        num_cells_idle=cells.num_idle,
        num_steps=scheduler.num_steps,
        num_parked=scheduler.num_parked,
        num_prefill_tokens=scheduler.num_prefill_tokens,
        num_guesses=scheduler.num_guesses,
        num_accepted=scheduler.num_accepted,
        num_ram_bytes=ledger.tiers.num_ram_bytes,
        num_disk_bytes=ledger.tiers.num_disk_bytes,
        num_waiting_tokens=scheduler.waiting.num_tokens,
        waiting_seconds=seconds_of_waiting(scheduler),
        prompt_token_seconds=scheduler.cost.prefill(1) * scheduler.expected.computed_share,
        step_seconds=scheduler.cost.decode(max(1, len(scheduler.running))),
        place_seconds=seconds_of_place(scheduler),
    )


def seconds_of_place(scheduler: Scheduler) -> float:
    """Return the estimated seconds from one freed seq_id to the next while all are taken.

    0 until a step with only decoding rows has been observed.
    """
    rows = scheduler.ledger.seq_ids.size
    decoding = scheduler.expected.output * scheduler.cost.decode(rows) / rows
    return decoding + scheduler.cost.prefill(1) * scheduler.expected.computed if decoding else 0.0


def seconds_of_waiting(scheduler: Scheduler) -> float:
    """Return the estimated seconds until all waiting sequences have been computed, by the learned
    step costs.
    """
    num_waiting = len(scheduler.waiting) + len(scheduler.deferred)
    if not num_waiting:
        return 0.0
    rows = max(1, min(scheduler.ledger.seq_ids.size, num_waiting + len(scheduler.running)))
    decoding = num_waiting * scheduler.expected.output * scheduler.cost.decode(rows) / rows
    return decoding + scheduler.cost.prefill(scheduler.waiting.num_tokens)
