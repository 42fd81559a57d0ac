"""Measure what adapters cost: 16 of them with 4 clients each, beside one with 4 clients.

    uv run python -m benchmarks.adapters [MODEL] [--adapters 16] [--requests 3] [--rounds 3]

Without MODEL, the built-in model. Each client sends its requests one after the other. Both loads
are whole requests, so that each token comes with its share of the prompts. Printed are the tokens
per second of both, in turn, their ratio, and Jain's index of the adapters' tokens when the first
adapter is done.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cllm.bench.distribution import jain_index
from cllm.bench.load.answer import split_parts
from cllm.bench.load.client import Outcome, run_stages
from cllm.bench.load.workload import Group, RequestSpec, word_tasks
from cllm.bench.make_adapter import write_adapter
from cllm.bench.servers import RunningServer, cllm, failures
from cllm.cli.doctor import describe_cpu
from cllm.cli.main import install_signal_handlers
from cllm.models.catalog import BUILTIN

CLIENTS = 4
MAX_TOKENS = 48
SEEDS = itertools.count()  # every prompt is new to its server


@contextmanager
def serve(folder: Path, lines: list[str]) -> Iterator[RunningServer]:
    """Start a server with the lines of a configuration, and with its files in a folder."""
    config = folder / "cllm.yaml"
    config.write_text("\n".join(lines))
    flags = ("--config", config, "--storage.folder", folder / "state")
    with cllm(None, *flags, name=None) as server:
        yield server


def send(server: RunningServer, models: list[str], requests: int) -> Outcome:
    """Send unique requests for some models at once, a number from each of CLIENTS clients. The part
    of each task is its model.
    """
    groups = []
    for model in models:
        spec = RequestSpec(model=model, prompt_words=10, max_tokens=MAX_TOKENS, seed=next(SEEDS))
        tasks = word_tasks(CLIENTS * requests, spec)
        named = [msgspec.structs.replace(task, part=model) for task in tasks]
        groups.append(Group(tasks=named, clients=CLIENTS))
    outcome = run_stages(server, [groups])
    assert not failures(outcome), failures(outcome)[0]
    return outcome


def compute_rate(outcome: Outcome) -> float:
    """Return the output tokens per second."""
    return sum(answer.output_tokens for answer in outcome.answers) / outcome.wall


def compare_shares(outcome: Outcome) -> float:
    """Return Jain's index of what the models had sent when the first one was done."""
    parts = split_parts(outcome.answers)
    end = min(max(answer.ended for answer in answers) for answers in parts.values())
    counts = [
        sum(at <= end for answer in answers for at in answer.content_times)
        for answers in parts.values()
    ]
    return jain_index(counts) or 0.0


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"adapter-{i}" for i in range(options.adapters)]
        lines = [f"model: {{path: {options.model}, name: base}}", "adapters:"]
        for i, adapter in enumerate(names):
            path = write_adapter(folder / f"{adapter}.gguf", options.model, seed=i, rank=16)
            lines.append(f"  {adapter}: {{path: {path}}}")
        with serve(folder, lines) as server:
            run_rounds(server, names, options.requests, options.rounds)


def run_rounds(server: RunningServer, names: list[str], requests: int, rounds: int) -> None:
    send(server, names[:1], 1)
    ratios, indexes = [], []
    for _ in range(rounds):
        one = compute_rate(send(server, names[:1], 4 * requests))
        outcome = send(server, names, requests)
        many = compute_rate(outcome)
        ratios.append(many / one)
        indexes.append(compare_shares(outcome))
        print(
            f"one adapter {one:.1f} tokens/s, {len(names)} adapters {many:.1f} tokens/s: "
            f"{ratios[-1]:.3f}, Jain's index {indexes[-1]:.4f}"
        )
    print(
        f"{describe_cpu()}: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f}), Jain's index at least {min(indexes):.4f}"
    )


if __name__ == "__main__":
    main()
