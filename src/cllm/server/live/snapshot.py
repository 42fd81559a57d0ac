"""Makes snapshots of the models, engines and unfinished requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import msgspec

from cllm import __version__
from cllm.config.settings import ServerSettings
from cllm.core.output import STAGES, Stats
from cllm.core.request import Priority
from cllm.core.vocabulary import Pieces
from cllm.process.in_flight_request import InFlightRequest
from cllm.process.member import Member
from cllm.process.pool import Pool
from cllm.scheduler.trace import MAX_NAMED, Explanation, SequenceState, Step
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.schema import EngineState, LiveStep, ModelState, QueueEntry, Snapshot
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

LOADING = "the model is being loaded"
RESTARTING = "its engine is being restarted"
MAX_PROMPT = 1000  # characters of a prompt that are shown
IN_STEP = "the engine computes a step, and begins new requests after it"


class Snapshots:
    """Makes snapshots, and remembers of the last one what the rates are computed from."""

    def __init__(
        self,
        registry: Registry,
        last_minute: LastMinute,
        settings: ServerSettings = ServerSettings(),  # noqa: B008  # frozen
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._prompts: WeakKeyDictionary[InFlightRequest, str] = WeakKeyDictionary()
        self._last_minute = last_minute
        self._at = 0.0
        self._counts: dict[str, tuple[float, int]] = {}  # tokens of output and prompts, by model
        self._stats: dict[Member, Stats] = {}

    def make(self, explanations: Mapping[Member, Explanation]) -> Snapshot:
        """Return the present state. ``explanations`` are the latest ones of the engines."""
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        models = [model for model in self._registry.models if model.parent is None]
        snapshot = Snapshot(
            round(time.time(), 3),
            __version__,
            self._registry.ready,
            [self._describe_model(model, explanations, elapsed) for model in models],
            self._last_minute.sum_up(now),
            self._registry.loaded.draining,
            has_bench=self._settings.benchmark,
        )
        self._stats = {member: member.stats for model in models for member in list_members(model)}
        return snapshot

    def _list_prompts(self, requests: list[InFlightRequest], service: Service) -> dict[str, str]:
        """Return the ends of the prompts of ``requests`` by their ids, if they are to be shown."""
        if not self._settings.live_prompts:
            return {}
        for entry in requests:
            if entry not in self._prompts:
                self._prompts[entry] = read_end(entry.request.prompt, service.vocabulary.pieces)
        return {entry.request.request_id: self._prompts[entry] for entry in requests}

    def _describe_model(
        self, model: ServedModel, explanations: Mapping[Member, Explanation], elapsed: float
    ) -> ModelState:
        pool, service = model.engine, model.service
        if pool is None or service is None:
            waiting = list_waiting(model, [])
            return ModelState(
                model.name, model.status, 0.0, 0, 0, 0.0, 0.0, [], [], waiting=waiting
            )
        counts = service.metrics.num_generated, pool.stats_since_start.num_prefill_tokens
        before = self._counts.get(model.name, counts)
        self._counts[model.name] = counts
        requests: dict[Member | None, list[InFlightRequest]] = {}
        for member, request in pool.list_requests():
            requests.setdefault(member, []).append(request)
        return ModelState(
            name=model.name,
            status=model.status,
            loaded_share=pool.loaded_share,
            num_bytes=model.num_bytes if model.is_loaded else 0,
            num_requests=pool.num_unfinished,
            output_tokens_per_s=round(max(0.0, counts[0] - before[0]) / elapsed, 1),
            prompt_tokens_per_s=round(max(0, counts[1] - before[1]) / elapsed, 1),
            queue=list_queue(pool),
            engines=[
                self._describe_engine(
                    member, explanations.get(member), requests.get(member, []), model, service
                )
                for member in pool.members
            ],
            waiting=list_waiting(model, requests.get(None, [])),
        )

    def _describe_engine(
        self,
        member: Member,
        explanation: Explanation | None,
        requests: list[InFlightRequest],
        model: ServedModel,
        service: Service,
    ) -> EngineState:
        stats = member.stats
        return EngineState(
            number=member.number,
            is_ready=member.ready,
            seconds_until_ready=0.0 if member.ready else member.supervisor.seconds_until_ready(),
            num_restarts=member.supervisor.num_restarts,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_seq_ids=stats.num_seq_ids,
            num_cells=stats.num_cells,
            num_cells_held=stats.num_cells_held,
            num_cells_idle=stats.num_cells_idle,
            num_cells_shared=stats.num_cells_shared,
            stage_ms=compute_stages(self._stats.get(member, stats), stats),
            steps=[] if explanation is None else list(map(shorten, explanation.steps)),
            sequences=list_sequences(explanation, requests, choose_reason(member, model)),
            prompts=self._list_prompts(requests, service),
        )


def read_end(prompt: list[int], pieces: Pieces) -> str:
    """Return the last MAX_PROMPT characters of a prompt."""
    data = b"".join(pieces[token] for token in prompt[-MAX_PROMPT:])
    return data.decode(errors="replace")[-MAX_PROMPT:]


def list_waiting(model: ServedModel, unassigned: list[InFlightRequest]) -> list[SequenceState]:
    """Return the requests that wait until a model is loaded: those that the server has not read
    further than to the name of the model, and those that are in no engine.
    """
    records = [
        SequenceState(
            name=record.request_id,
            account=record.account,
            priority=record.priority or Priority.NORMAL.name.lower(),
            phase="queued",
            phase_seconds=round(record.seconds, 3),
            age=round(record.seconds, 3),
            num_prompt_tokens=0,
            reason=LOADING,
        )
        for record in model.waiting[:MAX_NAMED]
    ]
    reason = LOADING if model.is_loading else RESTARTING
    return records + [describe_unknown(entry, reason) for entry in unassigned[:MAX_NAMED]]


def list_members(model: ServedModel) -> list[Member]:
    return [] if model.engine is None else model.engine.members


def shorten(step: Step) -> LiveStep:
    return LiveStep(
        step.number,
        round(1000 * step.seconds, 2),
        step.num_rows,
        step.num_prefill_tokens,
        str(step.blocked),
    )


def compute_stages(before: Stats, stats: Stats) -> dict[str, float]:
    """Return the mean milliseconds of each stage of a step between two statistics of an engine; {}
    if there was no step.
    """
    num_steps = stats.num_steps - before.num_steps
    if num_steps <= 0:
        return {}
    return {
        stage.removesuffix("_seconds"): round(
            1000 * (getattr(stats, stage) - getattr(before, stage)) / num_steps, 3
        )
        for stage in STAGES
    }


def list_queue(pool: Pool) -> list[QueueEntry]:
    return [
        QueueEntry(priority.name.lower(), account, round(load.num_requests), round(load.num_tokens))
        for priority, account, load in pool.backlog.list_pending()
    ]


def choose_reason(member: Member, model: ServedModel) -> str:
    """Return why requests wait that the engine does not know."""
    if member.ready:
        return IN_STEP
    return LOADING if model.is_loading else RESTARTING


def list_sequences(
    explanation: Explanation | None, requests: list[InFlightRequest], reason: str
) -> list[SequenceState]:
    """Return the unfinished sequences of an engine, in which those of ``requests`` that it has not
    explained wait for ``reason``.
    """
    by_id = {entry.request.request_id: entry for entry in requests}
    listed, known = [], set()
    is_complete = explanation is None or explanation.num_waiting == len(explanation.waiting)
    for seq in () if explanation is None else (*explanation.running, *explanation.waiting):
        request_id = seq.name.rpartition(".")[0]
        entry = by_id.get(request_id)
        if entry is None:  # it has ended meanwhile
            continue
        known.add(request_id)
        if seq.phase == "queued":
            listed.append(msgspec.structs.replace(seq, expected_wait=estimate_wait(entry)))
        else:
            listed.append(seq)
    unknown = [entry for name, entry in by_id.items() if name not in known] if is_complete else []
    return listed + [describe_unknown(entry, reason) for entry in unknown[:MAX_NAMED]]


def estimate_wait(entry: InFlightRequest) -> float | None:
    """Return the seconds until a request begins by the estimate of its submission; None if it
    should have begun already.
    """
    return round(entry.estimate_position().seconds, 2) or None


def describe_unknown(entry: InFlightRequest, reason: str) -> SequenceState:
    """Return the state of a request of which the engine has said nothing."""
    request, age = entry.request, time.monotonic() - entry.submitted_at
    return SequenceState(
        name=f"{request.request_id}.{min(entry.unfinished, default=0)}",
        account=request.account,
        priority=Priority(request.priority).name.lower(),
        phase="parked" if entry.started else "queued",
        phase_seconds=round(age, 3),
        age=round(age, 3),
        num_prompt_tokens=len(request.prompt),
        reason=reason,
        expected_wait=None if entry.started else estimate_wait(entry),
    )
