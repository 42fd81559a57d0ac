"""Layouts of the cells: how sequences share them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cllm.core.model_info import ModelInfo
from cllm.kv_cache.cell_counts import CellCounts, Chain
from cllm.kv_cache.model_state import ModelState, Recurrent, Trimmable
from cllm.kv_cache.seq_id_pool import SeqIdPool

COPIED_PER_COMPUTED = 32  # tokens that are copied between seq_ids in the time of computing one


class Layout(ABC):
    """How the seq_ids use the cells.

    If it ``separates``, prompts and decoding sequences are computed in separate calls, so that a
    step with both saves nothing. If it ``can_swap``, two seq_ids can exchange their cells at no
    cost. Prompts of up to ``undivided`` tokens are computed in one step, because each part of a
    prompt costs a pass.

    ``state`` says which tokens of a seq_id can be reused. ``num_spare_ids`` extra seq_ids keep idle
    prefixes but cannot compute.
    """

    separates = False
    can_swap = False
    undivided = 0

    def __init__(self, state: ModelState | None = None, num_spare_ids: int = 0) -> None:
        self.state = Trimmable() if state is None else state
        self.num_spare_ids = num_spare_ids

    @abstractmethod
    def estimate_copy_cost(self, num_tokens: int) -> int:
        """Return the cost of copying a prefix, in tokens that could be computed in that time."""

    @abstractmethod
    def count_copied_cells(self, num_tokens: int) -> int:
        """Return how many cells a copy of ``num_tokens`` tokens takes."""

    @abstractmethod
    def count_loaded_cells(self, length: int, num_tokens: int) -> int:
        """Return how many free cells are needed to load ``num_tokens`` tokens of a snapshot of
        ``length`` tokens.
        """

    @abstractmethod
    def copy(self, cells: CellCounts, source: Chain, num_tokens: int) -> Chain:
        """Return a leased chain for a copy of the first ``num_tokens`` tokens, at least one."""

    @abstractmethod
    def count_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        """Return how many neighbours of a free seq_id are leased, so that one pass can compute them
        together.
        """


class Partitioned(Layout):
    """Each seq_id has cells of its own. Gaps between leased seq_ids cost extra passes."""

    def estimate_copy_cost(self, num_tokens: int) -> int:
        return num_tokens // COPIED_PER_COMPUTED

    def count_copied_cells(self, num_tokens: int) -> int:
        return num_tokens

    def count_loaded_cells(self, length: int, num_tokens: int) -> int:
        return length  # the snapshot is loaded as a whole, then trimmed

    def copy(self, cells: CellCounts, source: Chain, num_tokens: int) -> Chain:
        chain = Chain()
        cells.grow(chain, num_tokens)
        return chain

    def count_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        return seq_ids.is_leased(seq_id - 1) + seq_ids.is_leased(seq_id + 1)


class Unified(Layout):
    """All seq_ids use one pool and can share cells, so a copy is free."""

    def estimate_copy_cost(self, num_tokens: int) -> int:
        return 0

    def count_copied_cells(self, num_tokens: int) -> int:
        return 0

    def count_loaded_cells(self, length: int, num_tokens: int) -> int:
        return length

    def copy(self, cells: CellCounts, source: Chain, num_tokens: int) -> Chain:
        return cells.fork(source, num_tokens)

    def count_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        return 0


class Paged(Unified):
    """Each seq_id has a stream whose memory is taken page by page. Streams can share and exchange
    pages. Gaps between the seq_ids of a step's sequences cost extra passes.
    """

    separates = True
    can_swap = True
    undivided = 128

    def count_loaded_cells(self, length: int, num_tokens: int) -> int:
        return num_tokens


# by ModelInfo.layout
LAYOUTS: dict[str, type[Partitioned | Unified]] = {
    "paged": Paged,
    "partitioned": Partitioned,
    "unified": Unified,
}


def make_layout(info: ModelInfo) -> Layout:
    state = Recurrent() if info.needs_checkpoints else Trimmable()
    return LAYOUTS[info.layout](state, info.num_spare_ids)
