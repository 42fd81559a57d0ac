"""Reasons why sequences wait: values that cost next to nothing in a step, and become text on
request.
"""

from __future__ import annotations

from typing import NamedTuple


class AllSeqIdsInUse(NamedTuple):
    size: int

    def __str__(self) -> str:
        return (
            f"all {self.size} places are in use (scheduler.max_num_seqs)"
            if self.size > 1
            else "the only place is in use (scheduler.max_num_seqs)"
        )


class FailedTogether(NamedTuple):
    """A failed step contained the sequence and one that is running. Either may be the cause."""

    name: str

    def __str__(self) -> str:
        return f"{self.name} and a running sequence were in a failed step; they run separately now"


class TooManyDeferred(NamedTuple):
    num_seqs: int

    def __str__(self) -> str:
        return f"{self.num_seqs} sequences already wait for prefixes"


class TooFewCells(NamedTuple):
    """The running sequences will probably need ``growth`` more cells."""

    name: str
    needed: int
    growth: int
    available: int

    @property
    def missing(self) -> int:
        return self.needed + self.growth - self.available

    def __str__(self) -> str:
        return (
            f"{self.name} needs {self.needed} cells and the running sequences {self.growth} more, "
            f"but only {self.available} are available"
        )


class PrefillBudgetUsed(NamedTuple):
    num_tokens: int

    def __str__(self) -> str:
        return f"the step's prefill budget of {self.num_tokens} tokens is used up"


class DecodingFirst(NamedTuple):
    def __str__(self) -> str:
        return "prompts have had their share of the time; running answers get this step"


class AwaitsLeader(NamedTuple):
    num_tokens: int
    leader: str

    def __str__(self) -> str:
        return f"{self.leader} is computing {self.num_tokens} tokens of its prompt"


class AwaitsRead(NamedTuple):
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of its prompt are being read from disk"
