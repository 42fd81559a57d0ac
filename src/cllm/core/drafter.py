"""What predicts the next tokens of sequences."""

from __future__ import annotations

from typing import Protocol

from cllm.core.sequence import Sequence


class Drafter(Protocol):
    """Predicts the next tokens of sequences.

    Its last call of ``draft`` took ``seconds``, and in that call, one more draft token for each
    sequence took ``token_seconds``.
    """

    seconds: float
    token_seconds: float

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Return at most ``wanted[seq]`` draft tokens for each sequence; omits sequences without
        any. Raises EngineError if it cannot predict any more.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """Forget ``seq``, which has ended."""
        ...
