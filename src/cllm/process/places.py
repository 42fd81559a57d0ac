"""Chooses where the engines of a model compute, if there are several."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from cllm.backends.registry import import_loader
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.memory import COMPUTE_BYTES, MIN_CONTEXT
from cllm.process.launch import ANYWHERE, Place

CPUS = Path("/sys/devices/system/cpu")


def find_places(params: EngineParams, count: int | None) -> list[Place]:
    """Return the places of ``count`` engines of a model. None: one for each GPU if each can hold
    the model, one for each NUMA node if there are no GPUs, otherwise one.

    Raises StartupError if there are fewer GPUs than engines.
    """
    if count == 1:
        return [ANYWHERE]
    loader = import_loader(params.backend)
    gpus = loader.find_gpus(params)
    if gpus:
        need = params.weight_bytes + COMPUTE_BYTES
        need += params.kv_bytes_per_token * (params.context_length or MIN_CONTEXT)
        fits = len(gpus) > 1 and all(gpu.num_free_bytes >= need for gpu in gpus)
        count = count or (len(gpus) if fits else 1)
        if count > len(gpus):
            raise StartupError(f"engine.count is {count}, but only {len(gpus)} GPUs can be used")
        places = [Place(variables={gpu.variable: gpu.value}) for gpu in gpus]
        return places[:count] if count > 1 else [ANYWHERE]
    cores = list_cores()
    if count is None:
        count = len({node for node, _ in cores}) if loader.may_divide_cores(params) else 1
    if count <= 1 or count > len(cores):
        return [ANYWHERE] * max(1, count)
    bounds = [number * len(cores) // count for number in range(count + 1)]
    return [
        Place(tuple(cpu for _, cpus in cores[begin:end] for cpu in cpus))
        for begin, end in pairwise(bounds)
    ]


def list_cores() -> list[tuple[int, list[int]]]:
    """Return the NUMA node and the CPUs of each core that this process may use, sorted by node. A
    core that runs several threads has several CPUs.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [(0, [cpu]) for cpu in range(os.cpu_count() or 1)]
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = str(cpu)
        with suppress(OSError):
            siblings = (CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        cores.setdefault((find_node(cpu), siblings), []).append(cpu)
    return sorted((node, cpus) for (node, _), cpus in cores.items())


def find_node(cpu: int) -> int:
    """Return the NUMA node of a CPU, 0 where the system does not say."""
    for link in (CPUS / f"cpu{cpu}").glob("node[0-9]*"):
        return int(link.name.removeprefix("node"))
    return 0
