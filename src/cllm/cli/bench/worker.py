"""The process of a load run that a server starts: ``python -m cllm.cli.bench.worker``.

It uses the processor only when nobody else wants it, as far as the system can arrange that, and
ends when its standard input does, which is when the server has gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import BinaryIO

import msgspec
import numpy as np

from cllm.bench.load.client import Answers, Endpoint, run_stages
from cllm.bench.load.comparison import compare_figures, differences
from cllm.bench.load.report import Report
from cllm.bench.load.workload import Group, word_tasks
from cllm.cli.bench.load import LoadOptions, LoadSize, make_spec, measure
from cllm.errors import StartupError
from cllm.server.bench.messages import (
    REQUEST_SECONDS,
    Check,
    Compare,
    Comparison,
    Done,
    Failed,
    Message,
    Order,
    Percentiles,
    Running,
    Send,
)

NICENESS = 10
MAX_GAPS = 32  # times between chunks that are kept of an answer while the run goes on


def main() -> None:
    with suppress(AttributeError, OSError):  # Windows has none
        os.nice(NICENESS)
    stdin, out = sys.stdin.buffer, sys.stdout.buffer
    order: Order = msgspec.json.decode(stdin.readline(), type=Order)
    threading.Thread(target=end_with, args=(stdin,), daemon=True).start()
    try:
        result = Done(carry_out(order, out))
    except StartupError as error:
        write(out, Failed(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        write(out, Failed(f"It is not a report of cllm bench load: {error}"))
    else:
        write(out, result)


def end_with(stdin: BinaryIO) -> None:
    """End this process, whatever it does, when ``stdin`` ends."""
    stdin.read()
    os._exit(1)


def write(out: BinaryIO, message: Message) -> None:
    out.write(msgspec.json.encode(message) + b"\n")
    out.flush()


def carry_out(order: Order, out: BinaryIO) -> msgspec.Raw:
    """Return the result of an order as JSON. Raises StartupError and msgspec.DecodeError."""
    match order:
        case Send():
            return encode(send(order, out))
        case Check():
            return encode(read(order.report))
        case Compare():
            before, after = read(order.before), read(order.after)
            figures = compare_figures(before, after)
            return encode(Comparison(differences(before, after), figures))


def encode(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def read(report: msgspec.Raw) -> Report:
    return msgspec.json.decode(report, type=Report)


def send(order: Send, out: BinaryIO) -> Report:
    """Do a load run, and write how far it is."""
    plan = order.plan
    target = Endpoint(
        order.url,
        order.key,
        timeout=max(REQUEST_SECONDS, plan.seconds),
        certificate=order.certificate,
    )
    options = LoadOptions(**msgspec.structs.asdict(plan))
    check_answer(target, options, order.model)
    figures = RunningFigures()

    def note(ended: int, total: int) -> None:
        figures.num_done, figures.num_planned = ended, total
        if ended == 1:
            write(out, figures.sum_up(Answers()))

    return measure(
        target,
        options,
        order.model,
        progress=note,
        watch=lambda answers: write(out, figures.sum_up(answers)),
    )


def check_answer(target: Endpoint, options: LoadOptions, model: str) -> None:
    """Send one request, so that a run in which all would fail does not begin. Raises
    StartupError.
    """
    size = LoadSize(1, 1, 0, 1)
    tasks = word_tasks(1, make_spec(options, size, model))
    (answer,) = run_stages(target, [[Group(tasks=tasks, clients=1)]]).answers
    if answer.failure:
        raise StartupError(f"The first request has failed: {answer.failure}: {answer.detail}")


class RunningFigures:
    """The figures of a run so far, which cost little, because they are computed in between."""

    def __init__(self) -> None:
        self.num_done = self.num_planned = 0
        self._begun = 0.0
        self._num_seen = 0  # answers that have ended and been counted
        self._num_succeeded = 0
        self._output_tokens = 0
        self._failures: Counter[str] = Counter()
        self._firsts: list[float] = []
        self._gaps: list[float] = []

    def sum_up(self, answers: Answers) -> Running:
        ended = answers.ended[self._num_seen :]
        self._num_seen += len(ended)
        for answer in ended:
            if answer.failure:
                self._failures[answer.failure] += 1
            elif answer.succeeded:
                self._num_succeeded += 1
                self._output_tokens += answer.output_tokens
                self._firsts.append(answer.first - answer.sent)
                times = answer.content_times
                gaps = [end - begin for begin, end in pairwise(times)]
                self._gaps += gaps[:: 1 + len(gaps) // MAX_GAPS]
        done = {id(answer) for answer in answers.ended}
        running = [answer for answer in answers.sent if id(answer) not in done]
        if answers.sent:
            self._begun = self._begun or answers.sent[0].sent
        return Running(
            num_done=self.num_done,
            num_planned=max(self.num_planned, self.num_done),
            num_running=len(running),
            num_succeeded=self._num_succeeded,
            failures=dict(self._failures),
            output_tokens=self._output_tokens
            + sum(len(answer.content_times) for answer in running),
            seconds=round(time.perf_counter() - self._begun, 3) if self._begun else 0.0,
            ttft_ms=find_percentiles(self._firsts),
            itl_ms=find_percentiles(self._gaps),
        )


def find_percentiles(seconds: list[float]) -> Percentiles | None:
    if not seconds:
        return None
    return Percentiles(*(round(1e3 * float(at), 3) for at in np.percentile(seconds, (50, 99))))


if __name__ == "__main__":
    main()
