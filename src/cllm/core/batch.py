"""What one step computes, as plain values: the scheduler says it, the backend does it, tests and traces read it."""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import NamedTuple

from cllm.core.sequence import Sequence


class Row(NamedTuple):
    """One sequence's share of a step: ``num_tokens`` of it from position ``start``, then ``draft``, guessed tokens.

    The logits of the last ``num_samples`` positions are wanted: 0 while a prompt goes on, 1 when it is complete or
    decodes, and 1 + len(draft) if there are guesses to be verified. Before these come ``num_scores`` (counted in
    num_samples) from which no token is sampled: they say how probable the next token of the prompt is.
    """

    seq: Sequence
    start: int
    num_tokens: int
    num_samples: int
    draft: tuple[int, ...] = ()
    num_scores: int = 0

    @property
    def tokens(self) -> list[int]:
        own = self.seq.tokens[self.start : self.start + self.num_tokens]
        return [*own, *self.draft] if self.draft else own

    @property
    def size(self) -> int:
        """Positions computed, drafts included."""
        return self.num_tokens + len(self.draft)

    def __str__(self) -> str:
        guesses = f" guess {len(self.draft)}" if self.draft else ""
        scores = f" score {self.num_scores}" if self.num_scores else ""
        sample = " sample" if self.num_samples > self.num_scores else ""
        return f"{self.seq.name} {self.start}+{self.num_tokens}{guesses}{scores}{sample}"


class Trim(NamedTuple):
    """Keep the first ``keep`` cells of ``seq_id`` and give the rest back."""

    seq_id: int
    keep: int

    def __str__(self) -> str:
        return f"{self.seq_id} keep {self.keep}"


class Copy(NamedTuple):
    """``target``, which is empty, gets the first ``num_tokens`` of what ``source`` holds."""

    source: int
    target: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {self.num_tokens}"


class Save(NamedTuple):
    """Keep a copy of all that ``seq_id`` holds in RAM, under the number ``snapshot``."""

    seq_id: int
    snapshot: int

    def __str__(self) -> str:
        return f"{self.seq_id} save s{self.snapshot}"


class Load(NamedTuple):
    """``seq_id`` gets the first ``num_tokens`` of ``snapshot`` in place of what it holds."""

    snapshot: int
    seq_id: int
    num_tokens: int

    def __str__(self) -> str:
        return f"s{self.snapshot} -> {self.seq_id} {self.num_tokens}"


class Drop(NamedTuple):
    """Forget a snapshot."""

    snapshot: int

    def __str__(self) -> str:
        return f"drop s{self.snapshot}"


class Chunk(NamedTuple):
    """Tokens of a text that is to be embedded, from position ``start``; the whole text has ``length``."""

    tokens: list[int]
    start: int
    length: int


MAX_CHUNKS = 32  # of one bite
Operation = Trim | Copy | Save | Load | Drop


class Batch(NamedTuple):
    """The KV operations to carry out, in order, and then the rows to compute, sorted by seq_id."""

    rows: list[Row]
    operations: Run[Operation]

    @property
    def num_tokens(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.num_samples for row in self.rows)

    def __str__(self) -> str:
        return "   ".join(str(row) for row in self.rows)
