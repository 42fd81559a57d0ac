"""In any order of events, each sequence reads what was written for it, and a cell is used once for
all that share it.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cllm.errors import EngineError

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

NUM_CELLS, NUM_IDS = 14, 4
LAYERS, HEADS, SIZE = 2, 2, 1
IDS = st.integers(0, NUM_IDS - 1)
COUNTS = st.integers(0, NUM_CELLS + 1)


class Token(NamedTuple):
    """What a cell should hold. Tokens are equal if they are in the same cell."""

    cell: int
    value: float


class CellsMachine(RuleBasedStateMachine):
    """Does at random what a backend may do with its cells, and the same with lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        from cllm.backends.torch.cells import Cells

        cpu = torch.device("cpu")
        self.cells = Cells((LAYERS, HEADS, SIZE), NUM_CELLS, NUM_IDS, torch.float32, cpu)
        self.texts: list[list[Token]] = [[] for _ in range(NUM_IDS)]
        self.saved: list[tuple[list[Token], Any]] = []  # with its bytes
        self.fresh = itertools.count(1)

    @property
    def num_free(self) -> int:
        return NUM_CELLS - len(set(itertools.chain(*self.texts)))

    @rule(seq_id=IDS, count=st.integers(1, NUM_CELLS + 1))
    def grow(self, seq_id: int, count: int) -> None:
        if count > self.num_free:
            with pytest.raises(EngineError, match="cells are needed"):
                self.cells.grow(seq_id, count)
            return
        added = self.cells.grow(seq_id, count)
        assert sum(run.size for run in added) == count
        for cell in itertools.chain(*(range(run.begin, sum(run)) for run in added)):
            token = Token(next(self.fresh), next(self.fresh))
            self.cells.keys[:, :, cell], self.cells.values[:, :, cell] = token.value, -token.value
            self.texts[seq_id].append(token)

    @rule(seq_id=IDS, keep=st.integers(-1, NUM_CELLS))
    def trim(self, seq_id: int, keep: int) -> None:
        """What is not there needs no trimming."""
        self.cells.trim(seq_id, keep)
        if keep >= 0:
            del self.texts[seq_id][keep:]

    @rule(source=IDS, to=IDS, count=COUNTS)
    def copy(self, source: int, to: int, count: int) -> None:
        if source == to or count > len(self.texts[source]):
            with pytest.raises(EngineError, match="cannot be copied"):
                self.cells.copy(source, to, count)
            return
        self.cells.copy(source, to, count)
        self.texts[to] = self.texts[source][:count]

    @rule(seq_id=IDS)
    def read(self, seq_id: int) -> None:
        state = self.cells.read(seq_id)
        assert len(state) == len(self.texts[seq_id]) * self.cells.token_bytes
        self.saved.append((list(self.texts[seq_id]), state))

    @rule(seq_id=IDS, which=st.integers(0, 20), part=st.floats(0, 1))
    def write(self, seq_id: int, which: int, part: float) -> None:
        """All of the state needs room, also if only a part is kept. What the sequence had is gone
        in any case.
        """
        if not self.saved:
            return
        text, state = self.saved[which % len(self.saved)]
        count = round(part * len(text))
        self.texts[seq_id] = []
        if len(text) > self.num_free:
            with pytest.raises(EngineError, match="cells are needed"):
                self.cells.write(seq_id, state, len(text), count)
            return
        self.cells.write(seq_id, state, len(text), count)
        self.texts[seq_id] = [Token(next(self.fresh), token.value) for token in text[:count]]

    @rule(nobody=st.sampled_from([-1, NUM_IDS]))
    def use_unknown_id(self, nobody: int) -> None:
        for call in (
            lambda: self.cells.length(nobody),
            lambda: self.cells.trim(nobody, 0),
            lambda: self.cells.copy(nobody, 0, 0),
            lambda: self.cells.copy(0, nobody, 0),
        ):
            with pytest.raises(EngineError, match="is not below"):
                call()

    @invariant()
    def agrees(self) -> None:
        self.cells.check()
        assert self.cells.num_free == self.num_free
        for seq_id, text in enumerate(self.texts):
            assert self.cells.length(seq_id) == len(text)
            for first, end in ((0, len(text)), (len(text) // 3, len(text) - len(text) // 4)):
                runs = self.cells.runs(seq_id, first, end)
                held = [cell for run in runs for cell in range(run.begin, sum(run))]
                values = [token.value for token in text[first:end]]
                for each, sign in ((self.cells.keys, 1), (self.cells.values, -1)):
                    expected = torch.tensor(values).mul(sign).view(1, 1, -1, 1)
                    assert torch.equal(
                        each[:, :, held], expected.expand(LAYERS, HEADS, len(values), SIZE)
                    )


TestCells = CellsMachine.TestCase
