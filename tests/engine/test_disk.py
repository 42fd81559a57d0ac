"""The disk cache: prefixes outlive RAM and restarts in files, and damaged files are never used."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from cllm.backends.fake.backend import FakeBackend
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add, AddPrefix, Close
from cllm.engine.disk import DiskTier
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.snapshot_files import Read, SnapshotFiles, Written, lock
from cllm.errors import StartupError
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.snapshots import Snapshots
from cllm.scheduler.report import collect_stats

LONG = [(7 * i) % 250 for i in range(150)]


class Recorder(FakeBackend):
    def __init__(self, **options) -> None:
        super().__init__(context_length=256, max_num_seqs=2, length=5, **options)
        self.num_tokens = 0

    def forward(self, batch):
        self.num_tokens += batch.num_tokens
        return super().forward(batch)


def start(folder: Path, backend: dict | None = None, **params) -> Engine:
    """``backend``: options of the backend."""
    options = {
        "ram_cache_bytes": 10_000,
        "disk_cache_bytes": 10_000,
        "speculation": "off",
        "check": True,
        **params,
    }
    recorder = Recorder(**backend or {})
    return build_engine(recorder, EngineParams(disk_cache=str(folder), **options))


def ask(
    engine: Engine, prompt: list[int], salt: str = "", boundaries: tuple[int, ...] = ()
) -> tuple[list[int], int]:
    """Return the tokens of the answer, and the number of tokens computed for it."""
    backend = cast(Recorder, engine.backend)
    before = backend.num_tokens
    params = SamplingParams(temperature=0, max_tokens=2)
    engine.handle(
        Add(
            Request(
                str(time.monotonic_ns()), prompt, params, cache_salt=salt, boundaries=boundaries
            )
        )
    )
    outputs = []
    while engine.scheduler.sequences.has_work():
        outputs += engine.step()
    return [output.token for output in outputs], backend.num_tokens - before


def test_hybrid_continues_at_its_last_checkpoint(tmp_path):
    """Also if the answer, whose reasoning the next turn omits, was computed after it."""
    options = {"max_taken_back": 0, "checkpoint_bytes": 5}
    first = start(tmp_path, options)
    ask(first, [*LONG, 7], boundaries=(len(LONG),))
    close(first)
    second = start(tmp_path, options)
    answer, num_computed = ask(second, [*LONG, 9, 20], boundaries=(len(LONG) + 1,))
    assert (answer, num_computed) == ([21, 22], 3)


def test_evicted_conversations_of_a_hybrid_continue_after_a_restart(tmp_path):
    """They leave the cells before the engine ends, but their files end where the next turns begin."""
    options = {"max_taken_back": 0, "checkpoint_bytes": 5}
    first = start(tmp_path, options)
    prompts = [[i, *LONG, 7] for i in range(5)]
    for prompt in prompts:
        ask(first, prompt, boundaries=(len(prompt) - 1,))
    close(first)
    second = start(tmp_path, options)
    for prompt in prompts:
        turn = [*prompt[:-1], 9, 20]
        assert ask(second, turn, boundaries=(len(turn) - 1,)) == ([21, 22], 3)


SYSTEM = [3 * i % 250 for i in range(100)]


def test_instructions_shared_by_conversations_of_a_hybrid_outlive_restarts(tmp_path):
    """They have a file of their own, since a longer prefix in a file can be used only as a whole."""
    options = {"max_taken_back": 0, "checkpoint_bytes": 5}

    def ask_about(engine: Engine, number: int) -> int:
        prompt = [*SYSTEM, *[200 + number] * 30, 7]
        answer, num_computed = ask(engine, prompt, boundaries=(len(SYSTEM), len(prompt) - 1))
        assert answer == [8, 9]
        return num_computed

    engine = start(tmp_path, options)
    assert [ask_about(engine, i) for i in range(5)] == [132, 32, 32, 32, 32]
    close(engine)
    for i in (5, 6):
        engine = start(tmp_path, options)
        assert ask_about(engine, i) == 32
        checkpoints = engine.scheduler.sequences.kv_cache.checkpoints
        assert checkpoints.find(np.array(SYSTEM, np.int32), "") is not None
        assert ask_about(engine, 10 + i) == 32
        close(engine)


def test_hybrid_learns_that_prompts_continue_after_answers(tmp_path):
    """It goes back to the last checkpoint once, and then no more."""
    engine = start(tmp_path, {"max_taken_back": 0, "checkpoint_bytes": 5})
    prompt, nums_computed = [*LONG, 7], []
    for _ in range(4):
        answer, num_computed = ask(engine, prompt, boundaries=(len(prompt) - 1,))
        nums_computed.append(num_computed)
        while engine.idle():
            pass
        prompt += [*answer, 8, 7]
    whole, *others = nums_computed
    assert whole > len(LONG)
    assert others == [6, 4, 4]


class Closing:
    """An inbox that closes the engine immediately."""

    def drain(self, block: bool) -> list:
        return [Close()]


class Telling:
    """An inbox with one command, which stops the engine afterwards."""

    def __init__(self, command) -> None:
        self.commands = [command]

    def drain(self, block: bool) -> list:
        if not self.commands:
            raise StopIteration
        return [self.commands.pop()]


class Ignoring:
    def send(self, outputs, stats) -> None:
        pass


def tell(engine: Engine, command) -> None:
    with pytest.raises(StopIteration):
        engine.run(Telling(command), Ignoring())


def close(engine: Engine) -> None:
    engine.run(Closing(), None)


def test_prefix_of_another_machine_is_used(tmp_path, caplog):
    """Once its file is in the folder and the engine has been told. Files of other models, damaged
    ones and known ones are not.
    """
    first = start(tmp_path / "first")
    answer, _ = ask(first, LONG)
    close(first)
    (file,) = (tmp_path / "first").iterdir()
    second = start(tmp_path / "second")
    there = tmp_path / "second" / file.name
    there.write_bytes(file.read_bytes().replace(b"fake", b"fike"))
    (tmp_path / "second" / "damaged.kv").write_bytes(file.read_bytes()[:30])
    for name in (file.name, "damaged.kv", "missing.kv"):
        tell(second, AddPrefix(name))
    assert not second.scheduler.sequences.kv_cache.snapshots.files
    assert "damaged.kv is not used: the head is damaged" in caplog.text
    there.write_bytes(file.read_bytes())
    for _ in range(2):
        tell(second, AddPrefix(file.name))
    assert len(second.scheduler.sequences.kv_cache.snapshots.files) == 1
    assert ask(second, LONG) == (answer, 2)
    close(second)


def test_files_of_idle_prefixes_get_the_times_of_their_last_use(tmp_path):
    engine = start(tmp_path)
    prompts = [[i, *LONG] for i in range(2)]
    for prompt in [*prompts, prompts[0]]:
        ask(engine, prompt)
    close(engine)
    found = SnapshotFiles(tmp_path, "fake").find()
    assert [tokens[0] for _, tokens, _ in found] == [1, 0]


def test_restart_finds_saved_prefixes(tmp_path):
    """Prefixes that were idle in the cells when the engine closed are read from disk by the next
    engine. The text is the same.
    """
    first = start(tmp_path)
    answer, computed = ask(first, LONG)
    assert computed == len(LONG) + 1
    close(first)
    assert len(list(tmp_path.glob("*.kv"))) == 1
    assert not list(tmp_path.glob("*.tmp"))

    second = start(tmp_path)
    assert collect_stats(second.scheduler).num_disk_bytes > 0
    assert ask(second, LONG) == (answer, 2)
    assert ask(second, [*LONG[:100], 1]) == ([2, 3], 2)


def test_saved_prefix_is_found_only_with_its_salt(tmp_path):
    """This holds after a restart too. Each salt has its own file."""
    first = start(tmp_path)
    for salt in ("", "a"):
        assert ask(first, LONG, salt)[1] == len(LONG) + 1
    close(first)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    second = start(tmp_path)
    assert [ask(second, LONG, salt)[1] for salt in ("b", "a", "")] == [len(LONG) + 1, 2, 2]


@pytest.mark.parametrize(
    "damage", ["cut", "flipped", "another version", "empty", "head", "head cut", "tokens"]
)
def test_prefix_of_damaged_file_is_recomputed(tmp_path, damage):
    """Whatever is damaged, the answer is correct, and the file is deleted or replaced."""
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
    assert damaged[damage] != whole
    path.write_bytes(damaged[damage])
    second = start(tmp_path)
    assert ask(second, LONG) == (answer, len(LONG) + 1)
    close(second)
    assert path.read_bytes() == whole, "the engine writes it again"


def test_file_damaged_at_runtime_is_recomputed(tmp_path):
    """Sequences that wait for it are computed, and the next file is read as usual."""
    first = start(tmp_path)
    answer, _ = ask(first, LONG)
    close(first)
    (path,) = tmp_path.glob("*.kv")
    second = start(tmp_path)
    path.write_bytes(path.read_bytes()[:14] + b"\xc1")
    assert ask(second, LONG) == (answer, len(LONG) + 1)
    assert second.stats().num_disk_failures == 1
    close(second)
    third = start(tmp_path)
    assert ask(third, LONG) == (answer, 2)
    assert third.stats().num_disk_failures == 0


@pytest.mark.parametrize("reason", ["full", "gone"])
def test_folder_that_fails_is_counted_and_serving_goes_on(tmp_path, monkeypatch, reason, caplog):
    engine = start(tmp_path)
    if reason == "full":

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("cllm.engine.snapshot_files.open_private", fail)
    else:
        tmp_path.rmdir()
    answer, _ = ask(engine, LONG)
    while engine.idle():
        pass
    cast(DiskTier, engine.side_jobs[0])._files.flush(10)
    engine.step()
    assert engine.stats().num_disk_failures >= 1
    assert "cannot write a prefix" in caplog.text
    assert ask(engine, LONG)[0] == answer


def test_files_of_other_models_are_ignored(tmp_path):
    """Only files with the same fingerprint count."""
    first = start(tmp_path)
    ask(first, LONG)
    cast(Recorder, first.backend).info = type(first.backend.info)(
        **{**_fields(first.backend.info), "fingerprint": "other"}
    )
    close(first)
    other = build_engine(
        first.backend, EngineParams(disk_cache=str(tmp_path), disk_cache_bytes=10_000)
    )
    assert len(other.scheduler.sequences.kv_cache.snapshots.files) == 0
    assert len(list(tmp_path.glob("*.kv"))) == 1


def test_models_with_similar_fingerprints_have_separate_files(tmp_path):
    caches = [SnapshotFiles(tmp_path, f"{'0' * 70} {context}") for context in (4096, 8192)]
    tokens = np.arange(100, dtype=np.int32)
    for letter, cache in zip(b"ab", caches, strict=True):
        cache.write(1, tokens, memoryview(bytes([letter] * 1000)))
        cache.flush(10)
    for letter, cache in zip(b"ab", caches, strict=True):
        ((file, *_),) = cache.find()
        cache.register(2, file)
        cache.read(2, memoryview(data := bytearray(1000)))
        cache.flush(10)
        assert data == bytes([letter] * 1000)


def test_file_that_vanishes_meanwhile_hides_no_other(tmp_path, monkeypatch):
    """Another process may delete files of the same folder."""
    first = start(tmp_path)
    ask(first, LONG)
    close(first)
    (tmp_path / "gone.kv").symlink_to(tmp_path / "nowhere")
    assert len(start(tmp_path).scheduler.sequences.kv_cache.snapshots.files) == 1


def _fields(info) -> dict:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def test_disk_cache_without_ram_says_that_it_stores_nothing(tmp_path, caplog):
    """Prefixes get to the disk through RAM."""
    start(tmp_path, ram_cache_bytes=0)
    (record,) = [one for one in caplog.records if one.name == "cllm.engine"]
    assert record.getMessage() == (
        "kv.disk_cache stores nothing, because prefixes get there through RAM; raise "
        "kv.ram_cache_mb, which is 0"
    )
    caplog.clear()
    start(tmp_path, ram_cache_bytes=10**9)
    assert not caplog.records


def test_disk_cache_respects_its_budget(tmp_path):
    """When there are too many files, the least recently used ones are deleted."""
    engine = start(tmp_path, disk_cache_bytes=400)
    for i in range(5):
        ask(engine, [i, *LONG[1:]])
        while engine.idle():
            engine._disk._files.flush(5)
            engine.step()
    close(engine)
    assert 1 <= len(list(tmp_path.glob("*.kv"))) <= 2
    assert collect_stats(engine.scheduler).num_disk_bytes <= 400


def test_smaller_budget_applies_from_start(tmp_path):
    """A new engine keeps the files that were used last."""
    first = start(tmp_path)
    for i in range(4):
        ask(first, [i, *LONG[1:]])
        while first.idle():
            first._disk._files.flush(5)
            first.step()
    close(first)
    assert len(list(tmp_path.glob("*.kv"))) == 4
    second = start(tmp_path, disk_cache_bytes=400)
    second._disk._files.flush(5)
    assert len(list(tmp_path.glob("*.kv"))) == 2
    assert collect_stats(second.scheduler).num_disk_bytes <= 400
    assert [ask(second, [i, *LONG[1:]])[1] for i in (3, 2, 0)] == [2, 2, len(LONG) + 1]


def test_temporary_files_go_at_the_next_start_unless_they_are_being_written(tmp_path):
    abandoned, written = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    abandoned.write_bytes(b"half")
    with written.open("wb") as file:
        lock(file)
        start(tmp_path)
        assert [path.name for path in tmp_path.glob("*.tmp")] == ["b.2.tmp"]
    start(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_a_snapshot_that_cannot_be_written_is_forgotten(tmp_path, monkeypatch, error):
    """Otherwise its entry would keep a file of the same tokens alive."""

    def fail(data: memoryview) -> list[int]:
        raise error

    disk, tokens = SnapshotFiles(tmp_path, "model"), np.arange(5, dtype=np.int32)
    kept: dict[int, None] = {}
    monkeypatch.setattr("cllm.engine.snapshot_files.checksums", fail)
    disk.write(1, tokens, memoryview(b"data"))
    disk.flush(60)
    assert disk.results() == [Written(1, succeeded=False)]
    disk.delete_all_except(kept.keys())
    monkeypatch.undo()
    disk.write(2, tokens, memoryview(b"data"))
    disk.flush(60)
    disk.delete_all_except(kept.keys())
    assert len(list(tmp_path.iterdir())) == 1, "its result was not fetched yet"
    assert disk.results() == [Written(2)]
    disk.delete_all_except(kept.keys())
    disk.flush(60)
    assert not list(tmp_path.iterdir())


def test_file_that_is_being_written_stays_while_others_are_deleted(tmp_path):
    disk = SnapshotFiles(tmp_path, "model")
    disk.write(1, np.arange(5, dtype=np.int32), memoryview(b"old"))
    disk.flush(60)
    assert disk.results() == [Written(1)]
    disk.write(2, np.arange(6, dtype=np.int32), memoryview(b"new"))
    kept: dict[int, None] = {}
    disk.delete_all_except(kept.keys())
    disk.flush(60)
    assert disk.results()[0] == Written(2)
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().endswith(b"new")


def test_read_file_counts_as_recently_used(tmp_path):
    disk = SnapshotFiles(tmp_path, "model")
    for key in (1, 2):
        disk.write(key, np.arange(key, dtype=np.int32), memoryview(b"data"))
    disk.flush(60)
    assert disk.results() == [Written(1), Written(2)]
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    disk.read(1, memoryview(bytearray(4)))
    disk.flush(60)
    assert disk.results() == [Read(1, succeeded=True)]
    assert [len(tokens) for _, tokens, _ in disk.find()] == [2, 1]


def test_a_file_whose_tokens_were_saved_again_stays(tmp_path):
    """Two keys have one file; it goes with the second one."""
    disk, tokens = SnapshotFiles(tmp_path, "model"), np.arange(5, dtype=np.int32)
    for key in (1, 2):
        disk.write(key, tokens, memoryview(b"data"))
    disk.flush(60)
    assert disk.results() == [Written(1), Written(2)]
    for kept, count in (({2: None}, 1), ({}, 0)):
        disk.delete_all_except(kept.keys())
        disk.flush(60)
        assert len(list(tmp_path.iterdir())) == count


@pytest.mark.parametrize("method", ["new_state_buffer", "install_snapshot"])
def test_unreadable_prefix_leaves_no_file(tmp_path, monkeypatch, method):
    """A file that is not counted would make the folder larger than its budget."""
    first = start(tmp_path)
    ask(first, LONG)
    close(first)
    second = start(tmp_path)
    monkeypatch.setattr(second.backend, method, lambda *args: 1 / 0)
    ask(second, LONG)
    second._disk._files.flush(5)
    assert not list(tmp_path.iterdir())
    stats = collect_stats(second.scheduler)
    assert (stats.num_disk_bytes, stats.num_disk_failures) == (0, 1)


def test_prefixes_evicted_from_ram_are_read_from_disk(tmp_path):
    """RAM holds one snapshot. The others are on disk, and each is found."""
    engine = start(tmp_path, ram_cache_bytes=200)
    answers = []
    for i in range(4):
        answers.append(ask(engine, [i, *LONG[1:]])[0])
        while engine.idle():
            engine._disk._files.flush(5)
            engine.step()
    assert len(engine.scheduler.sequences.kv_cache.snapshots.files) == 4
    for i in range(4):
        assert ask(engine, [i, *LONG[1:]]) == (answers[i], 2)


class SlowlyMeasured(bytes):
    """Switches threads whenever its length is read, in the middle of the computation that uses it."""

    def __len__(self) -> int:
        time.sleep(0.0005)
        return super().__len__()


def test_pending_bytes_are_counted_exactly(tmp_path, monkeypatch):
    """While one thread accepts and another one finishes, no update is lost. The limit holds exactly
    afterwards.
    """
    disk = SnapshotFiles(tmp_path, "model")
    data = SlowlyMeasured(100)
    for i in range(200):
        disk.write(i, np.array([i], np.int32), data)
    disk.flush(60)
    assert len(disk.results()) == 200

    monkeypatch.setattr("cllm.engine.snapshot_files.MAX_PENDING", 300)
    go_on = threading.Event()
    disk._jobs.put(go_on.wait)  # blocks the writing thread
    for i in range(1000, 1005):
        disk.write(i, np.array([i], np.int32), data)
    go_on.set()
    disk.flush(60)
    assert [result.key for result in disk.results() if result is not True] == [1000, 1001, 1002]


def test_snapshot_without_room_for_writing_is_not_copied(tmp_path, monkeypatch):
    """A paged backend copies it when it is taken."""
    engine, taken = start(tmp_path), []
    monkeypatch.setattr(engine.backend, "snapshot", taken.append)
    ask(engine, LONG)
    monkeypatch.setattr("cllm.engine.snapshot_files.MAX_PENDING", len(LONG) - 1)
    close(engine)
    assert taken == []
    assert not list(tmp_path.glob("*.kv"))


def test_unwritable_folder_raises_startup_error(tmp_path):
    """One line, at the start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"kv\.disk_cache: cannot write to"):
        start(tmp_path / "file")


