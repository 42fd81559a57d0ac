"""Measures single attention operations: ggml's and cLLM's kernel, in alternating rounds.

    uv run python benchmarks/attention.py            # two threads, wall clock
    uv run python benchmarks/attention.py -t 1       # one thread, CPU time: for a busy machine

"shared": the streams have the same memory for their keys and values. The figures are the shortest
times of all rounds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from native.kernels import Case, Kernels, build, store

# heads, KV heads, size of a head, positions, streams, tokens of each, shared
SHAPES = (
    (16, 8, 128, 128, 8, 1, False),
    (16, 8, 128, 1024, 8, 1, False),
    (16, 8, 128, 2048, 8, 1, False),
    (16, 8, 128, 4096, 8, 1, False),
    (16, 8, 128, 2048, 8, 1, True),
    (16, 8, 128, 8192, 1, 1, False),
    (16, 8, 128, 2048, 1, 11, False),
    (16, 8, 128, 2048, 1, 32, False),
    (16, 8, 128, 2048, 1, 64, False),
    (16, 8, 128, 2048, 1, 512, False),
    (32, 8, 128, 2048, 8, 1, False),
    (32, 8, 128, 2048, 8, 1, True),
    (32, 4, 128, 2048, 8, 1, False),
    (9, 3, 64, 2048, 8, 1, False),
    (4, 1, 256, 2048, 8, 1, False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure attention.")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--type", default="f16", help="of keys and values")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the rows to measure")
    options = parser.parse_args()
    kernels = Kernels(build())
    print("row heads  size positions streams x tokens         ggml ms  ours ms  ratio")
    for i, shape in enumerate(SHAPES):
        if options.only is None or i in options.only:
            times = measure(kernels, make_case(*shape, kind=options.type), options)
            heads, kv_heads, size, positions, streams, tokens, shared = shape
            print(
                f"{i:3} {heads:2}/{kv_heads:<2} {size:4} {positions:7} {streams:6} x {tokens:<3}"
                f"{'shared' if shared else '':12} {times[0] * 1e3:10.2f} {times[1] * 1e3:8.2f} "
                f"{times[0] / times[1]:6.2f}",
                flush=True,
            )


def make_case(
    heads: int,
    kv_heads: int,
    size: int,
    positions: int,
    streams: int,
    tokens: int,
    shared: bool,
    *,
    kind: str = "f16",
) -> Case:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((streams, heads, tokens, size), dtype=np.float32)
    stored = (1 if shared else streams, positions, kv_heads, size)
    cells = [store(rng.standard_normal(stored, dtype=np.float32), kind) for _ in range(2)]
    k, v = (each.transpose(0, 2, 1, 3) for each in cells)
    if shared:
        k, v = (np.broadcast_to(each, (streams, *each.shape[1:])) for each in (k, v))
    mask = np.zeros((streams, tokens, positions), np.float16)
    for t in range(tokens):
        mask[:, t, positions - tokens + t + 1 :] = -np.inf
    return Case(q, k, v, kind, kind, mask, scale=size**-0.5)


def measure(kernels: Kernels, case: Case, options: argparse.Namespace) -> list[float]:
    """Return the shortest times of ggml and of the kernel, in seconds."""
    best = [float("inf")] * 2
    for round_number in range(options.rounds + 1):
        for ours in range(2):
            repeat = 1 if round_number == 0 or best[ours] > 0.1 else 5
            seconds = kernels.run(case, options.threads, ggml=not ours, repeat=repeat, work=2 << 20)
            best[ours] = min(best[ours], seconds)
    return best


if __name__ == "__main__":
    main()
