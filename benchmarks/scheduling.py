"""Measure whether the scheduler meets those targets that no row of ``cllm bench compare`` has.

    uv run python benchmarks/scheduling.py [NAME ...] --model 0.6b.gguf --rounds 3 --json out.json

NAME: shared-prefix small-pool fairness queue speculation restart; all of them if none
is named. Each prints its figures with their spread and targets. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cllm.backends.base import Backend
from cllm.bench.load.client import Outcome, Target
from cllm.bench.load.workload import Task, Words, word_tasks
from cllm.bench.servers import LLAMA_SERVER, cllm, failures, llama_server, load, mean_ttft
from cllm.cli.main import install_signal_handlers
from cllm.core.batch import Batch, Copy, Load, Operation, Row, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_backend, build_vocabulary
from cllm.engine.params import EngineParams
from cllm.models.builtin.questions import held_out_questions
from cllm.process.launch import enable_huge_pages
from cllm.scheduler.report import collect_stats

LAYOUTS = ("unified", "partitioned")
THREADS = ("-t", os.cpu_count())  # of llama-server
# random weights repeat themselves, so speculation would gain too much
NO_GUESSES = ("--scheduler.speculation", "off")


class Report:
    """Figures, and those that miss their targets."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.missed: list[str] = []

    def figure(
        self,
        name: str,
        values: list[float],
        target: float | None = None,
        *,
        least: bool = True,
        every: bool = False,
    ) -> None:
        """Print the median and the spread.

        ``least``: the median must be at least the target, otherwise at most.

        ``every``: each value must reach the target, not only the median.
        """
        median = statistics.median(values)
        self.figures[name] = {"median": median, "values": values, "target": target}
        line = f"  {name}: {median:.3f} ({min(values):.3f}-{max(values):.3f})"
        if target is not None:
            judged = (min(values) if least else max(values)) if every else median
            reached = judged >= target if least else judged <= target
            line += (
                f"  target {'>=' if least else '<='} {target:g}: "
                f"{'reached' if reached else 'MISSED'}"
            )
            if not reached:
                self.missed.append(name)
        print(line, flush=True)


def words(count: int, options: argparse.Namespace, **changes: int) -> list[Task]:
    wanted = {"prompt_words": 40, "max_tokens": 30, "seed": options.seed} | changes
    return word_tasks(count, Words(model="m", **wanted))


def ttfts(outcome: Outcome) -> list[float]:
    return [answer.first - answer.sent for answer in outcome.answers]


# --- shared prefix ------------------------------------------------------------------------------


def shared_prefix(options: argparse.Namespace, report: Report) -> None:
    """24 requests from 8 clients share 1,000 words and have 20 of their own; each answer has 30
    tokens.
    """
    ours: list[tuple[float, float]] = []
    limits: list[tuple[float, float]] = []
    computed = []
    for i in range(options.rounds):
        tasks = words(24, options, prompt_words=1020, shared_words=1000, seed=options.seed + i)
        limit, num_tokens = backend_limit(options, tasks)
        limits.append(limit)
        with cllm(
            options.model, "--max-num-seqs", 8, "--context", 4096, *NO_GUESSES, *options.flags
        ) as target:
            load(target, words(1, options, seed=99 + i), 1)
            before = metric(target, "cllm:prefill_tokens_computed_total")
            outcome = load(target, tasks, 8)
            ours.append((outcome.wall, mean_ttft(outcome)))
            computed.append(
                (metric(target, "cllm:prefill_tokens_computed_total") - before) / num_tokens
            )
        print(f"  round {i + 1}: cLLM {ours[-1]}, the backend alone {limits[-1]}", flush=True)
    report.figure(
        "share of the backend's limit",
        [a[0] / b[0] for a, b in zip(limits, ours, strict=True)],
        0.9,
    )
    report.figure(
        "mean TTFT / the backend's own", [a[1] / b[1] for a, b in zip(ours, limits, strict=True)]
    )
    report.figure("prompt tokens computed / (shared once + own)", computed, 1.05, least=False)


