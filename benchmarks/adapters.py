"""Measure what adapters cost: 16 of them with 4 clients each, beside one with 4 clients.

    uv run python -m benchmarks.adapters [MODEL] [--adapters 16] [--requests 3] [--rounds 3]

Without MODEL, the built-in model. Each client sends its requests one after the other. Both loads
are whole requests, so that each token comes with its share of the prompts. Printed are the tokens
per second of both, in turn, their ratio, and Jain's index of the adapters' tokens when the first
adapter is done.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx2

from cllm.bench.make_adapter import write_adapter
from cllm.cli.doctor import describe_cpu
from cllm.models.catalog import BUILTIN

CLIENTS = 4
MAX_TOKENS = 48


async def talk(url: str, model: str, client: int, requests: int, tokens: Counter[str]) -> None:
    """Send unique requests, one after the other, and count the tokens that arrive."""
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
        for number in range(requests):
            body = {
                "model": model,
                "prompt": f"{time.monotonic_ns()} Client {client} asks {model} number {number}:",
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            async with http.stream("POST", "/v1/completions", json=body) as stream:
                async for line in stream.aiter_lines():
                    tokens[model] += line.startswith("data: {")


async def measure(url: str, models: list[str], requests: int) -> tuple[float, Counter[str]]:
    """Return the tokens per second, and how many each model's clients had when the first ones were
    done.
    """
    tokens: Counter[str] = Counter()
    first: Counter[str] = Counter()

    async def serve(model: str) -> None:
        await asyncio.gather(*(talk(url, model, i, requests, tokens) for i in range(CLIENTS)))
        if not first:
            first.update(tokens)

    begun = time.monotonic()
    await asyncio.gather(*map(serve, models))
    return tokens.total() / (time.monotonic() - begun), first


def jain(shares: list[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [f"adapter-{i}" for i in range(options.adapters)]
        lines = [f"model: {{path: {options.model}, name: base}}", "adapters:"]
        for i, name in enumerate(names):
            path = write_adapter(Path(folder) / f"{name}.gguf", options.model, seed=i, rank=16)
            lines.append(f"  {name}: {{path: {path}}}")
        config = Path(folder) / "c.yaml"
        config.write_text("\n".join(lines))
        command = [sys.executable, "-m", "cllm", "serve", "--config", str(config)]
        process = subprocess.Popen([*command, "--port", "8765", "--storage.folder", folder])
        try:
            run_rounds("http://127.0.0.1:8765", names, options.requests, options.rounds)
        finally:
            process.terminate()
            process.wait()


def run_rounds(url: str, names: list[str], requests: int, rounds: int) -> None:
    wait_until_ready(url)
    asyncio.run(measure(url, names[:1], 1))
    ratios, indexes = [], []
    for _ in range(rounds):
        one, _ = asyncio.run(measure(url, names[:1], 4 * requests))
        many, tokens = asyncio.run(measure(url, names, requests))
        ratios.append(many / one)
        indexes.append(jain([tokens[name] for name in names]))
        print(
            f"one adapter {one:.1f} tokens/s, {len(names)} adapters {many:.1f} tokens/s: "
            f"{ratios[-1]:.3f}, Jain's index {indexes[-1]:.4f}"
        )
    print(
        f"{describe_cpu()}: median {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}-{max(ratios):.3f}), Jain's index at least {min(indexes):.4f}"
    )


def wait_until_ready(url: str) -> None:
    while True:
        try:
            if httpx2.get(f"{url}/ready").status_code == 200:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(0.2)


if __name__ == "__main__":
    main()
