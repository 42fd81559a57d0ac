"""Prefixes outlive RAM and restarts in files, and nothing wrong is ever read from one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cllm.backends.fake.backend import FakeBackend
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add, Close
from cllm.engine.disk import DiskCache
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.errors import StartupError

LONG = [(7 * i) % 250 for i in range(150)]


class Recorder(FakeBackend):
    def __init__(self) -> None:
        super().__init__(context_length=256, max_num_seqs=2, length=5)
        self.num_tokens = 0

    def forward(self, batch):
        self.num_tokens += batch.num_tokens
        return super().forward(batch)


def start(folder: Path, **params) -> Engine:
    options = {
        "ram_cache_bytes": 10_000,
        "disk_cache_bytes": 10_000,
        "speculation": "off",
        "check": True,
        **params,
    }
    return build_engine(Recorder(), EngineParams(disk_cache=str(folder), **options))


def ask(engine: Engine, prompt: list[int], salt: str = "") -> tuple[list[int], int]:
    """The tokens of the answer, and how many were computed for it."""
    before = engine.backend.num_tokens
    params = SamplingParams(temperature=0, max_tokens=2)
    engine.handle(Add(Request(str(time.monotonic_ns()), prompt, params, cache_salt=salt)))
    outputs = []
    while engine.scheduler.has_work():
        outputs += engine.step()
    return [output.token for output in outputs], engine.backend.num_tokens - before


class Closing:
    """An inbox that closes at once."""

    def drain(self, block: bool) -> list:
        return [Close()]


def close(engine: Engine) -> None:
    engine.run(Closing(), None)


def test_a_restart_finds_the_prefixes_of_before(tmp_path):
    """What was idle in the cells when the engine closed is read from disk by the next one; the text
    is the same.
    """
    first = start(tmp_path)
    answer, computed = ask(first, LONG)
    assert computed == len(LONG) + 1
    close(first)
    assert len(list(tmp_path.glob("*.kv"))) == 1
    assert not list(tmp_path.glob("*.tmp"))

    second = start(tmp_path)
    assert second.scheduler.stats().num_disk_bytes > 0
    assert ask(second, LONG) == (answer, 2)
    assert ask(second, [*LONG[:100], 1]) == ([2, 3], 2)


def test_a_file_belongs_to_a_salt(tmp_path):
    """After a restart too, only those with the same salt find what lies on disk; each salt has its
    own file.
    """
    first = start(tmp_path)
    for salt in ("", "a"):
        assert ask(first, LONG, salt)[1] == len(LONG) + 1
    close(first)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    second = start(tmp_path)
    assert [ask(second, LONG, salt)[1] for salt in ("b", "a", "")] == [len(LONG) + 1, 2, 2]


@pytest.mark.parametrize(
    "wound", ["cut", "flipped", "another version", "empty", "head", "head cut", "tokens"]
)
def test_a_damaged_file_is_computed_again(tmp_path, wound):
    """Whatever is wrong with a file, the answer is right, and the file is gone or replaced."""
    first = start(tmp_path)
    answer, _ = ask(first, LONG)
    close(first)
    (path,) = tmp_path.glob("*.kv")
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-10],
        "flipped": whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:],
        "another version": whole.replace(b"KV 2", b"KV 1", 1),
        "empty": b"",
        "head": whole[:14] + b"\xc1" + whole[15:],
        "head cut": whole[:20],
        "tokens": whole.replace(
            bytes([LONG[5], 0, 0, 0, LONG[6]]), bytes([LONG[5] ^ 1, 0, 0, 0, LONG[6]]), 1
        ),
    }
    assert damaged[wound] != whole
    path.write_bytes(damaged[wound])
    second = start(tmp_path)
    assert ask(second, LONG) == (answer, len(LONG) + 1)
    close(second)
    assert path.read_bytes() == whole, "written again"


def test_a_file_that_is_damaged_while_the_engine_runs(tmp_path):
    """Whoever waits for it is computed, and the next one is read as ever."""
    first = start(tmp_path)
    answer, _ = ask(first, LONG)
    close(first)
    (path,) = tmp_path.glob("*.kv")
    second = start(tmp_path)
    path.write_bytes(path.read_bytes()[:14] + b"\xc1")
    assert ask(second, LONG) == (answer, len(LONG) + 1)
    close(second)
    assert ask(start(tmp_path), LONG) == (answer, 2)


def test_a_file_of_another_model_is_left_alone(tmp_path):
    """Only files with the same fingerprint count."""
    first = start(tmp_path)
    ask(first, LONG)
    first.backend.info = type(first.backend.info)(
        **{**_fields(first.backend.info), "fingerprint": "other"}
    )
    close(first)
    other = build_engine(
        first.backend, EngineParams(disk_cache=str(tmp_path), disk_cache_bytes=10_000)
    )
    assert len(other.scheduler.ledger.tiers.files) == 0
    assert len(list(tmp_path.glob("*.kv"))) == 1


def _fields(info) -> dict:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_the_disk_has_a_budget(tmp_path):
    """The files that were not used for longest go when there are too many."""
    engine = start(tmp_path, disk_cache_bytes=400)
    for i in range(5):
        ask(engine, [i, *LONG[1:]])
        while engine.idle():
            engine._disk._files.flush(5)
            engine.step()
    close(engine)
    assert 1 <= len(list(tmp_path.glob("*.kv"))) <= 2
    assert engine.scheduler.stats().num_disk_bytes <= 400


def test_prefixes_leave_ram_and_come_back_from_disk(tmp_path):
    """RAM for one snapshot: the others lie on disk, and each is found again."""
    engine = start(tmp_path, ram_cache_bytes=200)
    answers = []
    for i in range(4):
        answers.append(ask(engine, [i, *LONG[1:]])[0])
        while engine.idle():
            engine._disk._files.flush(5)
            engine.step()
    assert len(engine.scheduler.ledger.tiers.files) == 4
    for i in range(4):
        assert ask(engine, [i, *LONG[1:]]) == (answers[i], 2)


class SlowlyMeasured(bytes):
    """Switches threads while its size is asked for, in the middle of whatever is computed from
    it.
    """

    def __len__(self) -> int:
        time.sleep(0.0005)
        return super().__len__()


def test_bytes_that_wait_to_be_written_are_counted_right(tmp_path, monkeypatch):
    """While one thread accepts and another one finishes, no update is lost: the bound holds to the
    byte afterwards.
    """
    disk = DiskCache(tmp_path, "model")
    data = SlowlyMeasured(100)
    for i in range(200):
        disk.write(i, np.array([i], np.int32), data)
    disk.flush(60)
    assert len(disk.results()) == 200

    monkeypatch.setattr("cllm.engine.disk.MAX_PENDING", 300)
    go_on = threading.Event()
    disk._jobs.put(go_on.wait)  # nothing is finished meanwhile
    for i in range(1000, 1005):
        disk.write(i, np.array([i], np.int32), data)
    go_on.set()
    disk.flush(60)
    assert [result.key for result in disk.results() if result is not True] == [1000, 1001, 1002]


def test_a_folder_that_cannot_be_written(tmp_path):
    """One line, at the start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"kv\.disk_cache: cannot write to"):
        start(tmp_path / "file")


