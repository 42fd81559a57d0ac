"""Uniform numbers that depend on seed and position alone, so that a batch mate never changes a text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): SplitMix64 (Steele, Lea, Flood 2014) used as a counter."""
    mixed = _mix(_mix(seeds + _GAMMA) + positions * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The 64-bit seed of the ``index``-th sequence of a request; index 0 keeps ``seed``."""
    return (seed + index * int(_GAMMA)) % 2**64


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
