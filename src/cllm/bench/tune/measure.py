"""Measures the speed and quality of a model with given parameters, in a child process, because
parameters may crash it.

The child keeps the weights loaded and opens a context for each job. A candidate that crashes,
exhausts the memory or never ends is ruled out, and the next job gets a new child. The child reads
one job per line on stdin and answers with one line on stdout. The last line on stderr is the error.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from cllm.bench.programs import last_line
from cllm.bench.tune.quality import Quality, compare
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_backend
from cllm.engine.params import EngineParams
from cllm.errors import CLLMError, StartupError
from cllm.process.launch import build_engine_environment

if TYPE_CHECKING:
    from cllm.backends.base import Backend
    from cllm.backends.llama_cpp.backend import LlamaCppBackend
    from cllm.bench.tune.quality import Logits

WINDOW = 512  # tokens of a text that attend to each other
# seconds; multiple of the longest measurement so far
LONG_TIMEOUT, TIMEOUT, TIMES_LONGEST = 900.0, 60.0, 10.0


class CandidateError(Exception):
    """The candidate cannot be measured. The message gives the reason on one line."""


class SpeedWork(msgspec.Struct, frozen=True):
    """``num_seqs`` unrelated prompts of ``prompt_tokens`` tokens, then ``steps`` steps in which all
    of them decode.
    """

    num_seqs: int
    prompt_tokens: int
    steps: int


class Speeds(msgspec.Struct, frozen=True):
    """Tokens per second of all sequences together."""

    prompt: float
    decode: float


class Measure(msgspec.Struct, tag=True, frozen=True):
    """A job that the child answers with Speeds."""

    params: EngineParams
    work: SpeedWork


class Judge(msgspec.Struct, tag=True, frozen=True):
    """A job to compute the logits after each of ``tokens``.

    With ``write``, the child writes them to ``file``. Otherwise it compares them with ``file`` and
    returns Quality.
    """

    params: EngineParams
    tokens: list[int]
    file: str
    write: bool


class Bench:
    """The parent's side. A context manager that ends its child on exit."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: Any = None
        self._path = ""
        self._longest: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def measure(self, params: EngineParams, work: SpeedWork) -> Speeds:
        """Return the speeds of ``work``. Raises CandidateError."""
        return msgspec.json.decode(self._ask(Measure(params, work)), type=Speeds)

    def write_logits(self, params: EngineParams, tokens: list[int], file: Path) -> None:
        """Write the logits after each of ``tokens`` to ``file``. Raises CandidateError."""
        self._ask(Judge(params, tokens, str(file), write=True))

    def quality(self, params: EngineParams, tokens: list[int], file: Path) -> Quality:
        """Compare with the logits that ``write_logits`` wrote for the same tokens.

        Raises CandidateError.
        """
        return msgspec.json.decode(
            self._ask(Judge(params, tokens, str(file), write=False)), type=Quality
        )

    def _ask(self, job: Measure | Judge) -> bytes:
        child = self._child_for(job.params.path)
        assert child.stdin is not None
        assert child.stdout is not None
        limit = LONG_TIMEOUT
        if self._longest is not None and isinstance(job, Measure):
            limit = TIMEOUT + TIMES_LONGEST * self._longest
        timer = threading.Timer(limit, child.kill)
        begun = time.monotonic()
        timer.start()
        try:
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        seconds = time.monotonic() - begun
        if not answer:
            raise CandidateError(self._why_it_ended(limit if seconds >= limit else None))
        if isinstance(job, Measure):
            self._longest = max(seconds, self._longest or 0.0)
        return answer

    def _child_for(self, path: str) -> subprocess.Popen[bytes]:
        if self._child is not None and path == self._path:
            return self._child
        self._end()
        self._path = path
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # _end closes it
        command = [sys.executable, "-P", "-m", __name__]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=-1,
            env=build_engine_environment(),
        )
        return self._child

    def _why_it_ended(self, timeout: float | None) -> str:
        assert self._child is not None
        code = self._child.wait()
        self._errors.seek(0)
        stderr = self._errors.read()
        self._end()
        if timeout is not None:
            return f"it did not end within {timeout:.0f} s"
        if code < 0:
            memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
            return f"it died of {signal.Signals(-code).name}{memory}"
        return last_line(stderr, f"it ended with exit code {code}")

    def _end(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self._child.wait()
        self._errors.close()
        self._child = None


# --- the child ----------------------------------------------------------------------------------


def main() -> None:
    backend: LlamaCppBackend | None = None
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=Measure | Judge)
        params = fit_job(job)
        if backend is None:
            backend = build_backend(params)  # type: ignore[assignment]
        else:
            backend.reopen(params)
        assert backend is not None
        if params.layout not in ("auto", backend.info.layout):
            raise StartupError(f"this model has no {params.layout} KV cache")
        answer = run(backend, job.work) if isinstance(job, Measure) else judge(backend, job)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def fit_job(job: Measure | Judge) -> EngineParams:
    """Return the job's parameters with cells for this job and no more, and without speculation."""
    if isinstance(job, Measure):
        num_seqs, context = job.work.num_seqs, job.work.prompt_tokens + job.work.steps + 1
    else:
        num_seqs, context = 1, WINDOW
    return msgspec.structs.replace(
        job.params,
        max_num_seqs=num_seqs,
        context_length=context,
        kv_memory=1 << 62,
        speculation="off",
    )


