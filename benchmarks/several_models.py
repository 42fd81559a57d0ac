"""Measure two models in one server: one that is used while the other is idle, both at once, and one
that is loaded again.

    uv run python -m benchmarks.several_models [MODEL] [--requests 40] [--rounds 3]
        [--only idle,both,swap]

MODEL is served under two names; the built-in model by default.

idle: tokens/s of 4 clients of one model, alone in its server, and beside another loaded model, in
turn. both: tokens/s of 4 clients of each model, with divided cores as by default, with all threads
each, and with half of them each. swap: TTFT of a prompt of 2,000 tokens after its model was
unloaded and loaded again, with a disk cache, and the times of the load and of the prompt without a
cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from benchmarks.adapters import compute_rate, send
from benchmarks.adapters import serve as start
from cllm.bench.load.workload import RequestSpec, word_tasks
from cllm.bench.servers import RunningServer, load
from cllm.cli.doctor import describe_cpu
from cllm.cli.main import install_signal_handlers
from cllm.environment import count_cpus
from cllm.models.catalog import BUILTIN


@contextmanager
def serve(folder: Path, model: Path, names: str, more: str = "") -> Iterator[RunningServer]:
    """Serve a model under each of ``names``."""
    models = [f"  {name}: {{path: {model}, preload: true}}" for name in names]
    with start(folder, ["models:", *models, "server.allow_model_changes: true", more]) as server:
        for name in names:
            send(server, [name], 1)
        yield server


def measure_idle(folder: Path, model: Path, requests: int, rounds: int) -> None:
    ratios = []
    for _ in range(rounds):
        with serve(folder, model, "a") as server:
            alone = compute_rate(send(server, ["a"], requests))
        with serve(folder, model, "ab") as server:
            beside = {name: compute_rate(send(server, [name], requests)) for name in "ab"}
            loads = count_loads(server)
        ratios += [rate / alone for rate in beside.values()]
        rates = ", ".join(f"{name} {rate:.0f}" for name, rate in beside.items())
        print(f"idle: alone {alone:.0f} tokens/s, beside an idle model {rates}, {loads} loads")
    print(f"idle: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of alone")


def count_loads(server: RunningServer) -> int:
    page = httpx2.get(f"{server.url}/metrics").text.splitlines()
    return int(sum(float(x.split()[-1]) for x in page if x.startswith("cllm:model_loads_total{")))


def measure_both(folder: Path, model: Path, requests: int, rounds: int) -> None:
    cpus = count_cpus()
    ways = {
        "divided": "",
        "all threads each": f"backend.llama_cpp.n_threads: {cpus}",
        "half of the threads each": f"backend.llama_cpp.n_threads: {max(1, cpus // 2)}",
    }
    totals: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, more in ways.items():
            with serve(folder, model, "ab", more) as server:
                totals[way].append(compute_rate(send(server, ["a", "b"], requests)))
            print(f"both, {way}: {totals[way][-1]:.0f} tokens/s", flush=True)
    for way, rates in totals.items():
        median = statistics.median(rates)
        print(f"both, {way}: {median:.0f} tokens/s together ({min(rates):.0f}-{max(rates):.0f})")


def measure_ttft(server: RunningServer, number: int) -> float:
    """Return the seconds until the first token of the long prompt with this number."""
    spec = RequestSpec(model="a", prompt_words=800, max_tokens=4, seed=-1 - number)
    (answer,) = load(server, word_tasks(1, spec), 1).answers
    return answer.first - answer.sent


def measure_swap(folder: Path, model: Path, rounds: int) -> None:
    with serve(folder, model, "ab", f"kv.disk_cache: {folder / 'prefixes'}") as server:

        def change(what: str) -> None:
            url = f"{server.url}/models/{what}"
            httpx2.post(url, json={"model": "a"}, timeout=60).raise_for_status()

        for number in range(rounds):
            cold = measure_ttft(server, number)
            change("unload")
            begun = time.perf_counter()
            change("load")
            load_s = time.perf_counter() - begun
            change("unload")
            swapped = measure_ttft(server, number)
            limit = load_s + cold / 10
            verdict = "reached" if swapped <= limit else "MISSED"
            print(
                f"swap: cold {cold:.2f} s, load {load_s:.2f} s, after the swap {swapped:.2f} s "
                f"(target {limit:.2f} s): {verdict}",
                flush=True,
            )


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--requests", type=int, default=40, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="idle,both,swap")
    options = parser.parse_args()
    print(describe_cpu())
    model = options.model.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "idle" in options.only:
            measure_idle(folder, model, options.requests, options.rounds)
        if "both" in options.only:
            measure_both(folder, model, options.requests, options.rounds)
        if "swap" in options.only:
            measure_swap(folder, model, options.rounds)


if __name__ == "__main__":
    main()
