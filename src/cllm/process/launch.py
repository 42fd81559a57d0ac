"""Starts engine processes.

It imports very little, so the child can start before its parent has imported the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from cllm.environment import child_environment

if sys.platform == "win32":
    from asyncio.windows_utils import Popen  # its pipes can be read by an event loop
else:
    from subprocess import Popen

__all__ = [
    "ANYWHERE",
    "ONE_ENGINE",
    "EngineSpec",
    "Place",
    "Popen",
    "build_engine_environment",
    "enable_huge_pages",
    "launch",
    "make_specs",
]


class Place(NamedTuple):
    """The place where an engine computes: the CPUs with the numbers ``cpus``, () for all.

    ``variables``, such as CUDA_VISIBLE_DEVICES, are added to the engine's environment.
    """

    cpus: tuple[int, ...] = ()
    variables: Mapping[str, str] = {}


ANYWHERE = Place()


class EngineSpec(NamedTuple):
    """An engine of a pool: its ``number``, from 0, its name in the log, and where it computes.

    If the first engine process has already been started, it is ``launched``.
    """

    number: int = 0
    label: str = "the engine"
    place: Place = ANYWHERE
    launched: Popen[bytes] | None = None


ONE_ENGINE = (EngineSpec(),)


def make_specs(
    places: Sequence[Place] = (ANYWHERE,), launched: Popen[bytes] | None = None
) -> list[EngineSpec]:
    """Return the engines of a pool: one at each of ``places``. The first one uses the process
    ``launched``, if it has been started.
    """
    if len(places) == 1:
        return [EngineSpec(place=places[0], launched=launched)]
    return [
        EngineSpec(number, f"engine {number}", place, None if number else launched)
        for number, place in enumerate(places)
    ]


def enable_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with a setting that lets glibc use huge pages for large allocations,
    on systems that leave this choice to programs.

    Allocating a KV cache then takes a sixth of the time, and reading a row of logits three
    quarters.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables += (":" if tunables else "") + "glibc.malloc.hugetlb=1"
    return {**environment, "GLIBC_TUNABLES": tunables}


def build_engine_environment() -> dict[str, str]:
    """Return the environment of an engine process."""
    return enable_huge_pages(child_environment())


def launch(place: Place = ANYWHERE) -> Popen[bytes]:
    """Start an engine process. It waits for its EngineParams, and ends when its stdin ends."""
    process = Popen(
        # -P: import nothing from the current folder
        [sys.executable, "-P", "-m", "cllm.process.child"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**build_engine_environment(), **place.variables},
        start_new_session=True,  # signals to our process group must not end running streams
    )
    if place.cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(process.pid, place.cpus)  # its threads will inherit it
    return process