def run(backend: Backend, work: SpeedWork) -> Speeds:
    info, rng = backend.info, random.Random(0)
    seqs = []
    for seq_id in range(work.num_seqs):
        prompt = rng.choices(range(info.vocabulary_size), k=work.prompt_tokens)
        seqs.append(Sequence(Request("", prompt, SamplingParams()), 0, 0, info.context_length))
        seqs[-1].seq_id = seq_id
    begun = time.perf_counter()
    for rows in prompt_rows(seqs, info.max_num_batched_tokens):
        backend.forward(Batch(rows, []))
    between = time.perf_counter()
    for step in range(work.steps):
        for seq in seqs:
            seq.append(step)
        backend.forward(Batch([Row(seq, seq.num_tokens - 1, 1, 1) for seq in seqs], []))
    ended = time.perf_counter()
    return Speeds(
        work.num_seqs * work.prompt_tokens / (between - begun),
        work.num_seqs * work.steps / (ended - between),
    )


def prompt_rows(seqs: list[Sequence], space: int) -> Iterator[list[Row]]:
    """Yield the rows of the prompts for each step.

    A step takes as many prompts as fit into ``space`` tokens.
    """
    rows: list[Row] = []
    left = space
    for seq in seqs:
        start = 0
        while start < seq.num_tokens:
            count = min(left, seq.num_tokens - start)
            rows.append(Row(seq, start, count, int(start + count == seq.num_tokens)))
            start, left = start + count, left - count
            if not left:
                yield rows
                rows, left = [], space
    if rows:
        yield rows


def judge(backend: Backend, job: Judge) -> Quality | None:
    shape = (len(job.tokens), backend.info.vocabulary_size)
    reference = np.memmap(job.file, np.float32, "w+" if job.write else "r", shape=shape)
    kl, same = 0.0, 0
    for start, logits in compute_logits(backend, job.tokens):
        rows = slice(start, start + len(logits))
        if job.write:
            reference[rows] = logits
        else:
            divergence, agrees = compare(reference[rows], logits)
            kl, same = kl + float(divergence.sum()), same + int(agrees.sum())
    if job.write:
        reference.flush()
        return None
    return Quality(kl / len(job.tokens), same / len(job.tokens), len(job.tokens))


def compute_logits(backend: Backend, tokens: list[int]) -> Iterator[tuple[int, Logits]]:
    """Yield positions, each with the logits after the tokens from there on, a row for each."""
    space = backend.info.max_num_samples
    for window in range(0, len(tokens), WINDOW):
        text = tokens[window : window + WINDOW]
        seq = Sequence(Request("", text, SamplingParams()), 0, 0, WINDOW)
        seq.seq_id = 0
        for start in range(0, len(text), space):
            draft = tuple(text[start + 1 : start + space])
            batch = Batch(
                [Row(seq, start, 1, 1 + len(draft), draft)], [] if start else [Trim(0, 0)]
            )
            yield window + start, np.asarray(backend.forward(batch))


if __name__ == "__main__":
    try:
        main()
    except CLLMError as error:
        sys.exit(" ".join(str(error).split()))
