"""Commands to an engine, and its replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from cllm.core.output import EmbeddingOutput
from cllm.core.request import EmbeddingRequest, Request, SequenceProgress
from cllm.core.timeline import Timeline
from cllm.scheduler.trace import Explanation

if TYPE_CHECKING:
    from cllm.core.sequence import Sequence


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new request."""

    request: Request


class Resume(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that another engine has begun.

    ``sequences`` maps the indices of the sequences that continue to what they have delivered.
    """

    request: Request
    sequences: dict[int, SequenceProgress]


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A new request to embed texts."""

    request: EmbeddingRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or only its sequence with ``index``. Unknown ones are ignored."""

    request_id: str
    index: int | None = None

    def applies_to(self, seq: Sequence) -> bool:
        return seq.request.request_id == self.request_id and self.index in (None, seq.index)


class EndReasoning(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let a request's sequences end their reasoning now, or as soon as they begin it. Sequences
    without a ThinkingBudget, and unknown requests, are ignored.
    """

    request_id: str


FaultKind = Literal["crash", "kill", "hang", "slow", "raise", "memory"]


class InjectedFault(msgspec.Struct, frozen=True, array_like=True):
    """A fault in a step.

    The kinds are crash (as after a failed assertion), kill (as by another process), hang, slow (the
    step takes ``seconds`` longer), raise (an exception), and memory (memory runs out). First
    ``after_steps`` steps succeed, then ``num_steps`` have the fault. With a ``token``, only steps
    with a sequence whose prompt contains this token count, and all of them have the fault.
    """

    kind: FaultKind
    after_steps: int = 0
    num_steps: int = 1
    seconds: float = 0.0
    token: int | None = None


class SetFaults(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cause these faults, and none that were set before."""

    faults: list[InjectedFault]


class SetWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use these shares of accounts, and 1 for all others."""

    weights: dict[str, float]


class SetYielding(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let a request yield its place to all others while its client does not read."""

    request_id: str
    yields: bool


class Withdraw(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Forget a request that has not begun, because another engine will compute it."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load a LoRA adapter from a file, so that requests can name it."""

    name: str
    path: str


class AddPrefix(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use the prefix in a file that was put into the folder of the disk cache. The file has this
    ``name``.
    """

    name: str


class Explain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report the last ``num_steps`` steps, the running sequences, and why the others wait."""

    num_steps: int


class Explained(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to Explain."""

    explanation: Explanation


class RecordTimeline(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Record from now on what is computed, until TakeTimeline."""


class TakeTimeline(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop recording, and report what was computed."""


class TimelineTaken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to TakeTimeline; the timeline is empty if nothing was recorded."""

    timeline: Timeline


class Withdrawn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to Withdraw. ``done`` says that the request had not begun, and is forgotten."""

    request_id: str
    done: bool


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The reply to LoadAdapter. ``error`` says why it was not loaded, and is "" if it was."""

    name: str
    error: str = ""


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop the engine, even if sequences are running.

    It has ``seconds`` to save prefixes, and the same time again to write them to disk.
    """

    seconds: float = 1.5


Command = (
    Add
    | Resume
    | Embed
    | Abort
    | EndReasoning
    | Withdraw
    | LoadAdapter
    | AddPrefix
    | Explain
    | RecordTimeline
    | TakeTimeline
    | SetFaults
    | SetWeights
    | SetYielding
    | Close
)
Reply = EmbeddingOutput | Explained | TimelineTaken | Withdrawn | AdapterLoaded
