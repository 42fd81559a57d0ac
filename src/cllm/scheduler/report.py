"""Reports on a scheduler: its recent decisions with their reasons, and the figures for gauges and
counters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import msgspec

from cllm.core.output import Stats
from cllm.core.sequence import Sequence, Status
from cllm.scheduler.reasons import DecodingFirst, PrefillBudgetUsed
from cllm.scheduler.scheduler import Scheduler
from cllm.scheduler.sequences import Sequences
from cllm.scheduler.trace import MAX_NAMED, Explanation, Phase, SequenceState


def explain(scheduler: Scheduler, now: float, num_steps: int) -> Explanation:
    """Return the last ``num_steps`` steps, the running sequences, and why the others wait."""
    sequences = scheduler.sequences
    cells = sequences.kv_cache.cells
    waiting: list[Iterable[tuple[Sequence, object]]] = [sequences.deferred.reasons.items()]
    head = sequences.waiting.head(now)
    if head is not None:
        blocked = scheduler.step.blocked
        # these concern running sequences
        if isinstance(blocked, (PrefillBudgetUsed, DecodingFirst)):
            blocked = None
        behind = f"it is behind {head.name}, the head of the queue"
        behind += f" ({blocked})" if blocked else ""
        others = ((seq, behind) for seq in sequences.waiting if seq is not head)
        waiting = [[(head, blocked or "it can be admitted in the next step")], *waiting, others]
    return Explanation(
        steps=[
            msgspec.structs.replace(step, blocked=str(step.blocked))
            for step in [*scheduler.statistics.steps][-num_steps:]
        ],
        running=[describe(seq, seq.wait_reason, sequences, now) for seq in sequences.running],
        num_waiting=len(sequences.deferred) + len(sequences.waiting),
        waiting=[
            describe(seq, reason, sequences, now)
            for seq, reason in islice(chain.from_iterable(waiting), MAX_NAMED)
        ],
        row_seconds=dict(sorted(scheduler.cost.per_rows.items())),
        token_seconds=scheduler.cost.per_token,
        cells=f"{cells.size} KV cells: {cells.num_held} in use, {cells.num_idle} cached, "
        f"{cells.num_free} free",
    )


def describe(seq: Sequence, reason: object, sequences: Sequences, now: float) -> SequenceState:
    """Return the state of a sequence that waits, or has waited, for ``reason``."""
    first, num_output, kv_cache = seq.first_token_at, seq.num_output_tokens, sequences.kv_cache
    phase: Phase = "queued"
    begun, num_cells, num_private = seq.arrived, 0, 0
    if seq.status is Status.PARKED:
        phase, begun = "parked", seq.waits_since
    elif seq.seq_id >= 0:
        num_cells = kv_cache.count_cells(seq.seq_id)
        num_private = kv_cache.count_private_cells(seq.seq_id)
        if seq.num_lacking_tokens > 1 or first is None:
            phase, begun = "prefill", seq.arrived if seq.admitted is None else seq.admitted
        else:
            phase, begun = "decode", first
    times = seq.sum_up_times()
    rate = None
    if first is not None and num_output > 1 and now > first:
        rate = round((num_output - 1) / (now - first), 2)
    return SequenceState(
        name=seq.name,
        account=seq.request.account,
        priority=seq.request.priority.name.lower(),
        phase=phase,
        phase_seconds=round(now - begun, 3),
        age=round(now - seq.arrived, 3),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens or 0,
        num_computed_tokens=seq.num_computed_tokens,
        num_output_tokens=num_output,
        num_cells=num_cells,
        num_shared_cells=num_cells - num_private,
        num_parked=seq.num_parked,
        tokens_per_second=rate,
        queued=round_seconds(times.queued),
        prefill=round_seconds(times.prefill),
        reason=str(reason),
    )


def round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def collect_stats(scheduler: Scheduler) -> Stats:
    """Return the state of the scheduler, for gauges and counters."""
    sequences = scheduler.sequences
    kv_cache = sequences.kv_cache
    cells, snapshots = kv_cache.cells, kv_cache.snapshots
    counts = scheduler.statistics
    return Stats(
        num_running=len(sequences.running),
        num_waiting=len(sequences.waiting) + len(sequences.deferred),
        num_seq_ids=kv_cache.seq_ids.size,
        num_seq_ids_in_use=kv_cache.seq_ids.num_leased,
        num_cells=cells.size,
        num_cells_held=cells.num_held,
        num_cells_idle=cells.num_idle,
        num_steps=counts.num_steps,
        num_parked=counts.num_parked,
        num_prefill_tokens=counts.num_prefill_tokens,
        num_guesses=counts.num_guesses,
        num_accepted=counts.num_accepted,
        num_checkpoint_bytes=sequences.kv_cache.checkpoints.num_bytes,
        num_ram_bytes=snapshots.num_ram_bytes,
        num_disk_bytes=snapshots.num_disk_bytes,
        num_waiting_tokens=sequences.waiting.num_tokens,
        waiting_seconds=estimate_waiting_seconds(scheduler),
        prompt_token_seconds=(scheduler.cost.per_token or 0.0)
        * sequences.length_estimates.computed_share,
        step_seconds=scheduler.cost.estimate_decode(max(1, len(sequences.running))),
        slot_seconds=estimate_slot_seconds(scheduler),
        num_disk_failures=counts.num_disk_failures,
        num_rows=counts.num_rows,
        num_cache_queries=counts.num_cache_queries,
        num_thoughts_ended=counts.num_thoughts_ended,
        num_cell_hits=counts.num_hits["cells"],
        num_ram_hits=counts.num_hits["ram"],
        num_disk_hits=counts.num_hits["disk"],
        num_cells_shared=cells.num_leased - cells.num_held,
        num_ram_tokens=snapshots.count_tokens(snapshots.num_ram_bytes, len(snapshots.ram)),
        num_disk_tokens=snapshots.count_tokens(snapshots.num_disk_bytes, len(snapshots.files)),
    )


def estimate_slot_seconds(scheduler: Scheduler) -> float:
    """Return the estimated seconds from one freed seq_id to the next while all are taken.

    0 until a step with only decoding rows has been observed.
    """
    sequences = scheduler.sequences
    rows = sequences.kv_cache.seq_ids.size
    decoding = (
        sequences.length_estimates.likely_output * scheduler.cost.estimate_decode(rows) / rows
    )
    prefill = sequences.length_estimates.computed * (scheduler.cost.per_token or 0.0)
    return decoding + prefill if decoding else 0.0


def estimate_waiting_seconds(scheduler: Scheduler) -> float:
    """Return the estimated seconds until all waiting sequences have been computed, by the learned
    step costs.
    """
    sequences = scheduler.sequences
    num_waiting = len(sequences.waiting) + len(sequences.deferred)
    if not num_waiting:
        return 0.0
    rows = max(1, min(sequences.kv_cache.seq_ids.size, num_waiting + len(sequences.running)))
    decoding = (
        num_waiting
        * sequences.length_estimates.likely_output
        * scheduler.cost.estimate_decode(rows)
        / rows
    )
    return decoding + scheduler.cost.estimate_prefill(sequences.waiting.num_tokens)
