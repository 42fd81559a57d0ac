"""What one step computes, as plain values: the scheduler says it, the backend does it, tests and traces read it."""

from __future__ import annotations

from typing import NamedTuple

from cllm.core.sequence import Sequence


class Row(NamedTuple):
    """One sequence's share of a step: ``num_tokens`` from position ``start``; ``samples`` if logits are wanted."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool

    def __str__(self) -> str:
        name = f"{self.seq.request.request_id}.{self.seq.index}"
        return f"{name} {self.start}+{self.num_tokens}{' sample' if self.samples else ''}"


class Trim(NamedTuple):
    """Keep the first ``keep`` cells of ``seq_id`` and give the rest back."""

    seq_id: int
    keep: int


class Batch(NamedTuple):
    """The KV operations to carry out, in order, and then the rows to compute, sorted by seq_id."""

    rows: list[Row]
    operations: list[Trim]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.samples for row in self.rows)

    def __str__(self) -> str:
        return "   ".join(str(row) for row in self.rows)
