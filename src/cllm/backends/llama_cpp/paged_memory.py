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

The file consists of slabs, each with room for all tokens of one stream. A token's rows have the
same place in every slab, so a prefix can be in several slabs: its first tokens in one, the next
tokens in another. One stream may write to a slab, behind the tokens that others use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import NamedTuple

from cllm.backends.llama_cpp.mappings import (
    PAGE,
    create_file,
    map_file,
    max_mappings,
    may_get_huge_pages,
    must_reserve,
    punch,
)
from cllm.errors import EngineError

KEPT_TOKENS = 128  # a trimmed stream keeps the memory of this many tokens, for its next tokens
MAX_PARTS = 6  # parts of a stream; each takes a mapping for each tensor
COPIED_AT_ONCE = 1 << 20  # bytes
OPEN = 1 << 62  # the end of the part that a stream writes to


class NotPaged(Exception):
    """The KV cache cannot have paged memory; the message says why."""


class Rows(NamedTuple):
    """The keys or the values of one layer, a row for each token.

    ``address`` is the address of the first stream's rows, and ``offset`` the number of bytes before
    the rows in a slab. ``type`` is ggml's number for the type of the values. ``cache`` counts
    llama.cpp's caches: those layers that have a window are in the second one.
    """

    name: bytes
    address: int
    stream_bytes: int
    row_bytes: int
    type: int
    offset: int
    cache: int = 0

    def pages(self, num_tokens: int) -> int:
        """Return the bytes of the whole pages in the first ``num_tokens`` rows."""
        return min(num_tokens * self.row_bytes, self.stream_bytes) // PAGE * PAGE


class Slab:
    """Room in the file for all tokens of one stream; only pages that were written take memory.

    ``ends`` maps each holder to the end of the tokens it uses; OPEN for the stream that writes.
    ``trimmed`` is the end of the memory that trimmed streams have kept.
    """

    __slots__ = ("ends", "index", "trimmed")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ends: dict[int, int] = {}
        self.trimmed = 0

    def end(self, without: int | None = None) -> int:
        """Return the end of the tokens that holders other than ``without`` use."""
        return max((end for holder, end in self.ends.items() if holder != without), default=0)


class Part(NamedTuple):
    """A part of a holder: its tokens from ``start`` to the next part are in ``slab``."""

    start: int
    slab: Slab


