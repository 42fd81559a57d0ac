"""Compares cLLM, as users start it, with its peers on one machine. All get the same model and the
same requests, in turn.

Each run starts its own server and stops it afterwards. So no other model is loaded during a run,
and every start is timed. Every second round runs in reverse order. No prompt is sent twice to a
server. A run in which other processes took too much of the CPU is repeated. All runs are stored, so
that a later session goes on where an earlier one has ended.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from cllm.bench.compare.noise import Watch
from cllm.bench.compare.rounds import (
    BOUND,
    CLLM_SYSTEMS,
    DEFAULT_SERVER,
    LLAMA_SERVER,
    MOST_OTHERS,
    Rounds,
    StoredRun,
)
from cllm.bench.compare.rows import HOST_SEQS, ComparisonRow
from cllm.bench.compare.runs import CONTEXTS, ComparedModel, Runner, RunResult, make_spec
from cllm.bench.compare.systems import OPENERS, Openers, Purpose
from cllm.bench.compare.targets import best_settings, close_settings
from cllm.bench.load.workload import Stage
from cllm.bench.peers import DEFAULT_FOLDER, find_required
from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN

REPEATS = 3  # of a run in which other processes took too much of the CPU
DEFAULT_BUILD_ROUNDS = 3  # llama.cpp's default build is measured in every third round

Progress = Callable[[float, str], None]


class ComparisonPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to compare.

    ``model`` None means the built-in one. ``peers`` and ``default_peers`` are folders of
    llama.cpp's programs. ``rounds`` None means each row's own number. ``scale`` is a factor for the
    lengths of all prompts. No run begins after ``seconds``. ``most_others`` is the share of the CPU
    that other processes may take in a run.
    """

    model: Path | None
    peers: Path
    default_peers: Path = DEFAULT_FOLDER
    rows: list[ComparisonRow]
    rounds: int | None = None
    scale: float = 1.0
    seconds: float | None = None
    most_others: float = MOST_OTHERS


def compare(options: ComparisonPlan, rounds: Rounds, progress: Progress) -> dict[str, str]:
    """Measure what ``rounds`` lacks, and add it there. Return the systems that were skipped, and
    why.

    Raises StartupError if cLLM, llama-server or llama-batched-bench cannot be run. Other peers are
    skipped instead.
    """
    comparison = Comparison(options, rounds)
    comparison.run(progress)
    return comparison.skipped


