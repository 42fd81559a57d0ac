"""Decides which tokens of a sequence can be reused, which depends on the model's kind of state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Prefix(Protocol):
    """Tokens under a seq_id or in a snapshot."""

    @property
    def num_computed(self) -> int: ...

    @property
    def is_final(self) -> bool:
        """True if no tokens will be appended."""
        ...


class ModelState(ABC):
    """The state that a model keeps of the tokens it has computed."""

    @abstractmethod
    def count_reusable(self, prefix: Prefix, num_shared: int) -> int:
        """Return how many of the first ``num_shared`` tokens of ``prefix`` can be reused now."""

    @abstractmethod
    def will_be_reusable(self, num_shared: int, num_held: int, *, can_be_saved: bool) -> bool:
        """Return whether the first ``num_shared`` tokens of a running sequence that has
        ``num_held`` can be reused once it has computed them.
        """

    @abstractmethod
    def count_remaining(self, num_tokens: int) -> int:
        """Return how many tokens remain if an idle prefix is cut to ``num_tokens``."""

    @abstractmethod
    def select_checkpoints(self, positions: Iterable[int]) -> list[int]:
        """Return those of the ``positions``, where others need the state, at which to save it."""

    @abstractmethod
    def select_superseded(self, shorter: Iterable[T]) -> list[T]:
        """Return those of the ``shorter`` snapshots that a longer one makes superfluous."""


class Trimmable(ModelState):
    """Keys and values of each token (attention). A sequence can free its last cells, so each prefix
    of it can be reused, even while it runs.
    """

    def count_reusable(self, prefix: Prefix, num_shared: int) -> int:
        return min(num_shared, prefix.num_computed)

    def will_be_reusable(self, num_shared: int, num_held: int, *, can_be_saved: bool) -> bool:
        return True

    def count_remaining(self, num_tokens: int) -> int:
        return num_tokens

    def select_checkpoints(self, positions: Iterable[int]) -> list[int]:
        return []

    def select_superseded(self, shorter: Iterable[T]) -> list[T]:
        return list(shorter)


class Recurrent(ModelState):
    """One state for all tokens. It is reused as a whole or not at all, so copies of it are saved
    where others will need it.
    """

    def count_reusable(self, prefix: Prefix, num_shared: int) -> int:
        return num_shared if prefix.is_final and num_shared == prefix.num_computed else 0

    def will_be_reusable(self, num_shared: int, num_held: int, *, can_be_saved: bool) -> bool:
        return num_held < num_shared and can_be_saved

    def count_remaining(self, num_tokens: int) -> int:
        return 0

    def select_checkpoints(self, positions: Iterable[int]) -> list[int]:
        return list(positions)

    def select_superseded(self, shorter: Iterable[T]) -> list[T]:
        return []
