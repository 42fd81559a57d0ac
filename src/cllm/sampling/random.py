"""Random numbers that depend on seed and position alone, so other sequences in the batch never
change a text.
"""

from __future__ import annotations

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) from SplitMix64 (Steele, Lea, Flood 2014), with the
    position as counter.
    """
    mixed = _mix(_mix(seed + _GAMMA & _MASK) + position * _GAMMA & _MASK)
    return (mixed >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of the ``index``-th sequence of a request; index 0 keeps ``seed``."""
    return (seed + index * _GAMMA) & _MASK


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