@pytest.mark.parametrize("method", ["new_state_buffer", "install_snapshot", "snapshot"])
def test_a_backend_that_raises_while_the_disk_is_used_costs_only_the_prefix(
    method, tmp_path, monkeypatch
):
    """Whoever waits for the prefix is computed; what cannot be written is not; the engine goes
    on.
    """
    first = start(tmp_path)
    answer, _ = ask(first, LONG)
    if method == "snapshot":
        monkeypatch.setattr(first.backend, method, lambda key: 1 / 0)
    close(first)
    second = start(tmp_path)
    assert len(second.scheduler.ledger.tiers.files) == (0 if method == "snapshot" else 1)
    if method != "snapshot":
        monkeypatch.setattr(second.backend, method, lambda *args: 1 / 0)
    assert ask(second, LONG) == (answer, len(LONG) + 1)


@pytest.mark.parametrize("method", ["save_one_idle", "written"])
def test_an_error_while_an_idle_prefix_is_saved_costs_only_the_prefix(
    method, tmp_path, monkeypatch
):
    engine = start(tmp_path, check=False)
    answer, _ = ask(engine, LONG)
    failed = []
    monkeypatch.setattr(
        type(engine.scheduler.ledger), method, lambda *args: failed.append(1) or 1 / 0
    )
    engine.idle()
    engine._disk._files.flush(5)
    engine.step()
    assert failed
    monkeypatch.undo()
    assert ask(engine, LONG)[0] == answer
    engine.scheduler.check()
