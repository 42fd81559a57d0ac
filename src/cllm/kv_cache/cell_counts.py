"""Counts the cells in use when sequences share some of them.

A sequence's cells are a chain of extents, linked from the last extent to the first. A fork branches
off from any point of another chain. llama.cpp does the same with its cells; here they are counted,
not stored.
"""

from __future__ import annotations

from collections.abc import Iterator


class Extent:
    """A run of cells that belong to the same sequences.

    ``refs`` counts the chains that end here and the extents that follow it, ``leases`` the leased
    chains through it.
    """

    __slots__ = ("leases", "length", "parent", "refs")

    def __init__(self, length: int, parent: Extent | None, leases: int) -> None:
        self.length = length
        self.parent = parent
        self.refs = 1
        self.leases = leases


class Chain:
    """The ``length`` cells of one sequence, the last ones in ``leaf``.

    A running sequence's chain is leased.
    """

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


class CellCounts:
    """Counts the cells in use, each once, however many chains share it.

    ``num_held`` counts the cells of leased chains. The other cells in use are idle, because no
    running sequence uses them. ``num_leased`` counts a cell once for each leased chain.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_used = 0
        self.num_held = 0
        self.num_leased = 0

    @property
    def num_free(self) -> int:
        return self.size - self.num_used

    @property
    def num_idle(self) -> int:
        return self.num_used - self.num_held

    def grow(self, chain: Chain, count: int) -> None:
        """Add ``count`` cells at the end of a leased chain."""
        # the chain's own reference moves to the new leaf
        if chain.leaf is None or chain.leaf.refs > 1:
            chain.leaf = Extent(0, chain.leaf, leases=1)
        chain.leaf.length += count
        chain.length += count
        self.num_used += count
        self.num_held += count
        self.num_leased += count

    def fork(self, source: Chain, count: int) -> Chain:
        """Return a leased chain that shares the first ``count`` cells of ``source``.

        ``count`` is at least 1.
        """
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
        """Split an extent in two; returns the first part, which becomes the parent of the
        second.
        """
        upper = Extent(length, extent.parent, extent.leases)
        extent.length -= length
        extent.parent = upper
        return upper

    def lease(self, chain: Chain) -> None:
        chain.leased = True
        self.num_leased += chain.length
        for extent in chain.extents():
            self._lease(extent, 1)

    def unlease(self, chain: Chain) -> None:
        chain.leased = False
        self.num_leased -= chain.length
        for extent in chain.extents():
            self._lease(extent, -1)

    def _lease(self, extent: Extent, change: int) -> None:
        before = extent.leases > 0
        extent.leases += change
        self.num_held += extent.length * ((extent.leases > 0) - before)

    def cut(self, chain: Chain, keep: int) -> None:
        """Remove the cells of ``chain`` after the first ``keep``."""
        while chain.length > keep:
            extent = chain.leaf
            assert extent is not None
            surplus = min(extent.length, chain.length - keep)
            if surplus < extent.length:
                self._split(extent, extent.length - surplus)
            chain.leaf = extent.parent
            chain.length -= surplus
            if chain.leased:
                self.num_leased -= surplus
                self._lease(extent, -1)
            extent.refs -= 1
            if extent.refs == 0:
                self.num_used -= extent.length
            elif extent.parent is not None:  # now the chain ends at the parent
                extent.parent.refs += 1

    def count_private(self, chain: Chain) -> int:
        """Return the number of cells that become free when ``chain`` is removed."""
        count = 0
        for extent in chain.extents():
            if extent.refs > 1:
                break
            count += extent.length
        return count
