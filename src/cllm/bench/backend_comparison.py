"""Compares backends on one model: their logits, their texts, their speed and their memory.

Each backend runs in a process of its own. Only one of them computes at a time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from cllm.backends.registry import import_options
from cllm.bench.backend_work import Loaded, Logits, Speed, serve
from cllm.bench.console import number_table, print_lines
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.gguf import format_size

if TYPE_CHECKING:
    from rich.console import Console

TEXTS = (
    (
        "The first bridge over the river was built of wood. It stood for sixty years, until high\n"
        "water took it away one night in spring, and for a long time nobody had money for one.\n"
        "People crossed in boats, which was slow, and in winter, when there was ice, not at all.\n"
    ),
    "A list of numbers can be sorted in many ways. The simplest one looks for the smallest number",
    "def count_words(text):\n    words = {}\n    for word in text.split():\n",
    "Question: What is 17 + 25?\nAnswer:",
)
"""The first one is for logits, and the others are continued, each from its end."""
CONTEXT = 1024  # more than the texts have bytes
STOP_SECONDS = 10


class LogitsComparison(msgspec.Struct, frozen=True):
    """``max_difference`` is a share of the largest logit, ``mean_kl`` the mean Kullback-Leibler
    divergence in nats, and ``same_best`` the share of places with the same best token.
    """

    max_difference: float
    mean_kl: float
    same_best: float


class BackendResult(msgspec.Struct, frozen=True):
    """The figures of one backend. The speeds, in tokens per second, are those of each round, by
    the number of sequences. ``logits`` and ``equal_tokens`` compare it with the first backend; the
    latter has for each text the length of the common beginning, and of the longer text.
    """

    backend: str
    model: str
    description: str
    system: str
    load_seconds: float
    memory_bytes: int
    prefill: dict[int, list[float]]
    decode: dict[int, list[float]]
    logits: LogitsComparison | None = None
    equal_tokens: list[tuple[int, int]] | None = None


class Plan(msgspec.Struct, frozen=True):
    """What to measure: ``models`` are names of backends with their files."""

    models: list[tuple[str, Path]]
    sequences: tuple[int, ...] = (1, 8)
    rounds: int = 5
    prompt_tokens: int = 128
    max_tokens: int = 32


class Worker:
    """A process with a backend. Leaving the context ends it."""

    def __init__(self, backend: str, path: Path, plan: Plan) -> None:
        """Raises StartupError if the model cannot be loaded."""
        self.backend, self.path = backend, path
        params = EngineParams(
            backend=backend,
            options=import_options(backend).Options().model_dump(),
            path=str(path),
            context_length=max(CONTEXT, plan.prompt_tokens) + plan.max_tokens,
            max_num_seqs=max(plan.sequences),
            layout="partitioned",
            kv_memory=1 << 62,
        )
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, params, TEXTS)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        with ExitStack() as stack:
            stack.callback(self.close)
            self.loaded: Loaded = self._receive()
            stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def call(self, function: str, *arguments: Any) -> Any:
        """Return what a function of ``backend_work`` returns. Raises StartupError if it fails."""
        with suppress(BrokenPipeError):
            self._connection.send((function, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(STOP_SECONDS)
            answer = f"its process ended with exit code {self._process.exitcode}"
        if isinstance(answer, str):
            raise StartupError(f"{self.backend}: {answer}")
        return answer


def choose_files(backends: tuple[str, ...], paths: list[Path]) -> list[tuple[str, Path]]:
    """Return each backend with the path that it computes: PyTorch with a folder, if one is given.

    Raises StartupError for a backend that can read none.
    """
    chosen = []
    for backend in backends:
        folders = [path for path in paths if path.is_dir()]
        files = [path for path in paths if not path.is_dir()]
        readable = folders + files if backend == "torch" else files
        if not readable:
            raise StartupError(
                f"{backend} cannot read {paths[0]}, which is a checkpoint: name a GGUF file of the "
                "same weights, too"
            )
        chosen.append((backend, readable[0]))
    return chosen


def compare(plan: Plan, progress: Callable[[float, str], None]) -> list[BackendResult]:
    """Measure the backends. ``progress`` receives the share that is done and what comes next.

    Raises StartupError if a model cannot be loaded, or if the models have different vocabularies.
    """
    with ExitStack() as stack:
        workers = []
        for backend, path in plan.models:
            progress(0.0, f"loading with {backend}")
            workers.append(stack.enter_context(Worker(backend, path, plan)))
        first = workers[0]
        for other in workers[1:]:
            if other.loaded.tokens != first.loaded.tokens:
                raise StartupError(
                    f"{first.path} and {other.path} divide texts into different tokens: they are "
                    "not the same model"
                )
        total = (2 + plan.rounds * len(plan.sequences)) * len(workers)
        done = 0

        def call(worker: Worker, function: str, *arguments: Any) -> Any:
            nonlocal done
            progress(done / total, f"{function.replace('_', ' ')} with {worker.backend}")
            done += 1
            return worker.call(function, *arguments)

        text, *prompts = first.loaded.tokens
        logits = [call(worker, "compute_logits", text) for worker in workers]
        texts = [call(worker, "generate", prompts, plan.max_tokens) for worker in workers]
        speeds = measure_speeds(plan, workers, call)
        return [
            BackendResult(
                backend=worker.backend,
                model=str(worker.path),
                description=worker.loaded.description,
                system=worker.loaded.system,
                load_seconds=worker.loaded.seconds,
                memory_bytes=worker.call("measure_memory"),
                prefill={n: [speed.prefill for speed in all_] for n, all_ in speeds[i].items()},
                decode={n: [speed.decode for speed in all_] for n, all_ in speeds[i].items()},
                logits=compare_logits(logits[0], logits[i]) if i else None,
                equal_tokens=list(map(count_equal, texts[0], texts[i])) if i else None,
            )
            for i, worker in enumerate(workers)
        ]


def measure_speeds(
    plan: Plan, workers: list[Worker], call: Callable[..., Any]
) -> list[dict[int, list[Speed]]]:
    """Return for each worker the speeds of all rounds, by the number of sequences."""
    speeds: list[dict[int, list[Speed]]] = [{n: [] for n in plan.sequences} for _ in workers]
    for _ in range(plan.rounds):
        for count in plan.sequences:
            for worker, found in zip(workers, speeds, strict=True):
                sizes = (count, plan.prompt_tokens, plan.max_tokens)
                found[count].append(call(worker, "measure_speed", *sizes))
    return speeds


def compare_logits(expected: Logits, found: Logits) -> LogitsComparison:
    """Compare logits of shape (tokens, vocabulary_size). Some vocabularies end with unused ids,
    which are left out if only one has them.
    """
    size = min(expected.shape[1], found.shape[1])
    expected, found = expected[:, :size], found[:, :size]
    logs, others = log_softmax(expected), log_softmax(found)
    return LogitsComparison(
        max_difference=float(np.abs(found - expected).max() / np.abs(expected).max()),
        mean_kl=float((np.exp(logs) * (logs - others)).sum(axis=1).mean()),
        same_best=float((expected.argmax(axis=1) == found.argmax(axis=1)).mean()),
    )


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True)
    logs: npt.NDArray[np.float64] = shifted - np.log(sums)
    return logs


def count_equal(one: list[int], other: list[int]) -> tuple[int, int]:
    """Return the length of the common beginning, and of the longer text."""
    pairs = enumerate(zip(one, other, strict=False))
    equal = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return equal, max(len(one), len(other))


def print_results(results: list[BackendResult], plan: Plan, console: Console) -> None:
    table = number_table("", *(result.backend for result in results))
    table.add_row("memory", *(format_size(result.memory_bytes) for result in results))
    table.add_row("load, s", *(f"{result.load_seconds:.1f}" for result in results))
    for count in plan.sequences:
        for name in ("prefill", "decode"):
            speeds = [getattr(result, name)[count] for result in results]
            what = f"{name}, {count} sequence{'s' * (count > 1)}, tokens/s"
            table.add_row(
                what, *(f"{median(s):,.0f} ({min(s):,.0f}-{max(s):,.0f})" for s in speeds)
            )
    console.print(table)
    first = results[0]
    print_lines(console, [f"{r.backend}: {r.model}, {r.description}" for r in results])
    for result in results[1:]:
        assert result.logits is not None
        assert result.equal_tokens is not None
        equal = ", ".join(f"{count} of {length}" for count, length in result.equal_tokens)
        line = (
            f"{result.backend} against {first.backend}: logits differ by at most "
            f"{result.logits.max_difference:.2g} of the largest one, mean KL "
            f"{result.logits.mean_kl:.2g}, the same best token in {result.logits.same_best:.1%}; "
            f"greedy texts are equal for {equal} tokens"
        )
        print_lines(console, [line])
