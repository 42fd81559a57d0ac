"""Chooses the loaded model that makes room for another one: the least recently used one, after a
minimum stay.

Servers (``serving/loaded_models.py``) and simulations use these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

# A model stays for at least MIN_STAY seconds, and STAY_FACTOR times its load time. Otherwise two
# models that are both needed would spend their time loading.
MIN_STAY, STAY_FACTOR = 2.0, 2.0


class Resident(Protocol):
    """A loaded model, which may be unloaded from the time ``stays_until`` on, in seconds."""

    last_used: float
    stays_until: float

    @property
    def is_busy(self) -> bool:
        """Whether it has requests."""
        ...


AnyResident = TypeVar("AnyResident", bound=Resident)


def compute_stay(loaded_at: float, load_seconds: float) -> float:
    """Return the time until which a model stays that was loaded at ``loaded_at``."""
    return loaded_at + max(MIN_STAY, STAY_FACTOR * load_seconds)


def choose_to_unload(models: Sequence[AnyResident], now: float) -> AnyResident | None:
    """Return the least recently used idle model that may be unloaded; None if there is none."""
    idle = [one for one in models if not one.is_busy and one.stays_until <= now]
    return min(idle, key=lambda one: one.last_used, default=None)


def choose_to_drain(models: Sequence[AnyResident], now: float) -> AnyResident | None:
    """Return the least recently used model, which gets no further requests because none is idle;
    None while it must stay.
    """
    oldest = min(models, key=lambda one: one.last_used)
    return oldest if oldest.stays_until <= now else None
