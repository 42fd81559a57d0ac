"""PagedMemory alone, without llama.cpp, against a model that lists the tokens of each holder."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import repeat
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.backends.llama_cpp import mappings, paged_memory
from cllm.backends.llama_cpp.mappings import PAGE, map_file, release, reserve
from cllm.backends.llama_cpp.paged_memory import (
    MAX_PARTS,
    OPEN,
    NotPaged,
    PagedMemory,
    Rows,
    Slab,
)
from cllm.errors import EngineError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="paged memory needs Linux")

STREAM = 64  # tokens of a stream
NUM_STREAMS = 4
NUM_KEYS = 3
# bytes of a row: many in a page, some in a page with one across its end, more than a page
ROW_BYTES = (64, 192, 1088, 4416)
COUNTS = st.integers(0, STREAM)


class Range:
    """Addresses of a KV cache for ``num_streams`` streams, and PagedMemory there."""

    def __init__(self, row_bytes: tuple[int, ...], num_streams: int = NUM_STREAMS) -> None:
        self.size = sum(row_bytes) * STREAM * num_streams
        self.base = reserve(self.size)
        tensors, offset = [], 0
        for i, size in enumerate(row_bytes):
            address = self.base + offset * num_streams
            tensors.append(Rows(b"cache_k_l%d" % i, address, size * STREAM, size, 1, offset))
            offset += size * STREAM
        self.memory = PagedMemory(tensors, num_streams)

    def row(self, rows: Rows, seq_id: int, start: int, end: int) -> np.ndarray:
        """Return the rows from ``start`` to ``end`` of a stream as numbers, in memory."""
        address = rows.address + seq_id * rows.stream_bytes + start * rows.row_bytes
        count = (end - start) * rows.row_bytes // 4
        array = (ctypes.c_uint32 * count).from_address(address)
        return np.ctypeslib.as_array(array).reshape(end - start, rows.row_bytes // 4)

    def write(self, seq_id: int, start: int, tokens: list[int]) -> None:
        for i, rows in enumerate(self.memory.tensors):
            if tokens:
                self.row(rows, seq_id, start, start + len(tokens))[:] = content(tokens, i)

    def close(self) -> None:
        release(self.base, self.size)
        self.memory.close()


def content(tokens: list[int], tensor: int) -> np.ndarray:
    """Return what each number of the rows of ``tokens`` is."""
    return np.array(tokens, np.uint32)[:, None] * 8 + tensor


@contextmanager
def refused_after(count: int) -> Iterator[None]:
    """Let the system refuse mappings, and writes to the file, after ``count`` of them."""
    left = itertools.chain(itertools.repeat(True, count), itertools.repeat(False))
    write = os.pwrite

    def map_some(*args, **options) -> None:
        if not next(left):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        map_file(*args, **options)

    def write_some(*args) -> int:
        if not next(left):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    with (
        mock.patch.object(paged_memory, "map_file", map_some),
        mock.patch.object(os, "pwrite", write_some),
    ):
        yield


class Machine(RuleBasedStateMachine):
    """Random operations. Every written token is another number, so equal contents are shared."""

    kept = 8
    max_parts = MAX_PARTS

    @initialize(
        sizes=st.lists(st.sampled_from(ROW_BYTES), min_size=1, max_size=3), parts=st.integers(2, 6)
    )
    def start(self, sizes: list[int], parts: int) -> None:
        self.range = Range(tuple(sizes))
        self.memory = self.range.memory
        self.memory._max_parts = parts
        self.patch = mock.patch.object(paged_memory, "KEPT_TOKENS", self.kept)
        self.patch.start()
        self.numbers = itertools.count(1)
        self.streams: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.saved: dict[int, list[int]] = {}
        self.has_copied = False  # whether a prefix had too many parts
        self.starts: dict[paged_memory.Slab, int] = {}  # of tokens, by slab, since it is used

    @rule(
        seq_id=st.integers(0, NUM_STREAMS - 1),
        count=st.one_of(st.integers(1, 20), COUNTS),
        rejected=st.integers(0, 12),
    )
    def write(self, seq_id: int, count: int, rejected: int) -> None:
        """Compute tokens, and some that are not kept: padding or wrong draft tokens."""
        tokens = self.streams[seq_id]
        added = list(itertools.islice(self.numbers, min(count + rejected, STREAM - len(tokens))))
        self.range.write(seq_id, len(tokens), added)
        tokens += added
        keep = max(len(tokens) - rejected, 0)
        if len(added) > rejected > 0:
            self.memory.trim(seq_id, keep, len(tokens))
            del tokens[keep:]

    @rule(ids=st.permutations(range(NUM_STREAMS)), count=COUNTS)
    def share(self, ids: list[int], count: int) -> None:
        source, target = ids[:2]
        count = min(count, len(self.streams[source]))
        self.trim(target, 0)
        self.note_copies(self.memory._parts[source], count, target)
        self.memory.share(source, target, count)
        self.streams[target] = self.streams[source][:count]

    @rule(seq_id=st.integers(0, NUM_STREAMS - 1), key=st.integers(0, NUM_KEYS - 1))
    def save(self, seq_id: int, key: int) -> None:
        self.memory.save(seq_id, key, len(self.streams[seq_id]))
        self.saved[key] = list(self.streams[seq_id])

    @rule(key=st.integers(0, NUM_KEYS - 1))
    def drop(self, key: int) -> None:
        self.memory.drop(key)
        self.saved.pop(key, None)

    @rule(key=st.integers(0, NUM_KEYS - 1), count=COUNTS)
    def install(self, key: int, count: int) -> None:
        tokens = list(itertools.islice(self.numbers, count))
        rows = [
            (each, np.repeat(content(tokens, i), each.row_bytes // 4, axis=1))
            for i, each in enumerate(self.memory.tensors)
        ]
        self.memory.install(key, count, [(each, memoryview(data.tobytes())) for each, data in rows])
        self.saved[key] = tokens

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), seq_id=st.integers(0, NUM_STREAMS - 1), count=COUNTS)
    def load(self, data: st.DataObject, seq_id: int, count: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.saved)))
        count = min(count, len(self.saved[key]))
        self.trim(seq_id, 0)
        self.note_copies(self.memory._parts[-1 - key], count, seq_id)
        self.memory.load(key, seq_id, count)
        self.streams[seq_id] = self.saved[key][:count]

    @rule(seq_id=st.integers(0, NUM_STREAMS - 1), keep=st.one_of(st.just(0), COUNTS))
    def trim(self, seq_id: int, keep: int) -> None:
        tokens = self.streams[seq_id]
        keep = min(keep, len(tokens))
        self.note_copies(self.memory._parts[seq_id], keep, seq_id)
        self.memory.trim(seq_id, keep, len(tokens))
        del tokens[keep:]

    @rule(ids=st.permutations(range(NUM_STREAMS)))
    def swap(self, ids: list[int]) -> None:
        first, second = ids[:2]
        self.memory.swap(first, second)
        streams = self.streams
        streams[first], streams[second] = streams[second], streams[first]

    @rule(data=st.data(), allowed=st.integers(0, 6))
    def fail(self, data: st.DataObject, allowed: int) -> None:
        """The system refuses memory in an operation. A trim repairs the streams."""
        first, second = data.draw(st.permutations(range(NUM_STREAMS)))[:2]
        count = data.draw(st.integers(0, len(self.streams[first])))
        operations = {
            "share": lambda: self.share([first, second], count),
            "swap": lambda: self.swap([first, second]),
            "trim": lambda: self.trim(second, count),
        }
        if self.saved:
            operations["load"] = lambda: self.load(data, second, count)
        copied = self.has_copied
        try:
            with refused_after(allowed):
                operations[data.draw(st.sampled_from(sorted(operations)))]()
        except EngineError as error:
            assert "refuses memory" in str(error)
            self.has_copied = copied
        else:
            return
        self.memory.check()
        for seq_id in (first, second):
            self.memory.trim(seq_id, 0, len(self.streams[seq_id]))
            self.memory.check_mapped(seq_id)
            self.streams[seq_id] = []

    def note_copies(self, source: list, count: int, target: int) -> None:
        parts = paged_memory.cut(source, count)
        if len(parts) == self.memory._max_parts and parts[-1].slab.end(without=target) > count:
            self.has_copied = True

    @invariant()
    def keeps_contents(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        for seq_id, tokens in enumerate(self.streams):
            for i, rows in enumerate(self.memory.tensors):
                if tokens:
                    found = self.range.row(rows, seq_id, 0, len(tokens))
                    assert (found == content(tokens, i)).all(), seq_id
        for key, tokens in self.saved.items():
            assert self.memory.count_saved(key) == len(tokens)
            for i, rows in enumerate(self.memory.tensors):
                data = np.zeros((len(tokens), rows.row_bytes // 4), np.uint32)
                if tokens:
                    self.memory.read(key, rows, memoryview(data).cast("B"))
                assert (data == content(tokens, i)).all(), key

    @invariant()
    def takes_memory_for_distinct_tokens_only(self) -> None:
        """And for KEPT_TOKENS of each stream that is not empty, and for the rest of pages."""
        if not hasattr(self, "memory"):
            return
        used = {}  # by slab: its first token and the end of its tokens
        for holder, parts in self.memory._parts.items():
            for part in parts:
                end = part.slab.ends[holder]
                end = len(self.streams[holder]) if end == OPEN else end
                start, most = used.get(part.slab, (part.start, 0))
                used[part.slab] = min(start, part.start), max(end, most)
        num_stored = sum(max(0, end - start) for start, end in used.values())
        holders = [*self.streams, *self.saved.values()]
        if not self.has_copied:
            assert num_stored == len({token for tokens in holders for token in tokens})
        self.starts = {
            slab: min(start, self.starts.get(slab, start)) for slab, (start, _) in used.items()
        }
        most = 0
        for slab, (_, end) in used.items():
            kept = self.kept if end and OPEN in slab.ends.values() else 0
            for rows in self.memory.tensors:
                stop = min(-(-(end + kept) * rows.row_bytes // PAGE) * PAGE, rows.stream_bytes)
                most += max(0, stop - rows.pages(self.starts[slab]))
        assert self.memory.num_bytes_used <= most

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for seq_id, tokens in enumerate(self.streams):
            self.memory.trim(seq_id, 0, len(tokens))
        for key in range(NUM_KEYS):
            self.memory.drop(key)
        self.memory.check()
        assert self.memory.num_bytes_used == 0
        assert len(self.memory._free) == self.memory._num_slabs - NUM_STREAMS
        self.patch.stop()
        self.range.close()


Machine.TestCase.settings = settings(max_examples=repeat(100, 25), stateful_step_count=40)
TestPagedMemory = Machine.TestCase


# --- single cases -------------------------------------------------------------------------------


@pytest.fixture
def room() -> Iterator[Range]:
    made = Range((192, 4416))
    yield made
    made.close()


def test_prefix_in_too_many_parts_is_copied(room: Range) -> None:
    """In each round, another stream takes over the prefix and adds a token, while a snapshot keeps
    it from writing to the last part.
    """
    memory, tokens = room.memory, [1000]
    room.write(0, 0, tokens)
    most = 0
    for i in range(2 * MAX_PARTS):
        source, target = i % 2, 1 - i % 2
        memory.trim(target, 0, max(0, len(tokens) - 1))
        memory.share(source, target, len(tokens))
        room.write(target, len(tokens), [i])
        tokens.append(i)
        most = max(most, len(memory._parts[target]))
        memory.check()
        for n, rows in enumerate(memory.tensors):
            assert (room.row(rows, target, 0, len(tokens)) == content(tokens, n)).all()
    assert most == MAX_PARTS


def test_turns_of_a_conversation_copy_no_long_prefix(room: Range) -> None:
    """Each turn shares all but the last token of the one before, which a snapshot keeps."""
    memory, tokens = room.memory, list(range(1000, 1040))
    room.write(0, 0, tokens)
    prefix, copied, copy = memory._parts[0][0], 0, memory._copy

    def count_copied(source: Slab, target: Slab, start: int, end: int) -> None:
        nonlocal copied
        copied += end - start
        copy(source, target, start, end)

    with mock.patch.object(memory, "_copy", count_copied):
        for i in range(3 * MAX_PARTS):
            source, target = i % 2, 1 - i % 2
            memory.save(source, i, len(tokens))
            memory.share(source, target, len(tokens) - 1)
            memory.trim(source, 0, len(tokens))
            tokens[-1:] = [i, 100 + i]
            room.write(target, len(tokens) - 2, tokens[-2:])
            assert memory._parts[target][0] == prefix
            memory.check()
            for n, rows in enumerate(memory.tensors):
                assert (room.row(rows, target, 0, len(tokens)) == content(tokens, n)).all()
    assert 0 < copied < 2 * len(tokens)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("rest", [0, 3])
def test_followers_of_too_many_parts_share_one_copy(rest: int, *, is_saved: bool) -> None:
    """Of a stream or a snapshot, which may have further tokens."""
    room = Range((192, 4416), 35)
    memory, tokens, source = room.memory, [], 0
    for i in range(MAX_PARTS):
        memory.share(source, i % 2, len(tokens))
        source = i % 2
        added = [100 * i + j for j in range(10)]
        room.write(source, len(tokens), added)
        tokens += added
        memory.save(source, i, len(tokens))
        memory.trim(1 - source, 0, len(tokens))
    key, num_shared = MAX_PARTS - 1, len(tokens) - rest
    assert len(memory._parts[source]) == MAX_PARTS
    before, one_copy = memory.num_bytes_used, num_shared * (192 + 4416)
    for target in range(2, 34):
        if is_saved:
            memory.load(key, target, num_shared)
        else:
            memory.share(source, target, num_shared)
        room.write(target, num_shared, [1000 + target])
        memory.check()
    room.write(source, len(tokens), [1000 + source])
    rest_of_pages = 2 * 2 * PAGE * 33
    assert memory.num_bytes_used < before + one_copy + rest_of_pages
    for seq_id in (source, *range(2, 34)):
        expected = tokens if seq_id == source else tokens[:num_shared]
        for i, rows in enumerate(memory.tensors):
            found = room.row(rows, seq_id, 0, len(expected) + 1)
            assert (found == content([*expected, 1000 + seq_id], i)).all()
    for i, rows in enumerate(memory.tensors):
        data = np.zeros((len(tokens), rows.row_bytes // 4), np.uint32)
        memory.read(key, rows, memoryview(data).cast("B"))
        assert (data == content(tokens, i)).all()
    room.close()


def test_trims_in_small_steps_free_memory(room: Range) -> None:
    """All but KEPT_TOKENS, which is more than a step."""
    memory = room.memory
    with mock.patch.object(paged_memory, "KEPT_TOKENS", 16):
        room.write(0, 0, list(range(STREAM)))
        full = memory.num_bytes_used
        assert full == sum(rows.stream_bytes for rows in memory.tensors)
        for keep in range(STREAM - 4, -1, -4):
            memory.trim(0, keep, keep + 4)
        assert memory.num_bytes_used < full / 3


def test_emptied_stream_takes_no_memory(room: Range) -> None:
    """Another one keeps some after a trim."""
    room.write(0, 0, list(range(40)))
    before = room.memory.num_bytes_used
    room.memory.trim(0, 1, 40)
    assert room.memory.num_bytes_used == before
    room.memory.trim(0, 0, 1)
    assert room.memory.num_bytes_used == 0


def test_streams_keep_shared_tokens_mapped_when_they_are_exchanged(room: Range) -> None:
    """Each mapping that is made again is filled again, page by page, by the next step."""
    memory, shared = room.memory, [*range(1, 33)]
    room.write(0, 0, shared)
    memory.share(0, 1, 32)
    room.write(0, 32, [100])
    room.write(1, 32, [200])
    with mock.patch.object(paged_memory, "map_file", wraps=map_file) as mapped:
        memory.swap(0, 1)
    expected = [
        rows.address + seq_id * rows.stream_bytes + rows.pages(32)
        for seq_id in (0, 1)
        for rows in memory.tensors
    ]
    assert [call.args[0] for call in mapped.call_args_list] == expected
    for seq_id, own in ((0, 200), (1, 100)):
        found = room.row(memory.tensors[0], seq_id, 0, 33)
        assert (found == content([*shared, own], 0)).all()


def test_memory_that_cannot_be_freed_is_wasted(room: Range) -> None:
    """Nothing else fails."""
    memory = room.memory
    room.write(0, 0, [1, 2, 3])
    refused = OSError(errno.EOPNOTSUPP, "no")
    with (
        mock.patch.object(paged_memory, "KEPT_TOKENS", 0),
        mock.patch.object(paged_memory, "punch", side_effect=refused),
    ):
        memory.trim(0, 0, 3)
        memory.check()
    room.write(0, 0, [4])
    assert (room.row(memory.tensors[0], 0, 0, 1) == content([4], 0)).all()


def test_unmapped_stream_is_reported(room: Range) -> None:
    """Until a trim maps it again. The others can be used."""
    room.write(0, 0, [5])
    refusal = r"refuses memory for the KV cache: Cannot allocate"
    with refused_after(1), pytest.raises(EngineError, match=refusal):
        room.memory.swap(0, 1)
    room.memory.check()
    for seq_id in (0, 1):
        with pytest.raises(EngineError, match=f"sequence id {seq_id} is not mapped"):
            room.memory.check_mapped(seq_id)
        with refused_after(0), pytest.raises(EngineError):
            room.memory.trim(seq_id, 0, 0)
        room.memory.trim(seq_id, 0, 0)
        room.memory.check_mapped(seq_id)
    room.memory.check_mapped(2)


def test_huge_pages_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They would take 2 MB for the first token of each tensor."""
    monkeypatch.setattr(mappings, "HUGE_PAGES", tmp_path)
    for folder, setting, expected in (
        (tmp_path, "always within_size advise [never] deny force", False),
        (tmp_path / "hugepages-2048kB", "always inherit within_size [advise] never", False),
        (tmp_path / "hugepages-64kB", "[always] inherit within_size advise never", True),
    ):
        folder.mkdir(exist_ok=True)
        (folder / "shmem_enabled").write_text(setting)
        assert mappings.may_get_huge_pages() == expected
    room = Range((192, 4416))
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(r"(?m)^(\w+)-\w+ .*cllm-kv(?:\n|.)*?^VmFlags:(.*)$", maps)
    flags = [flags for start, flags in found if 0 <= int(start, 16) - room.base < room.size]
    assert len(flags) == 2 * NUM_STREAMS
    assert all(" nh" in each for each in flags)
    room.close()


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


