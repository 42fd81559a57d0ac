"""Which loaded model makes room for another one: the least recently used, after a minimum stay.

Servers (``serving/loaded_models.py``) and simulations use these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# A model stays at least for MIN_STAY seconds, and for STAY_FACTOR times what its load took, so that
# two models that are both wanted do not spend their time with loading.
MIN_STAY, STAY_FACTOR = 2.0, 2.0


class Resident(Protocol):
    """A loaded model, which may leave from the time ``stays_until`` on, in seconds."""

    last_used: float
    stays_until: float

    @property
    def is_busy(self) -> bool:
        """Whether it has requests."""
        ...


AnyResident = TypeVar("AnyResident", bound=Resident)


def compute_stay(loaded_at: float, load_seconds: float) -> float:
    """Return until when a model stays that was loaded at ``loaded_at``."""
    return loaded_at + max(MIN_STAY, STAY_FACTOR * load_seconds)


def choose_to_unload(models: Sequence[AnyResident], now: float) -> AnyResident | None:
    """Return the least recently used of the idle models that may leave; None if there is none."""
    idle = [one for one in models if not one.is_busy and one.stays_until <= now]
    return min(idle, key=lambda one: one.last_used, default=None)


def choose_to_drain(models: Sequence[AnyResident], now: float) -> AnyResident | None:
    """Return the least recently used model, which gets no further requests because none is idle;
    None while it must stay.
    """
    oldest = min(models, key=lambda one: one.last_used)
    return oldest if oldest.stays_until <= now else None
