"""How many cells are in use when sequences share some of them.

A sequence's cells are a chain of extents from its last one up to the first; a fork begins in the middle of another's
chain. It is the same that llama.cpp does with its cells, counted instead of stored.
"""

from __future__ import annotations

from collections.abc import Iterator


class Extent:
    """A run of cells that always have the same sequences.

    ``refs``: chains that end here, and extents that begin behind it. ``leases``: leased chains that lead through it.
    """

    __slots__ = ("leases", "length", "parent", "refs")

    def __init__(self, length: int, parent: Extent | None, leases: int) -> None:
        self.length = length
        self.parent = parent
        self.refs = 1
        self.leases = leases


class Chain:
    """The cells of one sequence: ``length`` of them, the last ones in ``leaf``. A running sequence's are leased."""

    __slots__ = ("leaf", "leased", "length")

    def __init__(self) -> None:
        self.leaf: Extent | None = None
        self.length = 0
        self.leased = True

    def extents(self) -> Iterator[Extent]:
        extent = self.leaf
        while extent is not None:
            yield extent
            extent = extent.parent


class Cells:
    """Counts the cells in use, each once, however many share it.

    num_held: cells of leased chains. The others in use are idle: nobody computes with them at present.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_used = 0
        self.num_held = 0

    @property
    def num_free(self) -> int:
        return self.size - self.num_used

    @property
    def num_idle(self) -> int:
        return self.num_used - self.num_held

    def grow(self, chain: Chain, count: int) -> None:
        """``count`` more cells at the end of a leased chain."""
        if chain.leaf is None or chain.leaf.refs > 1:  # the chain's own reference goes over to the new leaf
            chain.leaf = Extent(0, chain.leaf, leases=1)
        chain.leaf.length += count
        chain.length += count
        self.num_used += count
        self.num_held += count

    def fork(self, source: Chain, count: int) -> Chain:
        """A leased chain that shares the first ``count`` cells of ``source``, at least one."""
        extent, end = source.leaf, source.length
        assert extent is not None
        while end - extent.length >= count:
            end -= extent.length
            assert extent.parent is not None
            extent = extent.parent
        if end > count:
            extent = self._split(extent, extent.length - (end - count))
        extent.refs += 1
        chain = Chain()
        chain.leaf, chain.length, chain.leased = extent, count, False
        self.lease(chain)
        return chain

    def _split(self, extent: Extent, length: int) -> Extent:
        """Cut an extent in two; returns the upper part, which the lower one refers to."""
        upper = Extent(length, extent.parent, extent.leases)
        extent.length -= length
        extent.parent = upper
        return upper

    def lease(self, chain: Chain) -> None:
        chain.leased = True
        for extent in chain.extents():
            self._lease(extent, 1)

    def unlease(self, chain: Chain) -> None:
        chain.leased = False
        for extent in chain.extents():
            self._lease(extent, -1)

    def _lease(self, extent: Extent, change: int) -> None:
        before = extent.leases > 0
        extent.leases += change
        self.num_held += extent.length * ((extent.leases > 0) - before)

    def cut(self, chain: Chain, keep: int) -> None:
        """Give up the cells of ``chain`` behind the first ``keep``."""
        while chain.length > keep:
            extent = chain.leaf
            assert extent is not None
            surplus = min(extent.length, chain.length - keep)
            if surplus < extent.length:
                self._split(extent, extent.length - surplus)
            chain.leaf = extent.parent
            chain.length -= surplus
            if chain.leased:
                self._lease(extent, -1)
            extent.refs -= 1
            if extent.refs == 0:
                self.num_used -= extent.length
            elif extent.parent is not None:  # the chain ends at the parent now, beside the extent
                extent.parent.refs += 1

    def num_private(self, chain: Chain) -> int:
        """Cells that are free once ``chain`` has gone."""
        count = 0
        for extent in chain.extents():
            if extent.refs > 1:
                break
            count += extent.length
        return count