@pytest.mark.parametrize("method", ["new_state_buffer", "install_snapshot", "snapshot"])
def test_backend_error_during_disk_use_costs_only_the_prefix(method, tmp_path, monkeypatch):
    """Sequences that wait for the prefix are computed, it is not written, and the engine continues."""
    first = start(tmp_path)
    answer, _ = ask(first, LONG)
    if method == "snapshot":
        monkeypatch.setattr(first.backend, method, lambda key: 1 / 0)
    close(first)
    second = start(tmp_path)
    assert len(second.scheduler.sequences.kv_cache.snapshots.files) == (
        0 if method == "snapshot" else 1
    )
    if method != "snapshot":
        monkeypatch.setattr(second.backend, method, lambda *args: 1 / 0)
    assert ask(second, LONG) == (answer, len(LONG) + 1)


@pytest.mark.parametrize("method", ["save_one_idle", "record_written"])
def test_error_while_saving_idle_prefix_costs_only_the_prefix(method, tmp_path, monkeypatch):
    engine = start(tmp_path, check=False)
    answer, _ = ask(engine, LONG)
    failed = []
    owner = KVCache if method == "save_one_idle" else Snapshots
    monkeypatch.setattr(owner, method, lambda *args: failed.append(1) or 1 / 0)
    engine.idle()
    engine._disk._files.flush(5)
    engine.step()
    assert failed
    monkeypatch.undo()
    assert ask(engine, LONG)[0] == answer
    engine.scheduler.sequences.check()
