"""The figures that ``cllm bench compare`` derives from its results, and their targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from cllm.bench.comparison import BOUND, CLLM, DEFAULT_SERVER, ENGINE, LLAMA_SERVER, Results, Run


class Figure(msgspec.Struct, frozen=True):
    """A number with a target. ``values``: one for each round. Their median, or with ``every`` each
    of them, must be at least ``target``; without ``at_least``, at most ``target``.
    """

    name: str
    values: list[float]
    target: float | None = None
    at_least: bool = True
    every: bool = False
    unit: str = ""

    @property
    def judged(self) -> float:
        if not self.every:
            return statistics.median(self.values)
        return min(self.values) if self.at_least else max(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.judged >= self.target if self.at_least else self.judged <= self.target

    def verdict(self) -> str:
        if self.target is None:
            return ""
        by = abs(self.judged - self.target)
        distance = f"{by:.1f}{self.unit}" if self.unit else f"{by / self.target:.1%}"
        return f"{'met' if self.met else '**missed**'} by {distance}" if by else "met"


TO_BOUND, TO_ENGINE = 0.99, 0.97
TO_LLAMA_SERVER = {1: 1.00, 8: 1.05, 32: 1.08}
TO_DEFAULT_BUILD = 1.2  # for prefill, if AVX2 is the CPU's widest vector extension
TTFT = {LLAMA_SERVER: {8: 1.0, 32: 1.0}, DEFAULT_SERVER: {8: 0.8}}
MEMORY_MB, START_S = 150.0, 1.5


def figures(results: Results) -> list[Figure]:
    """Return the figures that were measured, with their targets."""
    groups = (
        build_figures(results),
        engine_figures(results.runs),
        server_figures(results.runs),
        ttft_figures(results.runs),
        shared_prefix_figures(results.shared),
        success_figures(results),
        process_figures(results.runs),
    )
    return [figure for group in groups for figure in group if figure.values]


def build_figures(results: Results) -> Iterator[Figure]:
    for test, rates in results.llama_bench.items():
        ratios = [
            ratio(a, b) for a, b in zip(rates, results.default_bench.get(test, []), strict=False)
        ]
        target = TO_DEFAULT_BUILD if test.startswith("pp") and is_avx2(results) else None
        yield Figure(
            f"llama-bench {test}, cLLM's compiler switches / default build", ratios, target
        )


def engine_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for size in sizes(runs):
        values = paired(runs, size, decode_speed)(ENGINE, BOUND, ratio)
        yield Figure(f"decoding, engine in process / llama-batched-bench, {size}", values, TO_BOUND)
    for size in sizes(runs):
        values = paired(runs, size, output_speed)(CLLM, ENGINE, ratio)
        name = f"output tokens/s, HTTP streaming / engine in process, {size}"
        yield Figure(name, values, TO_ENGINE)


def server_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for size in sizes(runs):
        pair = paired(runs, size, output_speed)
        name = f"output tokens/s, cLLM / llama-server, {size}"
        yield Figure(name, pair(CLLM, LLAMA_SERVER, ratio), TO_LLAMA_SERVER.get(size))
        name = f"the bound of it, llama-batched-bench / llama-server, {size}"
        yield Figure(name, pair(BOUND, LLAMA_SERVER, ratio))
        name = f"output tokens/s, cLLM / {DEFAULT_SERVER}, {size}"
        yield Figure(name, pair(CLLM, DEFAULT_SERVER, ratio))


def ttft_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for system, targets in TTFT.items():
        for size in sizes(runs):
            values = paired(runs, size, mean_ttft)(CLLM, system, ratio)
            name = f"mean TTFT, cLLM / {system}, {size}"
            yield Figure(name, values, targets.get(size), at_least=False)


def shared_prefix_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for system in TTFT:
        for size in sizes(runs):
            speeds = paired(runs, size, output_speed)(CLLM, system, ratio)
            yield Figure(f"shared prefix, output tokens/s, cLLM / {system}, {size}", speeds)
            values = paired(runs, size, mean_ttft)(CLLM, system, ratio)
            yield Figure(f"shared prefix, mean TTFT, cLLM / {system}, {size}", values)


def success_figures(results: Results) -> Iterator[Figure]:
    every = (*results.runs, *results.kept, *results.curve, *results.shared)
    shares = [success(run) for run in every if run.system == CLLM]
    yield Figure("share of cLLM's requests that succeed", shares, 1.0, every=True)


def process_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Yield the figures of cLLM's processes: memory, start and CPU time."""
    starts: list[float] = []
    for size in sizes(runs):
        values = paired(runs, size, lambda run: run.memory_mb)(CLLM, LLAMA_SERVER, difference)
        name = f"memory, cLLM - llama-server, {size}"
        yield Figure(name, values, MEMORY_MB, at_least=False, unit=" MB")
        starts += paired(runs, size, start_or_load)(CLLM, ENGINE, difference)
    name = "start of cLLM until ready - loading of the model"
    yield Figure(name, starts, START_S, at_least=False, unit=" s")
    costs = [
        run.cpu_us_per_token
        for run in runs
        if run.system == CLLM and run.cpu_us_per_token is not None
    ]
    yield Figure("CPU of the API process for a streamed token", costs, unit=" µs")


def sizes(runs: Iterable[Run]) -> list[int]:
    return sorted({run.num_seqs for run in runs})


def output_speed(run: Run) -> float:
    return run.output_tokens_per_s


def decode_speed(run: Run) -> float | None:
    return run.decode_tokens_per_s


def mean_ttft(run: Run) -> float | None:
    return run.ttft_ms


def start_or_load(run: Run) -> float | None:
    return run.load_s if run.system == ENGINE else run.start_s


def is_avx2(results: Results) -> bool:
    """Return whether AVX2 is the widest vector extension that llama.cpp uses on this machine."""
    used = results.machine.get("llama.cpp uses", "").split(", ")
    return "AVX2" in used and "AVX512" not in used


def paired(
    runs: Iterable[Run], num_seqs: int, value: Callable[[Run], float | None]
) -> Callable[[str, str, Callable[[float, float], float]], list[float]]:
    """Return a function that combines the values of two systems round by round, where both were
    measured.
    """
    values = {(run.system, run.round): value(run) for run in runs if run.num_seqs == num_seqs}

    def join(one: str, other: str, how: Callable[[float, float], float]) -> list[float]:
        pairs = [(values[one, i], values.get((other, i))) for system, i in values if system == one]
        return [how(a, b) for a, b in pairs if a is not None and b]

    return join


def ratio(one: float, other: float) -> float:
    return one / other


def difference(one: float, other: float) -> float:
    return one - other


def success(run: Run) -> float:
    return run.num_succeeded / run.num_requests
