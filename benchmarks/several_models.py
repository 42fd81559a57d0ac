"""Measure two models in one server: one that is used while the other is idle, both at once, and one
that is loaded again.

    uv run python -m benchmarks.several_models [MODEL] [--seconds 30] [--rounds 3]
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
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2

from benchmarks.adapters import CLIENTS, talk
from cllm.bench.servers import running
from cllm.cli.doctor import describe_cpu
from cllm.environment import count_cpus
from cllm.models.catalog import BUILTIN

MANY = 1_000_000  # requests: more than fit into the time
WORDS = ("river", "stone", "cloud", "lamp", "paper", "green", "seven", "walk", "under", "bright")


@contextlib.contextmanager
def serve(folder: Path, model: Path, names: str, more: str = "") -> Iterator[str]:
    """Serve a model under each of ``names``, and yield the server's address."""
    lines = ["models:"]
    for name in names:
        lines += [f"  {name}: {{path: {model}, preload: true}}"]
    config = folder / "cllm.yaml"
    config.write_text("\n".join([*lines, "server.allow_model_changes: true", more]))
    command = ("python", "-m", "cllm", "serve", "--config", config, "--port", "PORT")
    with running((*command, "--storage.folder", folder / "state"), "/ready") as server:
        yield server.url


async def count_tokens(url: str, names: str, seconds: float) -> Counter[str]:
    """Return how many tokens the clients of each model get."""
    tokens: Counter[str] = Counter()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(
                *(talk(url, name, i, MANY, tokens) for name in names for i in range(CLIENTS))
            )
    return tokens


def rate(url: str, names: str, seconds: float) -> Counter[str]:
    tokens = asyncio.run(count_tokens(url, names, seconds))
    return Counter({name: round(count / seconds) for name, count in tokens.items()})


def measure_idle(folder: Path, model: Path, seconds: float, rounds: int) -> None:
    ratios = []
    for _ in range(rounds):
        with serve(folder, model, "a") as url:
            rate(url, "a", 3.0)
            alone = rate(url, "a", seconds)["a"]
        with serve(folder, model, "ab") as url:
            rate(url, "b", 3.0)
            rate(url, "a", 3.0)
            beside = {name: rate(url, name, seconds)[name] for name in "ab"}
            loads = count_loads(url)
        ratios += [tokens / alone for tokens in beside.values()]
        print(f"idle: alone {alone} tokens/s, beside an idle model {beside}, {loads} loads")
    print(f"idle: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of alone")


def count_loads(url: str) -> int:
    page = httpx2.get(f"{url}/metrics").text.splitlines()
    return int(sum(float(x.split()[-1]) for x in page if x.startswith("cllm:model_loads_total{")))


def measure_both(folder: Path, model: Path, seconds: float, rounds: int) -> None:
    cpus = count_cpus()
    ways = {
        "divided": "",
        "all threads each": f"backend.llama_cpp.n_threads: {cpus}",
        "half of the threads each": f"backend.llama_cpp.n_threads: {max(1, cpus // 2)}",
    }
    totals: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, more in ways.items():
            with serve(folder, model, "ab", more) as url:
                rate(url, "ab", 3.0)
                tokens = rate(url, "ab", seconds)
            totals[way].append(tokens.total())
            print(f"both, {way}: {dict(tokens)} tokens/s", flush=True)
    for way, found in totals.items():
        median = statistics.median(found)
        print(f"both, {way}: {median:.0f} tokens/s together ({min(found)}-{max(found)})")


def first_token(url: str, prompt: str) -> float:
    """Return the seconds until the first token of a prompt."""
    body = {"model": "a", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    begun = time.perf_counter()
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - begun
    raise AssertionError("no token")


def measure_swap(folder: Path, model: Path, rounds: int) -> None:
    cache = f"kv.disk_cache: {folder / 'prefixes'}"
    with serve(folder, model, "ab", cache) as url:
        for number in range(rounds):
            text = " ".join(WORDS[(i * (number + 3) + i // 7) % len(WORDS)] for i in range(1990))
            prompt = f"Text {number}: {text}"
            change = {"model": "a"}
            cold = first_token(url, prompt)
            httpx2.post(f"{url}/models/unload", json=change, timeout=60).raise_for_status()
            begun = time.perf_counter()
            httpx2.post(f"{url}/models/load", json=change, timeout=60).raise_for_status()
            load = time.perf_counter() - begun
            httpx2.post(f"{url}/models/unload", json=change, timeout=60).raise_for_status()
            swapped = first_token(url, prompt)
            limit = load + cold / 10
            verdict = "reached" if swapped <= limit else "MISSED"
            print(
                f"swap: cold {cold:.2f} s, load {load:.2f} s, after the swap {swapped:.2f} s "
                f"(target {limit:.2f} s): {verdict}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="idle,both,swap")
    options = parser.parse_args()
    print(describe_cpu())
    model = options.model.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "idle" in options.only:
            measure_idle(folder, model, options.seconds, options.rounds)
        if "both" in options.only:
            measure_both(folder, model, options.seconds, options.rounds)
        if "swap" in options.only:
            measure_swap(folder, model, options.rounds)


if __name__ == "__main__":
    main()
