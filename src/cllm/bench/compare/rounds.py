"""The stored rounds of ``cllm bench compare``: one line of JSON for each run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cllm.errors import StartupError
from cllm.input_files import read_input

CLLM, ENGINE, BOUND, LLAMA_SERVER = (
    "cLLM",
    "engine in process",
    "llama-batched-bench",
    "llama-server",
)
DEFAULT_SERVER = "llama-server, default build"
FIXED = "cLLM with a fixed layout"
PLAIN, RESTARTED = "cLLM without speculation", "cLLM after a restart"
CLLM_SYSTEMS = (CLLM, PLAIN, RESTARTED)
BACKEND = "the backend alone"
OLLAMA, EXAMPLE = "Ollama", "llama-cpp-python's example server"
BUILD, DEFAULT_BUILD = "cLLM's compiler switches", "default build"

MACHINE = ("host", "CPU", "build")
"""What must be equal for rounds to be combined."""
MOST_OTHERS = 0.02  # share of the CPU that other processes may take


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One system with one setting on one row in one round.

    ``work`` identifies the model and everything that is sent. Only runs with the same work are
    compared. ``at`` is the time in ISO format. ``values`` are by name and unit. ``others`` is the
    share of the CPU that other processes took meanwhile.
    """

    row: str
    system: str
    settings: str = ""
    round: int
    work: str = ""
    machine: dict[str, str] = {}
    at: str = ""
    values: dict[str, float] = {}
    num_requests: int = 0
    num_succeeded: int = 0
    failures: dict[str, int] = {}
    others: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        return self.row, self.system, self.settings, self.round, self.work

    @property
    def noisy(self) -> bool:
        return self.others > MOST_OTHERS


class Rounds:
    """The runs in a file, and those that are added to it.

    Only runs of ``machine`` are used. None means the machine of the last run.
    """

    def __init__(self, path: Path | None, machine: dict[str, str] | None = None) -> None:
        """Raises StartupError if the file cannot be read or contains something else."""
        self._path = path
        runs, self._num_bytes = (
            read_runs(path) if path is not None and path.exists() else (list[StoredRun](), 0)
        )
        self.machine = machine if machine is not None else runs[-1].machine if runs else {}
        own = [run for run in runs if identity(run.machine) == identity(self.machine)]
        self.num_foreign = len(runs) - len(own)
        self._runs: dict[tuple[str, str, str, int, str], list[StoredRun]] = {}
        for run in own:
            self._runs.setdefault(run.key, []).append(run)

    def add(self, run: StoredRun) -> None:
        """Raises StartupError if the file cannot be written."""
        self._runs.setdefault(run.key, []).append(run)
        if self._path is None:
            return
        try:
            with self._path.open("a+b") as file:
                file.truncate(self._num_bytes)  # drops a line that was not written completely
                self._num_bytes += file.write(msgspec.json.encode(run) + b"\n")
        except OSError as error:
            raise StartupError(f"cannot write {self._path}: {error.strerror}") from None

    def attempts(self, run: StoredRun) -> list[StoredRun]:
        """Return the runs with the same key."""
        return self._runs.get(run.key, [])

    def of(self, row: str, work: str | None = None) -> list[StoredRun]:
        """Return the runs of a row in order of rounds. Of several attempts, the quietest counts.

        ``work`` None means the work of the last run.
        """
        attempts = [runs for runs in self._runs.values() if runs[0].row == row]
        if work is None and attempts:
            work = max((runs[-1] for runs in attempts), key=lambda run: run.at).work
        quietest = [
            min(runs, key=lambda run: run.others) for runs in attempts if runs[0].work == work
        ]
        return sorted(quietest, key=lambda run: run.round)


def identity(machine: dict[str, str]) -> list[str]:
    return [machine.get(name, "") for name in MACHINE]


def read_runs(path: Path) -> tuple[list[StoredRun], int]:
    """Return the runs in a file, without a last line that was not written completely, and the size
    of these runs in bytes.

    Raises StartupError with a message of one line.
    """
    try:
        data = read_input(path)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    size = data.rfind(b"\n") + 1
    try:
        return msgspec.json.Decoder(StoredRun).decode_lines(data[:size]), size
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} holds no rounds of cllm bench compare: {error}") from None