def backend_limit(
    options: argparse.Namespace, tasks: list[Task]
) -> tuple[tuple[float, float], int]:
    """Return the least time and mean TTFT, in seconds, of llama.cpp for this work, and the prompt
    tokens to compute.

    The work: the shared prompt once, then three times the own parts of eight prompts in one batch
    and 29 steps of these eight sequences.
    """
    vocabulary = build_vocabulary(EngineParams(path=str(options.model)))
    texts = [msgspec.json.decode(task.body)["messages"][0]["content"] for task in tasks]
    prompts = [vocabulary.tokenize(text, add_special=True, parse_special=False) for text in texts]
    columns = np.array([prompt[: min(map(len, prompts))] for prompt in prompts])
    num_shared = int((columns == columns[0]).all(axis=0).argmin())
    results = []
    for layout in LAYOUTS:
        params = EngineParams(
            path=str(options.model),
            context_length=4096,
            max_num_seqs=8,
            kv_memory=1 << 40,
            layout=layout,
        )
        backend = build_backend(params)
        results.append(limit_of(backend, prompts, num_shared))
        backend.close()
    return min(results), num_shared + sum(len(prompt) - num_shared for prompt in prompts)


def limit_of(backend: Backend, prompts: list[list[int]], num_shared: int) -> tuple[float, float]:
    size = backend.info.max_num_batched_tokens
    seqs = [
        Sequence(Request(str(i), prompt, SamplingParams()), 0, 0, 4096)
        for i, prompt in enumerate(prompts)
    ]
    for i, seq in enumerate(seqs):
        seq.seq_id = i % 8
    backend.forward(Batch([Row(seqs[0], 0, size, 0)], []))  # warm-up, which the servers get too
    backend.forward(Batch([], [Trim(0, 0)]))
    begun = sent = time.perf_counter()
    ttft = 0.0
    for start in range(0, num_shared, size):
        count = min(size, num_shared - start)
        backend.forward(Batch([Row(seqs[0], start, count, 0)], []))
    for first in range(0, len(seqs), 8):
        wave = seqs[first : first + 8]
        operations: list[Operation] = [Trim(0, num_shared), *(Trim(i, 0) for i in range(1, 8))]
        operations += [Copy(0, i, num_shared) for i in range(1, 8)]
        rows = [Row(seq, num_shared, seq.num_tokens - num_shared, 1) for seq in wave]
        np.argmax(backend.forward(Batch(rows, operations)), axis=1)
        ttft += len(wave) / len(seqs) * (time.perf_counter() - sent)
        for seq in wave:
            seq.append(1)
        for _ in range(29):
            logits = backend.forward(
                Batch([Row(seq, seq.num_tokens - 1, 1, 1) for seq in wave], [])
            )
            for seq, token in zip(wave, np.argmax(logits, axis=1).tolist(), strict=True):
                seq.append(token)
        sent = time.perf_counter()
    return sent - begun, ttft


