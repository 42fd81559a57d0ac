"""Measures candidates of ``cllm tune`` with the workloads of users, each in a server of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cllm.bench.compare.rows import ROWS
from cllm.bench.compare.workloads import scenario, unrelated
from cllm.bench.load.client import find_model, measure_tokens_per_word, run_stages
from cllm.bench.load.report import Report, summarize
from cllm.bench.load.scenario_figures import BESIDE
from cllm.bench.load.scenarios import SCENARIOS
from cllm.bench.load.workload import RequestSpec, Stage
from cllm.bench.servers import cllm
from cllm.bench.tune.measure import CandidateError
from cllm.bench.tune.search import Choice, Traffic
from cllm.errors import StartupError

CHAT_CLIENTS = 8
WORKLOADS = ("chat", *SCENARIOS)


class Served(NamedTuple):
    """The speed at which a server served a workload, as ``compute_rate`` returns it."""

    rate: float


class ServerBench:
    """Starts servers. ``settings`` returns the settings of a choice as a tree, for a YAML file."""

    def __init__(self, settings: Callable[[Choice], dict[str, Any]]) -> None:
        self._settings = settings

    def measure(self, choice: Choice, traffic: Traffic) -> Served:
        """Raises CandidateError if the server does not start, or a request fails."""
        import yaml

        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "cllm.yaml"
            config.write_text(yaml.safe_dump(self._settings(choice)), "utf-8")
            try:
                with cllm(None, "--config", config, name=None) as server:
                    spec = RequestSpec(
                        model=find_model(server),
                        prompt_words=1,
                        max_tokens=ROWS[choose_row(traffic.workload)].max_tokens,
                        temperature=0.8,
                    )
                    tokens_per_word = measure_tokens_per_word(server, spec)
                    outcome = run_stages(server, make_stages(traffic, spec, tokens_per_word))
            except StartupError as error:
                raise CandidateError(str(error)) from None
        settings = {"workload": traffic.workload}
        report = summarize(outcome, url=server.url, model=spec.model, settings=settings)
        if report.num_failed:
            reason, count = next(iter(report.failures.items()))
            raise CandidateError(f"{count} requests failed: {reason}")
        return Served(compute_rate(report))


def choose_row(workload: str) -> str:
    return f"unrelated-{CHAT_CLIENTS}" if workload == "chat" else workload


def make_stages(traffic: Traffic, spec: RequestSpec, tokens_per_word: float) -> list[Stage]:
    spec = msgspec.structs.replace(spec, tokens_per_word=tokens_per_word)
    if traffic.workload == "chat":
        return unrelated(CHAT_CLIENTS, spec, traffic.scale)
    return scenario(traffic.workload, spec, traffic.scale)


def compute_rate(report: Report) -> float:
    """Return output tokens/s. For streams beside a long prompt, return the geometric mean of 1 /
    the prompt's TTFT and the streams' speed meanwhile.
    """
    figures = report.workload_figures
    if "TTFT of the long prompt ms" not in figures:
        return report.output_tokens_per_s
    if "chunks/s of the chats during it" in figures:
        speed = figures["chunks/s of the chats during it"]
    else:
        # chunks that were read together have no gap; such a client cannot tell less than 1 ms
        speed = 1e3 / max(figures[f"ITL p50 {BESIDE} ms"], 1.0)
    return math.sqrt(1e3 / figures["TTFT of the long prompt ms"] * speed)
