"""Metrics whose labels come and go: the usage of accounts, the figures of engines, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import Metric
from prometheus_client.registry import Collector

from cllm.core.output import Stats
from cllm.observe.exposition import TextFamily, write_labels
from cllm.observe.machine import UNKNOWN
from cllm.observe.step_histograms import StepHistograms


class AccountCounts(Protocol):
    """The usage of an account since the start."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


NO_USAGE: Mapping[str, AccountCounts] = {}
OTHER = "other"  # all accounts that have no name on the page


class AccountUsageCollector(Collector):
    """Writes the usage of the accounts in ``usage``, at most ``max_accounts`` under their names.

    While there is room, those that have used the most tokens get a name, and keep it. The others
    are counted together, so no counter ever decreases.
    """

    def __init__(self) -> None:
        self.usage = NO_USAGE
        self.max_accounts = 100
        self._named: dict[str, str] = {}  # account -> its labels, as on the page

    def collect(self) -> Iterator[Metric]:
        usage = self.usage
        self._name_more(usage)
        counts = {label: usage[name] for name, label in self._named.items() if name in usage}
        others = [used for name, used in usage.items() if name not in self._named]
        requests = [
            f"cllm:account_requests_total{{{label}}} {float(used.requests)!r}"
            for label, used in counts.items()
        ]
        tokens = [
            f'cllm:account_tokens_total{{{label},kind="{kind}"}} {float(count)!r}'
            for label, used in counts.items()
            for kind, count in list_tokens([used])
        ]
        if others:
            label = f'account="{OTHER}"'
            count = float(sum(used.requests for used in others))
            requests.append(f"cllm:account_requests_total{{{label}}} {count!r}")
            tokens += [
                f'cllm:account_tokens_total{{{label},kind="{kind}"}} {float(count)!r}'
                for kind, count in list_tokens(others)
            ]
        about = "of each account with API keys; those beyond metrics.max_accounts are other"
        yield TextFamily("cllm:account_requests", f"requests {about}", "counter", requests)
        text = f"tokens {about}; by kind: prompt (cached ones included), cached, completion"
        yield TextFamily("cllm:account_tokens", text, "counter", tokens)

    def _name_more(self, usage: Mapping[str, AccountCounts]) -> None:
        room = self.max_accounts - len(self._named)
        if room <= 0:
            return
        new = [name for name in usage if name not in self._named and name != OTHER]
        if len(new) > room:
            new.sort(key=lambda name: -usage[name].prompt_tokens - usage[name].completion_tokens)
            new = new[:room]
        for name in new:
            self._named[name] = write_labels({"account": name})[1:-1]


def list_tokens(counts: Sequence[AccountCounts]) -> Iterator[tuple[str, int]]:
    """Yield the kinds of tokens with their numbers over all ``counts``."""
    for kind in ("prompt", "cached", "completion"):
        yield kind, sum(getattr(used, f"{kind}_tokens") for used in counts)


class EngineFigures(NamedTuple):
    """One engine of a model: its statistics, its steps, and what its process has used of CPU time
    (seconds) and uses of memory (bytes).
    """

    is_ready: bool
    num_restarts: int
    stats: Stats
    steps: StepHistograms
    cpu_seconds: float = 0.0
    memory_bytes: int = 0


class EngineCollector(Collector):
    """The figures of each engine of a model. Those that the metrics of the model have too are left
    out if there is only one engine.
    """

    def __init__(self, model_name: str) -> None:
        self.engines: Sequence[EngineFigures] = ()
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families: dict[tuple[str, str, str], list[str]] = {}
        common: dict[str, str] = {}

        def add(kind: str, name: str, text: str, value: float, **labels: str) -> None:
            suffix = "_total" if kind == "counter" else ""
            line = f"cllm:{name}{suffix}{write_labels(common | labels)} {float(value)!r}"
            families.setdefault((f"cllm:{name}", text, kind), []).append(line)

        for number, engine in enumerate(self.engines):
            stats = engine.stats
            common = {"model_name": self._model_name, "engine": str(number)}
            text = "CPU time of the engine process, of all threads"
            add("counter", "engine_cpu_seconds", text, engine.cpu_seconds)
            text = "memory that the engine process has in RAM"
            add("gauge", "engine_resident_memory_bytes", text, engine.memory_bytes)
            if len(self.engines) < 2:
                continue
            add("gauge", "pool_engine_ready", "1 if the engine is ready", engine.is_ready)
            text = "times the engine was restarted"
            add("counter", "pool_engine_restarts", text, engine.num_restarts)
            for state, count in (("running", stats.num_running), ("waiting", stats.num_waiting)):
                text = "sequences of the engine"
                add("gauge", "pool_engine_sequences", text, count, state=state)
            for state, count in (("held", stats.num_cells_held), ("idle", stats.num_cells_idle)):
                text = "KV cells of the engine"
                add("gauge", "pool_engine_kv_cells", text, count, state=state)
        for (name, text, kind), lines in families.items():
            yield TextFamily(name, text, kind, lines)


class MachineCollector(Collector):
    """Writes the use of the machine; nothing about what it does not tell."""

    def __init__(self) -> None:
        self.use = UNKNOWN

    def collect(self) -> Iterator[Metric]:
        if (memory := self.use.memory) is not None:
            text = "memory of the machine that is used, or of the container if it has a limit"
            lines = [f"cllm:machine_memory_used_bytes {float(memory.num_used)!r}"]
            yield TextFamily("cllm:machine_memory_used_bytes", text, "gauge", lines)
            text = "memory of the machine, or the limit of the container"
            lines = [f"cllm:machine_memory_bytes {float(memory.num_bytes)!r}"]
            yield TextFamily("cllm:machine_memory_bytes", text, "gauge", lines)
        families = {
            "gpu_busy_ratio": "share of the time in which a GPU computes, 0 to 1",
            "gpu_memory_used_bytes": "memory of a GPU that is used, by all processes",
            "gpu_memory_bytes": "memory of a GPU",
        }
        values: dict[str, list[str]] = {name: [] for name in families}
        for gpu in self.use.gpus:
            labels = write_labels({"gpu": gpu.name})
            figures = {"gpu_busy_ratio": gpu.busy}
            if gpu.memory is not None:
                figures["gpu_memory_used_bytes"] = gpu.memory.num_used
                figures["gpu_memory_bytes"] = gpu.memory.num_bytes
            for name, value in figures.items():
                if value is not None:
                    values[name].append(f"cllm:{name}{labels} {float(value)!r}")
        for name, lines in values.items():
            if lines:
                yield TextFamily(f"cllm:{name}", families[name], "gauge", lines)