def metric(target: Target, name: str) -> float:
    import urllib.request

    with urllib.request.urlopen(f"{target.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)))


# --- a pool that is too small -------------------------------------------------------------------


def question_tasks(count: int, seed: int, least: int) -> list[Task]:
    """Return questions for the built-in model with answers of ``least`` characters or more."""
    found = []
    for question in held_out_questions(seed, None):
        if len(question.answer) >= least and not question.tools:
            body = {"model": "m", "messages": question.messages, "temperature": 0, "stream": True}
            body |= {"stream_options": {"include_usage": True}, "max_tokens": 400}
            found.append(Task(msgspec.json.encode(body), answer=question.answer))
            if len(found) == count:
                break
    return found


def small_pool(options: argparse.Namespace, report: Report) -> None:
    """16 concurrent, growing requests with cells for about four of them; the built-in model's
    answers are checked.
    """
    from cllm.models.catalog import BUILTIN

    ours: list[float] = []
    theirs: list[float] = []
    ample: list[float] = []
    parked: list[float] = []
    for i in range(options.rounds):
        tasks = question_tasks(16, options.seed + i, 120)
        flags = [
            "--kv.layout",
            "unified",
            "--kv.max-memory-mb",
            1,
            "--context",
            256,
            "--max-num-seqs",
            16,
        ]
        with cllm(None, *flags) as target:
            outcome = load(target, tasks, 16, may_fail=True)
            ours.append(sum(not answer.failure for answer in outcome.answers) / 16)
            parked.append(metric(target, "cllm:parked_total"))
        for cells, found in ((512, theirs), (16 * 512, ample)):
            with llama_server(
                BUILTIN, "-np", 16, "-kvu", "-c", cells, "--jinja", *THREADS
            ) as target:
                outcome = load(target, tasks, 16, may_fail=True)
                found.append(sum(not answer.failure for answer in outcome.answers) / 16)
                print(f"  llama-server, {cells} cells:", Counter(failures(outcome)), flush=True)
    report.figure("answers right, cLLM", ours, 1.0, every=True)
    report.figure("answers right, llama-server -kvu", theirs)
    report.figure("answers right, llama-server -kvu with room for all", ample, 1.0, every=True)
    report.figure("times a sequence was parked", parked)


# --- fairness -----------------------------------------------------------------------------------


def fairness(options: argparse.Namespace, report: Report) -> None:
    """One key sends 200 requests and another 10, in the same class; then both send 60."""
    slower, jain = [], []
    for i in range(options.rounds):
        with cllm(
            options.model, "--max-num-seqs", 8, "--context", 512, *NO_GUESSES, *options.flags
        ) as target:
            tasks = words(10, options, max_tokens=16, seed=30 + i)
            load(target, words(8, options, max_tokens=4, seed=99 + i), 8)
            alone = mean_latency(load(target, tasks, 10, api_key="small"))
            _, light = together(
                target,
                (words(200, options, max_tokens=16, seed=31 + i), 200, "large", 0.0),
                (words(10, options, max_tokens=16, seed=32 + i), 10, "small", 2.0),
            )
            slower.append(mean_latency(light) / alone)
            a, b = together(
                target,
                (words(60, options, max_tokens=16, seed=33 + i), 60, "first", 0.0),
                (words(60, options, max_tokens=16, seed=34 + i), 60, "second", 0.0),
            )
            until = min(sorted(x.first for x in side.answers)[-9] for side in (a, b))
            served = [
                sum(t <= until for x in side.answers for t in x.content_times) for side in (a, b)
            ]
            jain.append(sum(served) ** 2 / (2 * sum(s * s for s in served)))
        print(
            f"  round {i + 1}: {slower[-1]:.2f} times as long as alone, served {served}", flush=True
        )
    report.figure("the small one's mean latency / alone", slower, 2.5, least=False)
    report.figure("Jain index of served tokens", jain, 0.95)


def together(target: Target, *loads: tuple[list[Task], int, str, float]) -> list[Outcome]:
    """Run several loads concurrently.

    Each has tasks, clients, a key, and seconds to wait before it starts.
    """
    outcomes: dict[int, Outcome] = {}

    def run(i: int, tasks: list[Task], concurrency: int, key: str, delay: float) -> None:
        time.sleep(delay)
        outcomes[i] = load(target, tasks, concurrency, api_key=key)

    threads = [threading.Thread(target=run, args=(i, *load)) for i, load in enumerate(loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[i] for i in range(len(loads))]


def mean_latency(outcome: Outcome) -> float:
    return sum(answer.ended - answer.sent for answer in outcome.answers) / len(outcome.answers)


# --- the queue ----------------------------------------------------------------------------------


def queue(options: argparse.Namespace, report: Report) -> None:
    """Microseconds to schedule a step with 10 and with 10,000 waiting requests."""
    from cllm.backends.fake.backend import FakeBackend
    from cllm.engine.build import build_engine
    from cllm.engine.commands import Add

    gc.disable()  # as in the engine process

    def cost(num_waiting: int) -> float:
        backend = FakeBackend(
            context_length=512, max_num_seqs=32, max_num_batched_tokens=512, length=10**9
        )
        engine = build_engine(backend, EngineParams(speculation="off"))
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        num_sent, spent = 0, []
        for step in range(500):
            while num_sent == 0 or len(engine.scheduler.sequences.waiting) < num_waiting:
                request = Request(
                    str(num_sent),
                    [num_sent % 250, *range(40)],
                    params,
                    account=f"key{num_sent % 500}",
                )
                engine.handle(Add(request))
                num_sent += 1
            begun = time.perf_counter()
            batch = engine.scheduler.schedule(step * 0.01)
            spent.append(time.perf_counter() - begun)
            assert batch is not None
            tokens = (
                engine.sampler.sample(batch, backend.forward(batch)) if batch.num_samples else []
            )
            begun = time.perf_counter()
            engine.scheduler.update(batch, tokens, step * 0.01 + 0.005)
            collect_stats(engine.scheduler)
            spent[-1] += time.perf_counter() - begun
        return statistics.fmean(spent[50:])

    ratios = []
    for _ in range(options.rounds):
        small = cost(10)
        large = cost(10_000)
        print(
            f"  a step with 10 waiting {small * 1e6:.0f} us, with 10,000 {large * 1e6:.0f} us",
            flush=True,
        )
        ratios.append(large / small)
    gc.enable()
    report.figure("cost of a step, 10,000 waiting / 10 waiting", ratios, 1.1, least=False)


# --- speculation --------------------------------------------------------------------------------


def speculation(options: argparse.Namespace, report: Report) -> None:
    """The built-in model repeats a text from the conversation, with and without prompt lookup."""
    alone, crowd = [], []
    for i in range(options.rounds):
        speeds: dict[tuple[str, int], float] = {}
        texts: dict[str, list[str]] = {}
        for how in ("off", "prompt_lookup") if i % 2 else ("prompt_lookup", "off"):
            flags = ["--scheduler.speculation", how, "--context", 1024, "--max-num-seqs", 16]
            with cllm(None, *flags) as target:
                tasks = copy_tasks(48, options.seed + i)
                load(target, tasks[:2], 1, may_fail=True)
                for clients in (1, 16):
                    outcome = load(target, tasks, clients, may_fail=True)
                    assert all("wrong answer" in failure for failure in failures(outcome)), (
                        failures(outcome)
                    )
                    speeds[how, clients] = (
                        sum(a.output_tokens for a in outcome.answers) / outcome.wall
                    )
                    texts.setdefault(how, []).extend(sorted(a.text() for a in outcome.answers))
        assert texts["off"] == texts["prompt_lookup"], "speculation changed a text"
        alone.append(speeds["prompt_lookup", 1] / speeds["off", 1])
        crowd.append(speeds["prompt_lookup", 16] / speeds["off", 16])
    report.figure("tokens/s with prompt lookup / without, 1 client", alone, 1.5)
    report.figure("the same with 16 clients", crowd, 0.98, every=True)


def copy_tasks(count: int, seed: int) -> list[Task]:
    """Return conversations that ask for an answer again that they already contain."""
    tasks = []
    for question in held_out_questions(seed, None):
        if len(question.messages) == 1 and not question.tools and len(question.answer) >= 60:
            said = {"role": "assistant", "content": question.answer}
            messages = [*question.messages, said, *question.messages]
            body = {
                "model": "m",
                "messages": messages,
                "temperature": 0,
                "stream": True,
                "max_tokens": 200,
            }
            body["stream_options"] = {"include_usage": True}
            tasks.append(Task(msgspec.json.encode(body), answer="?"))  # so that the text is kept
            if len(tasks) == count:
                break
    return tasks


# --- restart ------------------------------------------------------------------------------------


def restart(options: argparse.Namespace, report: Report) -> None:
    """TTFT of a prompt of about 2,000 tokens, cold and after a restart with the disk cache."""
    ratios = []
    params = EngineParams(
        path=str(options.model), context_length=1024, max_num_seqs=2, kv_memory=1 << 40
    )
    backend = build_backend(params)
    ram = [restored(backend, 1000) for _ in range(options.rounds)]
    backend.close()
    for i in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            flags = [
                "--max-num-seqs",
                4,
                "--context",
                4096,
                "--kv.disk-cache",
                folder,
                *options.flags,
            ]
            tasks = words(
                1, options, prompt_words=options.long_words * 2 // 3, max_tokens=2, seed=40 + i
            )
            with cllm(options.model, *flags) as target:
                load(target, words(1, options, seed=99 + i), 1)
                cold = ttfts(load(target, tasks, 1))[0]
            with cllm(options.model, *flags) as target:
                load(target, words(1, options, seed=98 + i), 1)
                outcome = load(target, tasks, 1)
                warm = ttfts(outcome)[0]
            assert outcome.answers[0].cached_tokens >= 0.9 * outcome.answers[0].prompt_tokens
            print(
                f"  round {i + 1}: cold {cold:.2f} s, warm {warm:.3f} s, "
                f"{outcome.answers[0].cached_tokens} cached"
            )
            ratios.append(warm / cold)
    report.figure("TTFT after a restart / cold", ratios, 0.1, least=False)
    report.figure("1,000 tokens loaded from RAM / computed", ram, 0.05, least=False)


def restored(backend: Backend, num_tokens: int) -> float:
    """Return the time to load a prefix from RAM, divided by the time to compute it."""
    seq = Sequence(
        Request("0", [7 * i % 1000 for i in range(num_tokens)], SamplingParams()),
        0,
        0,
        num_tokens + 1,
    )
    seq.seq_id, size = 0, backend.info.max_num_batched_tokens
    begun = time.perf_counter()
    for start in range(0, num_tokens, size):
        backend.forward(
            Batch(
                [Row(seq, start, min(size, num_tokens - start), 0)],
                [Trim(0, 0)] if start == 0 else [],
            )
        )
    computed = time.perf_counter()
    backend.forward(Batch([], [Save(0, 0), Trim(1, 0)]))
    saved = time.perf_counter()
    backend.forward(Batch([], [Load(0, 1, num_tokens)]))
    return (time.perf_counter() - saved) / (computed - begun)


BENCHMARKS: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "shared-prefix": shared_prefix,
    "small-pool": small_pool,
    "fairness": fairness,
    "queue": queue,
    "speculation": speculation,
    "restart": restart,
}


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*BENCHMARKS, []])
    parser.add_argument("--model", type=Path, default=Path("models/qwen3-0.6b.gguf"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--long-words", type=int, default=1200, help="words that are about 3,000 tokens"
    )
    parser.add_argument("--flags", nargs="*", default=[], help="further flags for cllm serve")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    environment = enable_huge_pages(os.environ)
    if environment != os.environ:  # so that this process has big pages, like the engine process
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    report = Report()
    for name in options.names or BENCHMARKS:
        if name == "small-pool" and not LLAMA_SERVER.exists():
            sys.exit(f"{LLAMA_SERVER} is missing: python benchmarks/build_peers.py")
        print(f"{name}: {BENCHMARKS[name].__doc__}", flush=True)
        BENCHMARKS[name](options, report)
    if options.json:
        options.json.write_text(json.dumps(report.figures, indent=2) + "\n")
    sys.exit(1 if report.missed else 0)


if __name__ == "__main__":
    main()
