"""Memory for keys and values that is taken page by page, and that sequences can share.

llama.cpp gives each sequence a stream: a range of addresses for as many tokens as the longest
sequence may have. Here these ranges are only reserved. The system provides a page when it is first
written, so a short sequence in a long stream needs little memory. The pages belong to a file in
memory (memfd), and each stream maps parts of this file. Streams that map the same part share a
prefix, in memory and in the CPU's caches, and a prefix moves to another stream without a copy.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, share blocks of tokens by a table that the kernels read. As in Prabhu et al.,
"vAttention", ASPLOS 2025, the table is the page table of the system here, so the kernels need not
know of it.

llama.cpp has no parameter for the memory of its KV cache. ``intercept`` therefore replaces, while
the context is being created, the function with which ggml allocates memory on CPUs. This depends on
private structures of the version that library.py requires; ``is_supported`` checks them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

from cllm.backends.llama_cpp.ggml_memory import (
    BUFFER_CLEAR,
    BUFFER_INIT,
    BUFFER_SET,
    BUFT_ALLOC,
    FAILED,
    MAP_FIXED,
    MAP_NORESERVE,
    PAGE,
    Alloc,
    Clear,
    InitTensor,
    Pointer,
    SetTensor,
    Tensor,
    do_nothing,
    ggml,
    libc,
    max_mappings,
    punch,
)
from cllm.errors import EngineError

KEPT_TOKENS = 128  # memory that a stream keeps when it is emptied, because it is soon used again
MAX_PARTS = 6  # of a stream; each is a mapping for each tensor, and their number is limited
COPIED_AT_ONCE = 1 << 20  # bytes
OPEN = 1 << 62  # the end of the part that a stream writes to


class NotPaged(Exception):
    """The KV cache cannot have paged memory; the message says why."""


class Rows(NamedTuple):
    """The keys or the values of one layer, a row for each token: where they are in memory and in a
    slab, in bytes.

    ``type``: ggml's number of the type of the values.
    """

    name: bytes
    address: int
    stream_bytes: int
    row_bytes: int
    type: int
    offset: int

    def pages(self, num_tokens: int) -> int:
        """Return the bytes of the whole pages in the first ``num_tokens`` rows."""
        return min(num_tokens * self.row_bytes, self.stream_bytes) // PAGE * PAGE


class Slab:
    """Room in the file for all tokens of one stream; only pages that were written take memory.

    writer: the stream that may write. ends: for each holder of the slab, the end of the tokens that
    it uses; OPEN for the writer.
    """

    __slots__ = ("ends", "index", "writer")

    def __init__(self, index: int) -> None:
        self.index = index
        self.writer: int | None = None
        self.ends: dict[int, int] = {}

    def end(self, without: int | None = None) -> int:
        """Return the end of the tokens that holders other than ``without`` use."""
        return max((end for holder, end in self.ends.items() if holder != without), default=0)


class Part(NamedTuple):
    """The tokens of a stream or a snapshot from ``start`` to the next part are in ``slab``."""

    start: int
    slab: Slab


class PagedMemory:
    """The memory of one KV cache whose streams have one sequence each, from token 0 on.

    The holders of tokens are streams (their seq_ids) and snapshots (-1 - key).
    """

    def __init__(self, num_streams: int, num_bytes: int, max_bytes: int) -> None:
        """``num_bytes``: what llama.cpp will ask for. ``max_bytes``: of memory that can be spent.

        Call ``intercept``, then ``open``.
        """
        self._num_streams = num_streams
        self._num_bytes = num_bytes
        self._max_bytes = max_bytes
        self._base = 0
        self._buffer = 0
        self._file = -1
        self.tensors: list[Rows] = []
        self._callbacks = (
            Alloc(self._alloc),
            InitTensor(self._register),
            Clear(do_nothing),  # the memory is zero already
            SetTensor(do_nothing),
        )
        self._original_alloc: Any = None

    # --- creation --------------------------------------------------------------------------------

    @contextmanager
    def intercept(self) -> Iterator[None]:
        """Inside the ``with`` block, give ggml this memory when it asks for ``num_bytes``."""
        functions = (Pointer * 6).from_address(ggml.ggml_backend_cpu_buffer_type())
        original = functions[BUFT_ALLOC]
        self._original_alloc = Alloc(original or 0)
        functions[BUFT_ALLOC] = ctypes.cast(self._callbacks[0], Pointer).value
        try:
            yield
        finally:
            functions[BUFT_ALLOC] = original

    def _alloc(self, buffer_type: int, size: int) -> int | None:
        if size != self._num_bytes or self._base:
            if size > 2 * self._max_bytes:  # not as expected, and llama.cpp would write all of it
                return None
            buffer: int | None = self._original_alloc(buffer_type, size)
            return buffer
        base = libc.mmap(
            None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0
        )
        if base == FAILED:
            return None
        self._base = base
        self._buffer = ggml.ggml_backend_cpu_buffer_from_ptr(base, size)
        functions = self._functions()
        functions[BUFFER_INIT] = ctypes.cast(self._callbacks[1], Pointer).value
        functions[BUFFER_CLEAR] = ctypes.cast(self._callbacks[2], Pointer).value
        return self._buffer

    def _functions(self) -> Any:
        return (Pointer * 11).from_address(self._buffer)

    def _register(self, buffer: int, address: int) -> int:
        tensor = Tensor.from_address(address)
        if not tensor.view_src:
            offset = sum(rows.stream_bytes for rows in self.tensors)
            _, row_bytes, stream_bytes, _ = tensor.nb
            self.tensors.append(
                Rows(tensor.name, tensor.data, stream_bytes, row_bytes, tensor.type, offset)
            )
        return 0

    def open(self) -> bool:
        """Map the streams; return False if llama.cpp uses other memory or in another way."""
        total = sum(rows.stream_bytes for rows in self.tensors) * self._num_streams
        whole_pages = all(rows.stream_bytes % PAGE == 0 for rows in self.tensors)
        num_mappings = len(self.tensors) * self._num_streams * MAX_PARTS // 2
        if total != self._num_bytes or not whole_pages or num_mappings > max_mappings() // 2:
            return False
        self._slab_bytes = total // self._num_streams
        self._file = os.memfd_create("cllm-kv", os.MFD_CLOEXEC)
        self._num_slabs = 0
        self._free: list[Slab] = []
        self._streams: list[list[Part]] = []
        self._unmapped: set[int] = set()  # streams whose mapping has failed
        self._snapshots: dict[int, list[Part]] = {}  # by holder
        self._lengths: dict[int, int] = {}  # of snapshots, by holder
        for seq_id in range(self._num_streams):
            slab = self._take_slab()
            slab.writer, slab.ends[seq_id] = seq_id, OPEN
            self._streams.append([Part(0, slab)])
            self._map(seq_id, 0)
        return True

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Inside the ``with`` block, llama.cpp loads states without changing this memory."""
        functions = self._functions()
        original = functions[BUFFER_SET]
        functions[BUFFER_SET] = ctypes.cast(self._callbacks[3], Pointer).value
        try:
            yield
        finally:
            functions[BUFFER_SET] = original

    def close(self) -> None:
        """Free everything, after llama.cpp has freed the context."""
        if self._base:
            libc.munmap(self._base, self._num_bytes)
        if self._file >= 0:
            os.close(self._file)
        self._base, self._file = 0, -1

    # --- prefixes --------------------------------------------------------------------------------

    def save(self, seq_id: int, key: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of a stream as the snapshot ``key``."""
        self.drop(key)
        parts, holder = cut(self._streams[seq_id], num_tokens), -1 - key
        self._snapshots[holder], self._lengths[holder] = parts, num_tokens
        self._hold(holder, parts, num_tokens)

    def drop(self, key: int) -> None:
        """Forget a snapshot, if there is one."""
        if (parts := self._snapshots.pop(-1 - key, None)) is not None:
            del self._lengths[-1 - key]
            self._release(-1 - key, parts)

    def count_saved(self, key: int) -> int | None:
        """Return the number of tokens of a snapshot; None if there is none."""
        return self._lengths.get(-1 - key)

    def load(self, key: int, seq_id: int, num_tokens: int) -> None:
        """Give a stream the first ``num_tokens`` tokens of a snapshot."""
        self._assign(seq_id, self._snapshots[-1 - key], num_tokens)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Give a stream the first ``num_tokens`` tokens of another one."""
        self._assign(target, self._streams[source], num_tokens)

    def trim(self, seq_id: int, keep: int, length: int) -> None:
        """Free the memory after the first ``keep`` of the ``length`` tokens of a stream.

        The stream may write there afterwards.
        """
        self._assign(seq_id, self._streams[seq_id], keep)
        kept = max(keep, KEPT_TOKENS)
        last = self._streams[seq_id][-1].slab
        if length > kept:
            self._punch(last, max(kept, last.end(without=seq_id)))

    def swap(self, first: int, second: int) -> None:
        """Exchange all tokens of two streams."""
        streams = self._streams
        for seq_id in (first, second):
            for part in streams[seq_id]:
                part.slab.ends.pop(seq_id, None)
                if part.slab.writer == seq_id:
                    part.slab.writer = None
        streams[first], streams[second] = streams[second], streams[first]
        for seq_id in (first, second):
            self._hold(seq_id, streams[seq_id], OPEN)
            streams[seq_id][-1].slab.writer = seq_id
            self._map(seq_id, 0)

    def _hold(self, holder: int, parts: list[Part], length: int) -> None:
        for part, end in zip(parts, [*(part.start for part in parts[1:]), length], strict=True):
            part.slab.ends[holder] = end

    def _release(self, holder: int, parts: list[Part]) -> None:
        for slab in {part.slab: None for part in parts}:
            del slab.ends[holder]
            if slab.writer == holder:
                slab.writer = None
            if not slab.ends:
                self._punch(slab, 0)
                self._free.append(slab)
            elif slab.writer is None:
                self._punch(slab, slab.end())

    def _assign(self, seq_id: int, source: list[Part], keep: int) -> None:
        """Give a stream the first ``keep`` tokens of ``source``, and memory to write after them."""
        before = self._streams[seq_id]
        parts = cut(source, keep)
        last = parts[-1].slab
        if last.writer not in (None, seq_id) or last.end(without=seq_id) > keep:
            own = self._take_slab()
            if len(parts) == MAX_PARTS:
                for i, part in enumerate(parts):
                    end = parts[i + 1].start if i + 1 < len(parts) else keep
                    self._copy(part.slab, own, part.start, end)
                parts = []
            elif keep:
                self._copy(last, own, keep, keep)
            if keep and parts:
                parts = [*parts, Part(keep, own)]
            else:
                parts = [Part(0, own)]
        if parts == before and seq_id not in self._unmapped:
            return
        gone = [part for part in before if part.slab not in {p.slab for p in parts}]
        self._hold(seq_id, parts, OPEN)
        self._release(seq_id, gone)
        for part in parts[:-1]:
            if part.slab.writer == seq_id:
                part.slab.writer = None
        parts[-1].slab.writer = seq_id
        self._streams[seq_id] = parts
        same = sum(1 for _ in takewhile(are_equal, zip(before, parts, strict=False)))
        self._map(seq_id, 0 if seq_id in self._unmapped else max(0, same - 1))

    # --- pages -----------------------------------------------------------------------------------

    def _take_slab(self) -> Slab:
        if self._free:
            return self._free.pop()
        self._num_slabs += 1
        os.ftruncate(self._file, self._num_slabs * self._slab_bytes)
        return Slab(self._num_slabs - 1)

    def _map(self, seq_id: int, first: int) -> None:
        """Map the parts of a stream from the part ``first`` on."""
        parts = self._streams[seq_id]
        self._unmapped.add(seq_id)
        for i in range(first, len(parts)):
            start, slab = parts[i]
            end = parts[i + 1].start if i + 1 < len(parts) else OPEN
            place = slab.index * self._slab_bytes
            for rows in self.tensors:
                begin, stop = rows.pages(start), rows.pages(end)
                if begin == stop:
                    continue
                address = rows.address + seq_id * rows.stream_bytes + begin
                mapped = libc.mmap(
                    address,
                    stop - begin,
                    mmap.PROT_READ | mmap.PROT_WRITE,
                    mmap.MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                    self._file,
                    place + rows.offset + begin,
                )
                if mapped == FAILED:
                    raise EngineError(
                        f"cannot map memory of the KV cache: {os.strerror(ctypes.get_errno())}"
                    )

        self._unmapped.discard(seq_id)

    def _copy(self, source: Slab, target: Slab, start: int, end: int) -> None:
        """Copy the rows from ``start`` to ``end``, and those before ``start`` in the same page."""
        for rows in self.tensors:
            at, stop = rows.pages(start), end * rows.row_bytes
            while at < stop:
                size = min(COPIED_AT_ONCE, stop - at)
                data = os.pread(self._file, size, self._place(source, rows) + at)
                os.pwrite(self._file, data, self._place(target, rows) + at)
                at += size

    def read(self, key: int, rows: Rows, data: memoryview) -> None:
        """Fill ``data`` with the first bytes of a snapshot's rows."""
        parts, at = self._snapshots[-1 - key], 0
        for i, (_, slab) in enumerate(parts):
            stop = rows.pages(parts[i + 1].start) if i + 1 < len(parts) else len(data)
            while at < stop:
                place = self._place(slab, rows) + at
                at += os.preadv(self._file, [data[at : min(stop, at + COPIED_AT_ONCE)]], place)

    def _place(self, slab: Slab, rows: Rows) -> int:
        return slab.index * self._slab_bytes + rows.offset

    def _punch(self, slab: Slab, keep: int) -> None:
        """Give the pages after the first ``keep`` tokens of a slab back to the system."""
        if not keep:
            punch(self._file, slab.index * self._slab_bytes, self._slab_bytes)
            return
        for rows in self.tensors:
            begin = min(-(-keep * rows.row_bytes // PAGE) * PAGE, rows.stream_bytes)
            if begin < rows.stream_bytes:
                punch(self._file, self._place(slab, rows) + begin, rows.stream_bytes - begin)

    @property
    def num_bytes_used(self) -> int:
        """The memory that the pages take."""
        return os.fstat(self._file).st_blocks * 512

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        holders = {**dict(enumerate(self._streams)), **self._snapshots}
        ends: dict[int, dict[int, int]] = {}
        for holder, parts in holders.items():
            length = self._lengths.get(holder, OPEN)
            starts = [part.start for part in parts]
            assert starts == sorted(set(starts)), (holder, starts)
            assert starts[0] == 0, (holder, starts)
            for part, end in zip(parts, [*starts[1:], length], strict=True):
                assert part.slab.ends[holder] == end, (holder, part.start)
                ends.setdefault(part.slab.index, {})[holder] = end
        for seq_id, parts in enumerate(self._streams):
            last = parts[-1]
            assert last.slab.writer == seq_id, seq_id
            assert OPEN not in {**last.slab.ends, seq_id: 0}.values(), seq_id
        used = {part.slab.index: part.slab for parts in holders.values() for part in parts}
        assert all(slab.ends == ends[index] for index, slab in used.items()), "stale holders"
        assert len(used) + len(self._free) == self._num_slabs, "slabs lost"


def cut(parts: list[Part], keep: int) -> list[Part]:
    """Return the parts that have any of the first ``keep`` tokens, at least the first part."""
    return [part for part in parts if part.start < keep] or parts[:1]


def are_equal(pair: tuple[Part, Part]) -> bool:
    return pair[0] == pair[1]
