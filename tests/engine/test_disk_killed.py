"""Processes that are killed while they write prefixes to files: whoever opens the folder next finds
nothing wrong, and cleans up.

Run as a program, this file is the parent of those processes: it has one thread, so it can fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cllm.backends.fake.backend import FakeBackend
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.snapshot_files import SnapshotFiles

try:
    import resource
except ImportError:  # Windows
    resource = None

SNAPSHOTS = range(20)
SNAPSHOT_BYTES = 1 << 20
DISK_BYTES = 1000  # of the engine: files of about six prefixes
PROMPTS = [[i, *((7 * i + 3 * j) % 250 for j in range(149))] for i in range(12)]


def tokens_of(number: int) -> np.ndarray:
    return np.arange(number, number + 50, dtype=np.int32)


def data_of(number: int) -> memoryview:
    return memoryview(bytes([number]) * (SNAPSHOT_BYTES - number))


def die_while_writing(size: int) -> None:
    """Let the kernel kill the process when it has written ``size`` bytes to one file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def write_for_ever(folder: Path, seed: int) -> None:
    """Write and delete snapshots until the process is killed."""
    random, disk, kept = Random(seed), SnapshotFiles(folder, "model"), dict.fromkeys(range(0))
    last = random.randrange(12) if seed % 2 else None
    for key in count():
        if key == last:
            die_while_writing(random.randrange(SNAPSHOT_BYTES))
        number = random.choice(SNAPSHOTS)
        disk.write(key, tokens_of(number), data_of(number), salt="s" * (number % 2))
        disk.flush(60)
        kept |= {result.key: None for result in disk.results()}
        while len(kept) > 6:
            kept.pop(random.choice([*kept]))
        disk.delete_all_except(kept.keys())


def check_files(folder: Path, seed: int) -> None:
    """Read every file; each has the bytes of its tokens. Nothing else is in the folder."""
    disk = SnapshotFiles(folder, "model")
    found = disk.find()
    assert len(found) == len(list(folder.iterdir())), [*folder.iterdir()]
    for key, (file, tokens, salt) in enumerate(found):
        number = int(tokens[0])
        assert (tokens == tokens_of(number)).all()
        assert salt == "s" * (number % 2)
        disk.register(key, file)
        into = memoryview(bytearray(disk.size(key)))
        disk.read(key, into)
        disk.flush(60)
        assert [result.succeeded for result in disk.results()] == [True]
        assert into == data_of(number)


def start(folder: Path) -> Engine:
    backend = FakeBackend(context_length=256, max_num_seqs=2, length=5)
    params = EngineParams(
        disk_cache=str(folder),
        ram_cache_bytes=600,
        disk_cache_bytes=DISK_BYTES,
        speculation="off",
        check=True,
    )
    return build_engine(backend, params)


def ask(engine: Engine, name: str, prompt: list[int]) -> None:
    """The fake backend raises an error if cells have other tokens than the sequence, and its answer
    counts on from the prompt's last token.
    """
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = engine.handle(Add(Request(name, prompt, params)))
    while engine.scheduler.sequences.has_work():
        outputs += engine.step()
    assert [output.token for output in outputs] == [prompt[-1] + 1, prompt[-1] + 2]


def ask_for_ever(folder: Path, seed: int) -> None:
    """Answer prompts, and save their prefixes while idle, until the process is killed."""
    random, engine = Random(seed), start(folder)
    last = random.randrange(12) if seed % 2 else None
    for number in count():
        if number == last:
            die_while_writing(random.randrange(600))
        ask(engine, str(number), random.choice(PROMPTS))
        while engine.idle():
            engine.step()


def check_engine(folder: Path, seed: int) -> None:
    """Every answer is right, and the folder keeps within its limit."""
    engine = start(folder)
    assert not list(folder.glob("*.tmp"))
    engine._disk._files.flush(60)
    snapshots = engine.scheduler.sequences.kv_cache.snapshots
    assert len(list(folder.iterdir())) == len(snapshots.files)
    assert snapshots.num_disk_bytes <= DISK_BYTES
    for number, prompt in enumerate(PROMPTS):
        ask(engine, str(number), prompt)
    while engine.idle():
        engine._disk._files.flush(60)
        engine.step()
    engine._disk._files.flush(60)
    assert len(list(folder.iterdir())) == len(snapshots.files)


WORK = {"files": (write_for_ever, check_files), "engine": (ask_for_ever, check_engine)}


def fork(work: Callable[[Path, int], None], folder: Path, seed: int) -> int:
    """Return the process id of a child that does ``work``; it exits with 1 after an exception."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work(folder, seed)
            code = 0
        except Exception:  # noqa: BLE001  # it goes to stderr
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return pid


def main(kind: str, folder: Path, num_rounds: int) -> None:
    """Kill ``num_rounds`` processes, by turns at any time and while they write a file, and check
    the folder after each one.
    """
    work, check = WORK[kind]
    num_temporary = 0
    for seed in range(num_rounds):
        pid = fork(work, folder, seed)
        if not seed % 2:
            time.sleep(Random(seed).uniform(0.01, 0.15))
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"round {seed}: the process failed by itself"
        num_temporary += len(list(folder.glob("*.tmp")))
        status = os.waitpid(fork(check, folder, seed), 0)[1]
        assert status == 0, f"round {seed}: the folder is wrong"
    sys.stdout.write(f"{num_temporary} {len(list(folder.iterdir()))}")


@pytest.mark.slow
@pytest.mark.skipif(resource is None, reason="needs fork and limits of file sizes")
@pytest.mark.parametrize(("kind", "num_rounds"), [("files", 24), ("engine", 16)])
def test_killed_processes_leave_no_wrong_file(kind: str, num_rounds: int, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, __file__, kind, str(tmp_path), str(num_rounds)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    num_temporary, num_files = map(int, process.stdout.split())
    assert num_files, "nothing was written"
    assert num_temporary > num_rounds // 4, "too few were killed while they wrote a file"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