@pytest.mark.parametrize(
    ("row_bytes", "name", "value", "reason"),
    [
        ((48,), "", None, "whole pages"),
        ((64,), "max_mappings", lambda: 4 * NUM_STREAMS - 1, "vm.max_map_count is too low"),
        ((64,), "must_reserve", lambda: True, "vm.overcommit_memory 2"),
        ((64,), "create_file", refuse, "no file in memory: File too large"),
        ((64,), "map_file", refuse, "refuses memory for the KV cache: File too large"),
    ],
)
def test_reason_is_given_where_paged_memory_is_impossible(
    monkeypatch: pytest.MonkeyPatch,
    row_bytes: tuple[int, ...],
    name: str,
    value: object,
    reason: str,
) -> None:
    """Nothing stays open."""
    files = list(Path("/proc/self/fd").iterdir())
    if name:
        monkeypatch.setattr(paged_memory, name, value)
    with pytest.raises(NotPaged, match=reason):
        Range(row_bytes)
    assert list(Path("/proc/self/fd").iterdir()) == files


def test_python_without_memfd_create_has_paged_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those that uv installs."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "MFD_CLOEXEC", raising=False)
    room = Range((64,))
    assert not os.get_inheritable(room.memory._file)
    room.close()


def test_system_without_memfd_create_has_no_paged_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    assert mappings._load_libc() is None


def test_number_of_parts_follows_the_limit_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the mappings are for other uses."""
    monkeypatch.setattr(paged_memory, "max_mappings", lambda: 2 * 3 * NUM_STREAMS)
    room = Range((64,))
    assert room.memory._max_parts == 3
    room.close()


def test_settings_of_the_system_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux's usual values apply where the files cannot be read."""
    monkeypatch.setattr(mappings, "SETTINGS", tmp_path)
    assert (mappings.max_mappings(), mappings.must_reserve()) == (65530, False)
    (tmp_path / "max_map_count").write_text("1048576\n")
    (tmp_path / "overcommit_memory").write_text("2\n")
    assert (mappings.max_mappings(), mappings.must_reserve()) == (1048576, True)
