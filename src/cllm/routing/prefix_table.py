"""The table of prefixes: which replicas got which prefixes of prompts."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence

MAX_CLOSED = 256  # marks in the table that no block gets any longer
MAX_READINGS = 10_000  # sets of marks whose replicas are remembered


class PrefixTable:
    """At most ``max_blocks`` prefixes, each named by its last block, with the replicas that got it.

    Each prefix has marks. A mark means the replica that gives it to its prefixes, until that
    replica ends or has an heir; then the mark is closed, which means the heir too, or nothing. So a
    replica ends without a visit to a million prefixes.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        # Block -> bits of its marks, least recently used first. An entry with the value ~mark comes
        # after all blocks that may still have this mark, which is closed.
        self._table: OrderedDict[object, int] = OrderedDict()
        self._meanings: list[int] = []  # bits of the numbers of replicas, by mark
        self._known: defaultdict[int, int] = defaultdict(int)  # number -> bits of its marks
        self._marks: dict[int, int] = {}  # number -> the mark that its prefixes get
        self._closed = 0  # bits of marks
        self._free: list[int] = []  # marks that no block has
        self._readings: dict[int, int] = {}  # bits of marks -> bits of the replicas that they mean

    def __len__(self) -> int:
        """Return the number of prefixes."""
        return len(self._table) - self._closed.bit_count()

    def list_holders(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the bits of the replicas that have the longest known prefix of a prompt, and the
        index of its last block; then of those that have only shorter ones, longest first.
        """
        seen, last = 0, 0
        for at in range(len(blocks) - 1, -1, -1):
            marks = self._table.get(blocks[at], 0)
            if marks == last:
                continue
            last = marks
            if bits := self._read_marks(marks) & ~seen:
                seen |= bits
                yield bits, at

    def add(self, blocks: Sequence[int], number: int) -> int:
        """Record that a replica gets ``blocks``. Return how many of the first ones it had.

        The last block becomes the oldest of them, because the first ones are those of more prompts.
        """
        if not blocks:
            return 0
        table, known = self._table, self._known[number]
        num_known = len(blocks)
        while num_known and not table.get(blocks[num_known - 1], 0) & known:
            num_known -= 1
        bit = 1 << self._find_mark(number)
        for block in reversed(blocks):
            marks = table.pop(block, 0)
            if marks & self._closed:
                marks = self._renew_marks(marks)
            table[block] = marks | bit
        while len(table) > self.max_blocks:
            self._drop_oldest()
        if self._closed.bit_count() > MAX_CLOSED:
            for _ in range(min(8 * len(blocks), len(table) - len(blocks))):
                self._drop_oldest()
        return num_known

    def forget(self, number: int) -> None:
        """Forget which prefixes a replica got."""
        for mark in list_bits(self._known.pop(number, 0)):
            self._meanings[mark] &= ~(1 << number)
        self._close_mark(number)

    def inherit(self, number: int, heir: int) -> None:
        """Record that the replica ``heir`` gets all prefixes of the replica ``number``, too."""
        marks = self._known[number]
        for mark in list_bits(marks):
            self._meanings[mark] |= 1 << heir
        self._known[heir] |= marks
        self._close_mark(number)  # what it gets from now on is its own

    def _drop_oldest(self) -> None:
        _, marks = self._table.popitem(last=False)
        if marks < 0:  # no block has the mark ~marks any longer
            self._closed &= ~(1 << ~marks)
            for number in list_bits(self._meanings[~marks]):
                self._known[number] &= ~(1 << ~marks)
            self._free.append(~marks)

    def _find_mark(self, number: int) -> int:
        """Return the mark that the prefixes of a replica get."""
        mark = self._marks.get(number)
        if mark is None:
            if not self._free:
                self._free.append(len(self._meanings))
                self._meanings.append(0)
            mark = self._marks[number] = self._free.pop()
            self._meanings[mark] = 1 << number
            self._known[number] |= 1 << mark
            self._readings.clear()
        return mark

    def _close_mark(self, number: int) -> None:
        """Give no further prefix the mark of a replica."""
        mark = self._marks.pop(number, None)
        if mark is not None:
            self._closed |= 1 << mark
            self._table[object()] = ~mark
        self._readings.clear()

    def _renew_marks(self, marks: int) -> int:
        """Return marks that mean the same replicas and are not closed."""
        numbers = list_bits(self._read_marks(marks))
        return sum(1 << self._find_mark(number) for number in numbers)

    def _read_marks(self, marks: int) -> int:
        """Return the bits of the replicas that ``marks`` mean."""
        numbers = self._readings.get(marks)
        if numbers is None:
            numbers = 0
            for mark in list_bits(marks):
                numbers |= self._meanings[mark]
            if len(self._readings) >= MAX_READINGS:
                self._readings.clear()
            self._readings[marks] = numbers
        return numbers


def list_bits(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are 1, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def name_prefixes(salt: bytes, parts: Iterable[bytes], size: int, most: int = 256) -> list[int]:
    """Return names for the prefixes of a prompt, at most ``most``, shortest first.

    Prefixes end after every ``size`` bytes of a part and at its end. A part is all tokens as 32-bit
    numbers, or one message of a conversation. Prompts have a name in common only if they are equal
    up to there and have equal salts.
    """
    names: list[int] = []
    name = hashlib.blake2b(salt, digest_size=8).digest()
    for part in parts:
        for start in range(0, len(part), size):
            if len(names) == most:
                return names
            name = hashlib.blake2b(name + part[start : start + size], digest_size=8).digest()
            names.append(int.from_bytes(name))
    return names


def choose_landmarks(blocks: Sequence[int]) -> list[int]:
    """Return the few of a prompt's prefixes that fronts tell each other: the longest one, and those
    of 1, 2, 4, 8 ... blocks. A longer prompt is known by the longest of them that it begins with.
    """
    ends = {len(blocks)} | {1 << bit for bit in range(len(blocks).bit_length())}
    return [blocks[end - 1] for end in sorted(ends) if end]
