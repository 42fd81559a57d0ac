"""Counting cells: shared cells count once, and remain until their last chain is gone."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.kv_cache.cell_counts import CellCounts, Chain


def make_chain(cells: CellCounts, count: int) -> Chain:
    chain = Chain()
    cells.grow(chain, count)
    return chain


def count_cells(cells: CellCounts) -> tuple[int, int, int]:
    return cells.num_held, cells.num_idle, cells.num_free


def test_cells_are_held_or_idle_or_free():
    """The three numbers always add up to the size."""
    cells = CellCounts(100)
    chain = make_chain(cells, 30)
    assert count_cells(cells) == (30, 0, 70)
    cells.unlease(chain)
    assert count_cells(cells) == (0, 30, 70)
    cells.cut(chain, 10)
    assert count_cells(cells) == (0, 10, 90)
    cells.lease(chain)
    assert count_cells(cells) == (10, 0, 90)


def test_fork_takes_no_cells():
    """It shares them. Cells that either chain grows later are its own."""
    cells = CellCounts(100)
    source = make_chain(cells, 30)
    fork = cells.fork(source, 20)
    assert (fork.length, count_cells(cells)) == (20, (30, 0, 70))
    cells.grow(fork, 5)
    cells.grow(source, 5)
    assert count_cells(cells) == (40, 0, 60)
    assert (cells.count_private(source), cells.count_private(fork)) == (15, 5)


def test_fork_at_end_of_extent_splits_nothing():
    """A chain of many forks would otherwise collect empty extents."""
    cells = CellCounts(100)
    source = make_chain(cells, 30)
    for _ in range(3):
        cells.fork(source, 20)
    assert [extent.length for extent in source.extents()] == [10, 20]


def test_shared_cells_remain_until_last_chain_is_cut():
    """The source may be cut first."""
    cells = CellCounts(100)
    source = make_chain(cells, 30)
    fork = cells.fork(source, 20)
    cells.cut(source, 0)
    assert (fork.length, count_cells(cells)) == (20, (20, 0, 80))
    assert cells.count_private(fork) == 20
    cells.cut(fork, 0)
    assert count_cells(cells) == (0, 0, 100)


def test_shared_cells_are_held_while_one_chain_is_leased():
    """Evicting an idle chain does not free cells that a leased chain shares."""
    cells = CellCounts(100)
    source = make_chain(cells, 30)
    cells.unlease(source)
    fork = cells.fork(source, 20)
    assert count_cells(cells) == (20, 10, 70)
    assert cells.count_private(source) == 10
    cells.unlease(fork)
    assert count_cells(cells) == (0, 30, 70)


class CellsMachine(RuleBasedStateMachine):
    """Grows, forks, leases and cuts chains at random, and compares them with lists of cells, in
    which each cell is an object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells = CellCounts(10_000)
        self.chains: list[tuple[Chain, list[object]]] = []

    def draw(self, data: st.DataObject) -> tuple[Chain, list[object]]:
        return data.draw(st.sampled_from(self.chains))

    @rule()
    def begin(self) -> None:
        self.chains.append((Chain(), []))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), count=st.integers(0, 5))
    def grow(self, data: st.DataObject, count: int) -> None:
        chain, model = self.draw(data)
        if not chain.leased:
            self.cells.lease(chain)
        self.cells.grow(chain, count)
        model += [object() for _ in range(count)]

    @precondition(lambda self: any(model for _, model in self.chains))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, model = data.draw(st.sampled_from([pair for pair in self.chains if pair[1]]))
        count = data.draw(st.integers(1, len(model)))
        self.chains.append((self.cells.fork(source, count), model[:count]))

    @precondition(lambda self: self.chains)
    @rule(data=st.data(), keep=st.integers(0, 12))
    def cut(self, data: st.DataObject, keep: int) -> None:
        chain, model = self.draw(data)
        self.cells.cut(chain, keep)
        del model[keep:]

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def toggle_lease(self, data: st.DataObject) -> None:
        chain, _ = self.draw(data)
        (self.cells.unlease if chain.leased else self.cells.lease)(chain)

    @invariant()
    def agrees_with_model(self) -> None:
        assert self.cells.num_used == len({id(cell) for _, model in self.chains for cell in model})
        assert self.cells.num_held == len(
            {id(cell) for chain, model in self.chains if chain.leased for cell in model}
        )
        for chain, model in self.chains:
            assert chain.length == len(model) == sum(extent.length for extent in chain.extents())
            others = {
                id(cell) for other, cells in self.chains if other is not chain for cell in cells
            }
            assert self.cells.count_private(chain) == sum(id(cell) not in others for cell in model)


TestCells = CellsMachine.TestCase