class PagedMemory:
    """The memory of streams that have one sequence each, from token 0 on, and of snapshots.

    The holders of slabs are streams (by seq_id) and snapshots (-1 - key). After an EngineError, the
    content of a stream is unknown until ``trim(seq_id, 0)``.
    """

    def __init__(self, tensors: list[Rows], num_streams: int) -> None:
        """Map empty streams. Raises NotPaged if the system does not allow that."""
        self.tensors = tensors
        self._num_streams = num_streams
        self._slab_bytes = sum(rows.stream_bytes for rows in tensors)
        if must_reserve():
            raise NotPaged("with vm.overcommit_memory 2, the system may refuse the next page")
        if any(rows.stream_bytes % PAGE or rows.address % PAGE for rows in tensors):
            raise NotPaged("the rows of a stream do not fill whole pages")
        # leave the other half of the mappings to the rest of the process
        self._max_parts = min(MAX_PARTS, max_mappings() // 2 // (num_streams * len(tensors)))
        if self._max_parts < 2:
            raise NotPaged("vm.max_map_count is too low for so many layers and sequences")
        self._huge_pages = may_get_huge_pages()
        self._num_slabs = 0
        self._free: list[Slab] = []
        self._parts: dict[int, list[Part]] = {}  # by holder
        self._lengths: dict[int, int] = {}  # of snapshots, by holder
        self._unmapped: set[int] = set()  # streams whose mapping has failed
        try:
            self._file = create_file()
        except OSError as error:
            raise NotPaged(f"the system provides no file in memory: {error.strerror}") from None
        try:
            for seq_id in range(num_streams):
                self._put(seq_id, [Part(0, self._take_slab())], OPEN)
                self._map(seq_id, 0)
        except EngineError as error:
            self.close()
            raise NotPaged(str(error)) from None

    def close(self) -> None:
        """Free the memory, once nothing maps it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    # --- prefixes --------------------------------------------------------------------------------

    def save(self, seq_id: int, key: int, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens of a stream as the snapshot ``key``."""
        self._keep(key, cut(self._parts[seq_id], num_tokens), num_tokens)

    def install(self, key: int, num_tokens: int, rows: Iterable[tuple[Rows, memoryview]]) -> None:
        """Write ``num_tokens`` rows of each tensor as the snapshot ``key``."""
        slab = self._take_slab()
        with self._writing(slab):
            for each, data in rows:
                self._write(slab, each, 0, data)
        self._keep(key, [Part(0, slab)], num_tokens)

    def _keep(self, key: int, parts: list[Part], num_tokens: int) -> None:
        holder = -1 - key
        self._put(holder, parts, num_tokens)
        self._lengths[holder] = num_tokens

    def drop(self, key: int) -> None:
        """Forget a snapshot, if there is one."""
        self._put(-1 - key, [], 0)
        self._lengths.pop(-1 - key, None)

    def count_saved(self, key: int) -> int | None:
        """Return the number of tokens of a snapshot; None if there is none."""
        return self._lengths.get(-1 - key)

    def load(self, key: int, seq_id: int, num_tokens: int) -> None:
        """Give an empty stream the first ``num_tokens`` tokens of a snapshot."""
        self._assign(seq_id, -1 - key, num_tokens)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Give an empty stream the first ``num_tokens`` tokens of another one."""
        self._assign(target, source, num_tokens)

    def trim(self, seq_id: int, keep: int, length: int) -> None:
        """Remove the tokens after the first ``keep`` of the ``length`` tokens of a stream.

        The stream may write there afterwards, and keeps memory for KEPT_TOKENS unless it is empty.
        """
        end = OPEN if seq_id in self._unmapped else length
        self._assign(seq_id, seq_id, keep)
        slab = self._parts[seq_id][-1].slab
        slab.trimmed = max(slab.trimmed, end)
        stop = keep + KEPT_TOKENS if keep else 0
        if slab.trimmed > stop:
            self._free_pages(slab, stop)

    def swap(self, first: int, second: int) -> None:
        """Exchange all tokens of two streams. What they share stays mapped."""
        moved = {first: second, second: first}
        before = self._parts[first], self._parts[second]
        changed = 0 if self._unmapped & {first, second} else first_difference(*before)
        for slab in {part.slab for parts in before for part in parts}:
            slab.ends = {moved.get(holder, holder): end for holder, end in slab.ends.items()}
        self._parts[second], self._parts[first] = before
        try:
            self._map(first, changed)
            self._map(second, changed)
        except EngineError:
            self._unmapped |= {first, second}  # the caller cannot know which of the two was mapped
            raise

    def _put(self, holder: int, parts: list[Part], length: int) -> None:
        """Replace the tokens of ``holder`` by ``length`` tokens in ``parts``, and free the pages
        that no holder uses any longer.
        """
        before = {part.slab: part.slab.end() for part in self._parts.pop(holder, [])}
        for slab in before:
            del slab.ends[holder]
        for part, following in zip_longest(parts, parts[1:]):
            part.slab.ends[holder] = following.start if following else length
        for slab, end in before.items():
            if slab.end() < end:
                self._free_pages(slab, slab.end())
            if not slab.ends:
                self._free.append(slab)
        if parts:
            self._parts[holder] = parts

    def _assign(self, seq_id: int, source: int, keep: int) -> None:
        """Give a stream the first ``keep`` tokens of the holder ``source``, and memory to write
        after them.
        """
        parts = cut(self._parts[source], keep)
        if len(parts) == self._max_parts and parts[-1].slab.end(without=seq_id) > keep:
            self._merge(source, keep)
            parts = cut(self._parts[source], keep)
        parts = self._extend(seq_id, parts, keep)
        before = self._parts[seq_id]
        changed = 0 if seq_id in self._unmapped else first_difference(before, parts)
        self._put(seq_id, parts, OPEN)
        if changed < OPEN:
            self._map(seq_id, changed)

    def _merge(self, holder: int, keep: int) -> None:
        """Copy the pair of neighbouring parts that has the fewest tokens to a new slab, and let the
        holder use it instead. All parts of the holder begin before ``keep``.

        Streams that share these tokens later use the same copy.
        """
        parts, length = self._parts[holder], self._lengths.get(holder, OPEN)
        ends = [*(part.start for part in parts[1:]), keep]
        i = min(range(len(parts) - 1), key=lambda i: ends[i + 1] - parts[i].start)
        slab = self._take_slab()
        with self._writing(slab):
            for part, end in zip(parts[i : i + 2], ends[i : i + 2], strict=True):
                self._copy(part.slab, slab, part.start, end)
        rest = parts[i + 2 :]
        if not rest and keep < length:
            rest = [Part(keep, parts[-1].slab)]
        start = parts[i].start
        self._put(holder, [*parts[:i], Part(start, slab), *rest], length)
        if holder >= 0:
            self._map(holder, start)

    def _extend(self, seq_id: int, parts: list[Part], keep: int) -> list[Part]:
        """Return ``parts``, and a new one after ``keep`` tokens unless the stream may write to the
        last one.
        """
        last = parts[-1].slab
        if last.end(without=seq_id) <= keep:
            return parts
        own = self._take_slab()
        with self._writing(own):
            self._copy(last, own, keep, keep)
        return [*parts, Part(keep, own)] if keep else [Part(0, own)]

    # --- pages -----------------------------------------------------------------------------------

    def _take_slab(self) -> Slab:
        if self._free:
            return self._free.pop()
        self._num_slabs += 1
        return Slab(self._num_slabs - 1)

    @contextmanager
    def _writing(self, slab: Slab) -> Iterator[None]:
        """Free the new ``slab`` and raise EngineError if the ``with`` block cannot write to it."""
        try:
            yield
        except OSError as error:
            self._free_pages(slab, 0)
            self._free.append(slab)
            raise failure(error) from None

    def _map(self, seq_id: int, token: int) -> None:
        """Map the tokens of a stream from ``token`` on."""
        self._unmapped.add(seq_id)
        parts = self._parts[seq_id]
        for part, following in zip_longest(parts, parts[1:]):
            for rows in self.tensors:
                begin = rows.pages(max(part.start, token))
                end = rows.pages(following.start if following else OPEN)
                if begin >= end:
                    continue
                address = rows.address + seq_id * rows.stream_bytes + begin
                place = self._place(part.slab, rows) + begin
                try:
                    map_file(address, end - begin, self._file, place, huge_pages=self._huge_pages)
                except OSError as error:
                    raise failure(error) from None
        self._unmapped.discard(seq_id)

    def check_mapped(self, seq_id: int) -> None:
        """Raise EngineError if the addresses of a stream may not be mapped."""
        if seq_id in self._unmapped:
            raise EngineError(f"the memory of sequence id {seq_id} is not mapped")

    def _copy(self, source: Slab, target: Slab, start: int, end: int) -> None:
        """Copy the rows from ``start`` to ``end``, and those before ``start`` in the same page."""
        for rows in self.tensors:
            at, stop = rows.pages(start), end * rows.row_bytes
            while at < stop:
                size = min(COPIED_AT_ONCE, stop - at)
                data = os.pread(self._file, size, self._place(source, rows) + at)
                self._write(target, rows, at, memoryview(data))
                at += size

    def _write(self, slab: Slab, rows: Rows, at: int, data: memoryview) -> None:
        while len(data):
            count = os.pwrite(self._file, data, self._place(slab, rows) + at)
            at, data = at + count, data[count:]

    def read(self, key: int, rows: Rows, data: memoryview) -> None:
        """Fill ``data`` with the first bytes of a snapshot's rows."""
        parts, at = self._parts[-1 - key], 0
        for part, following in zip_longest(parts, parts[1:]):
            stop = rows.pages(following.start) if following else len(data)
            while at < stop:
                place = self._place(part.slab, rows) + at
                at += os.preadv(self._file, [data[at : min(stop, at + COPIED_AT_ONCE)]], place)

    def _place(self, slab: Slab, rows: Rows) -> int:
        return slab.index * self._slab_bytes + rows.offset

    def _free_pages(self, slab: Slab, keep: int) -> None:
        """Give the pages after the first ``keep`` tokens of a slab back to the system.

        If that fails, memory is wasted until it is used again.
        """
        slab.trimmed = min(slab.trimmed, keep)
        with suppress(OSError):
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
        ends: dict[int, dict[int, int]] = {slab.index: {} for slab in self._free}
        slabs = {slab.index: slab for slab in self._free}
        for holder, parts in self._parts.items():
            starts = [part.start for part in parts]
            assert starts == sorted(set(starts)), (holder, starts)
            assert (starts[0], len(starts) <= self._max_parts) == (0, True), (holder, starts)
            length = self._lengths.get(holder, OPEN)
            for part, end in zip(parts, [*starts[1:], length], strict=True):
                assert holder not in ends.setdefault(part.slab.index, {}), (holder, part.start)
                ends[part.slab.index][holder] = end
                slabs[part.slab.index] = part.slab
        assert self._parts.keys() == {*range(self._num_streams), *self._lengths}, "holders lost"
        assert {i: slab.ends for i, slab in slabs.items()} == ends, "stale holders"
        assert len(slabs) == self._num_slabs, "slabs lost"
        assert not any(slab.ends for slab in self._free), "free slabs have holders"
        for slab in slabs.values():
            assert list(slab.ends.values()).count(OPEN) <= 1, slab.ends


def cut(parts: list[Part], keep: int) -> list[Part]:
    """Return the parts that have any of the first ``keep`` tokens, at least the first part."""
    return [part for part in parts if part.start < keep] or parts[:1]


def first_difference(before: list[Part], after: list[Part]) -> int:
    """Return the first token that is in another slab than before; OPEN if there is none."""
    for pair in zip_longest(before, after):
        if pair[0] != pair[1]:
            return min(part.start for part in pair if part)
    return OPEN


def failure(error: OSError) -> EngineError:
    return EngineError(f"the system refuses memory for the KV cache: {error.strerror}")