class Comparison:
    def __init__(self, options: ComparisonPlan, rounds: Rounds) -> None:
        self.options = options
        self.rounds = rounds
        self.skipped: dict[str, str] = {}
        self._models: dict[Path, ComparedModel] = {}
        for row in options.rows:  # before anything is measured
            self._model(row)
            for system, program in (
                (LLAMA_SERVER, "llama-server"),
                (BOUND, "llama-batched-bench"),
            ):
                if system in row.systems:
                    find_required(program, options.peers)

    def run(self, progress: Progress) -> None:
        begun, options = time.monotonic(), self.options
        counts = {row.name: options.rounds or row.rounds for row in options.rows}
        done, total = 0, sum(counts.values())
        for i in range(max(counts.values(), default=0)):
            for row in options.rows:
                if i >= counts[row.name]:
                    continue
                for run in self._missing(row, i):
                    if options.seconds and time.monotonic() - begun > options.seconds:
                        return
                    text = f"{row.name}, round {i + 1}: {run.system} {run.settings}"
                    progress(done / total, text.rstrip())
                    self.rounds.add(self._measure(row, run))
                done += 1
        progress(1.0, "done")

    def _missing(self, row: ComparisonRow, i: int) -> Iterator[StoredRun]:
        """Yield the runs of a round that are not stored yet, without results. A noisy run is
        repeated, up to a limit.
        """
        systems, work = row.systems, self._work(row)
        for system in systems if i % 2 == 0 else reversed(systems):
            settings = self._settings(row, system, i, work)
            for which in settings if i % 2 == 0 else reversed(settings):
                run = StoredRun(
                    row=row.name,
                    system=system,
                    settings=which,
                    round=i,
                    work=work,
                    machine=self.rounds.machine,
                )
                while self._is_missing(self.rounds.attempts(run)):
                    yield run

    def _is_missing(self, attempts: list[StoredRun]) -> bool:
        quiet = any(run.others <= self.options.most_others for run in attempts)
        return not quiet and len(attempts) <= REPEATS

    def _settings(self, row: ComparisonRow, system: str, i: int, work: str) -> list[str]:
        """Return the settings to measure: all in the first round, then those that may be the best.
        llama-server's default build is measured in some rounds only, with the settings that are
        best for the other build.
        """
        if row.kind == "context":
            return [str(context) for context in CONTEXTS if self._model(row).fits(context, row)]
        if row.kind == "host":
            return [str(count) for count in HOST_SEQS]
        if not is_served(row, system):
            return [""]
        openers = self._openers(row, system)
        first = [run for run in self.rounds.of(row.name, work) if run.round == 0]
        if system == DEFAULT_SERVER:
            if i % DEFAULT_BUILD_ROUNDS:
                return []
            best = best_settings(first, row, LLAMA_SERVER, row.targets[0])
            return [which for which in openers if which == best]
        if i == 0 or len(openers) == 1:
            return [*openers]
        close = close_settings([run for run in first if run.system == system], row)
        return [which for which in openers if which in close]

    def _openers(self, row: ComparisonRow, system: str, folder: Path = Path()) -> Openers:
        options, model = self.options, self._model(row)
        if system in self.skipped:
            return {}
        settings = row.settings.get(system, ())
        purpose = Purpose(
            model=model.served,
            clients=row.slots or row.clients,
            num_cells=0 if settings or system in CLLM_SYSTEMS else model.num_cells,
            peers=options.peers,
            default_peers=options.default_peers,
            settings=settings,
            folder=folder,
        )
        try:
            return OPENERS[system](purpose)
        except StartupError as error:
            if system == LLAMA_SERVER:
                raise
            self.skipped[system] = str(error)
            return {}

    def _model(self, row: ComparisonRow) -> ComparedModel:
        path = BUILTIN if row.builtin or self.options.model is None else self.options.model
        if path not in self._models:
            self._models[path] = ComparedModel(path)
        return self._models[path]

    def _work(self, row: ComparisonRow) -> str:
        """Return what identifies the work of a row: the model, and what is sent."""
        model = self._model(row)
        sent: dict[str, Any] = {"clients": row.clients, "max_tokens": row.max_tokens}
        if row.make is not None:
            stages = row.make(make_spec(row, model, model.name, 0), self.options.scale)
            sent |= {"scale": self.options.scale, "sent": fingerprint(stages)}
        return msgspec.json.encode({"model": model.description} | sent).decode()

    def _measure(self, row: ComparisonRow, run: StoredRun) -> StoredRun:
        """Return ``run`` with its results. A peer that fails has failures instead."""
        options, watch = self.options, Watch()
        runner = Runner(self._model(row), options.peers, options.default_peers, options.scale)
        try:
            if is_served(row, run.system):
                with TemporaryDirectory() as folder:
                    opener = self._openers(row, run.system, Path(folder))[run.settings]
                    measured = runner.measure_server(row, run, opener)
            else:
                measured = runner.measure(row, run)
        except StartupError as error:
            if run.system in CLLM_SYSTEMS or not is_served(row, run.system):
                raise
            measured = RunResult({}, 1, 0, {str(error): 1})
        if measured.others is None:
            measured = measured._replace(others=watch.others())
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return msgspec.structs.replace(run, at=now, **measured._asdict())


def is_served(row: ComparisonRow, system: str) -> bool:
    """Return whether a row is sent to a server of this system."""
    return row.make is not None and system in OPENERS


def fingerprint(stages: list[Stage]) -> str:
    """Return a hash of the requests. Only the first ones of a long group count."""
    digest = hashlib.sha256()
    for group in (group for stage in stages for group in stage):
        digest.update(f"{group.clients} {group.start_after} {group.tail}".encode())
        for task in islice(group.tasks, 64):
            digest.update(task.body)
    return digest.hexdigest()[:12]
