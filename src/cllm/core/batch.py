"""The contents of one step, as plain values.

The scheduler creates them, the backend executes them, and tests read them.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import NamedTuple

from cllm.core.request import Adapters
from cllm.core.sequence import Sequence


class Row(NamedTuple):
    """One sequence's share of a step: ``num_tokens`` of its tokens from position ``start``, then
    the draft tokens.

    The backend returns the logits of the last ``num_samples`` positions. These are
    ``num_prompt_logprobs`` positions for prompt logprobs, from which no token is sampled, and then
    the positions to sample from: none while part of the prompt is still uncomputed, otherwise 1 +
    len(draft).
    """

    seq: Sequence
    start: int
    num_tokens: int
    num_samples: int
    draft: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0

    @property
    def tokens(self) -> list[int]:
        own = self.seq.tokens[self.start : self.start + self.num_tokens]
        return [*own, *self.draft] if self.draft else own

    @property
    def size(self) -> int:
        """Number of positions to compute, including draft tokens."""
        return self.num_tokens + len(self.draft)

    def __str__(self) -> str:
        guesses = f" guess {len(self.draft)}" if self.draft else ""
        scores = f" score {self.num_prompt_logprobs}" if self.num_prompt_logprobs else ""
        sample = " sample" if self.num_samples > self.num_prompt_logprobs else ""
        return f"{self.seq.name} {self.start}+{self.num_tokens}{guesses}{scores}{sample}"


class Trim(NamedTuple):
    """Free all cells of ``seq_id`` except the first ``keep``."""

    seq_id: int
    keep: int

    def __str__(self) -> str:
        return f"{self.seq_id} keep {self.keep}"


class Copy(NamedTuple):
    """Copy the first ``num_tokens`` cells of ``source`` to ``target``, which is empty."""

    source: int
    target: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.source} -> {self.target} {self.num_tokens}"


class Swap(NamedTuple):
    """Exchange all cells of two seq_ids; paged layout only."""

    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.first} <-> {self.second}"


class Save(NamedTuple):
    """Copy all cells of ``seq_id`` to RAM, under the key ``snapshot``; for a checkpoint, only the
    part that cannot be trimmed.
    """

    seq_id: int
    snapshot: int
    is_checkpoint: bool = False

    def __str__(self) -> str:
        return f"{self.seq_id} save {'c' if self.is_checkpoint else 's'}{self.snapshot}"


class Load(NamedTuple):
    """Replace the cells of ``seq_id`` with the first ``num_tokens`` of ``snapshot``. A checkpoint
    only trims ``seq_id``, which has these tokens and perhaps more, to them.
    """

    snapshot: int
    seq_id: int
    num_tokens: int
    is_checkpoint: bool = False

    def __str__(self) -> str:
        name = f"{'c' if self.is_checkpoint else 's'}{self.snapshot}"
        return f"{name} -> {self.seq_id} {self.num_tokens}"


class Drop(NamedTuple):
    """Delete a snapshot from RAM."""

    snapshot: int

    def __str__(self) -> str:
        return f"drop s{self.snapshot}"


class Chunk(NamedTuple):
    """Part of a text to embed: its tokens from position ``start``. The whole text has ``length``
    tokens.
    """

    tokens: list[int]
    start: int
    length: int


MAX_CHUNKS = 32  # in one call of Backend.embed
Operation = Trim | Copy | Swap | Save | Load | Drop


class Batch(NamedTuple):
    """The KV operations to run, in order, and then the rows to compute, sorted by seq_id, with
    ``adapters``.
    """

    rows: list[Row]
    operations: Run[Operation]
    adapters: Adapters = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def num_samples(self) -> int:
        return sum(row.num_samples for row in self.rows)

    def list_changed_seq_ids(self) -> set[int]:
        """Return the seq_ids whose cells the operations and the rows change."""
        seq_ids = {row.seq.seq_id for row in self.rows}
        for operation in self.operations:
            match operation:
                case Trim(seq_id) | Copy(_, seq_id) | Load(_, seq_id):
                    seq_ids.add(seq_id)
                case Swap(first, second):
                    seq_ids |= {first, second}
        return seq_ids

    def __str__(self) -> str:
        return "   ".join(str(row) for row in self.rows)
