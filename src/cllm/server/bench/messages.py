"""What the server and the process of a load run tell each other: lines of JSON.

The process reads one ``Order`` from its standard input, and writes ``Running`` messages and then a
``Done`` or a ``Failed``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_LINE = 4_000_000  # bytes of a message
REQUEST_SECONDS = 60.0  # the least time that a request may take; otherwise that of the plan
# those that any model can answer and that leave room for other clients
Workload = Literal[
    "words",
    "chat",
    "shared-prefix",
    "multi-turn",
    "long-prefill",
    "cancel-storm",
    "agents",
    "rag",
    "long-beside-short",
    "phases",
]


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a load run sends, as the options of ``cllm bench load``. None means the number that the
    workload has by default.
    """

    workload: Workload = "words"
    requests: int | None = None
    seconds: float
    concurrency: int | None = None
    prompt_words: int = 64
    max_tokens: int | None = None
    scale: float = 1.0
    seed: int = 0
    note: str = ""


class Send(msgspec.Struct, frozen=True, tag=True):
    """Put load on ``model`` at ``url``, whose TLS certificate is in a file, if it has one."""

    url: str
    key: str
    certificate: str | None
    model: str
    plan: LoadPlan


class Check(msgspec.Struct, frozen=True, tag=True):
    """Read a report, and return it as ``cllm bench load`` writes it."""

    report: msgspec.Raw


class Compare(msgspec.Struct, frozen=True, tag=True):
    """Compare two reports."""

    before: msgspec.Raw
    after: msgspec.Raw


Order = Send | Check | Compare


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds."""

    p50: float
    p99: float


class Running(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a load run is. Its warm-up counts only in ``num_done`` and ``num_planned``. Output
    tokens that the server has not counted yet are counted as chunks. ``seconds`` is the time since
    the warm-up.
    """

    num_done: int = 0
    num_planned: int = 0
    num_running: int = 0
    num_succeeded: int = 0
    failures: dict[str, int] = {}
    output_tokens: int = 0
    seconds: float = 0.0
    ttft_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None


class ComparedFigure(msgspec.Struct, frozen=True):
    """A figure of two reports, and the interval of each in which the figure would be in 95 of 100
    runs like it, as far as one run can tell; None if it cannot. The figures ``differ`` if these
    intervals have nothing in common. ``ratio`` is after / before.
    """

    name: str
    before: float
    after: float | None
    ratio: float | None
    interval_before: tuple[float, float] | None
    interval_after: tuple[float, float] | None
    differ: bool | None


class Comparison(msgspec.Struct, frozen=True):
    """What differs between the settings of two reports, in sentences, and their figures."""

    settings: list[str]
    figures: list[ComparedFigure]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The work has been done; ``result`` is JSON."""

    result: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The work cannot be done, for a reason of one line."""

    reason: str


Message = Running | Done | Failed
