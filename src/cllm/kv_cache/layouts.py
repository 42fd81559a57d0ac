"""Layouts of the cells: how sequences share them, and which layout suits the current load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from cllm.kv_cache.cells import Cells, Chain
from cllm.kv_cache.model_state import ModelState, Trimmable
from cllm.kv_cache.seq_id_pool import SeqIdPool

# Reading a shared token's keys and values once instead of twice saves as much time as skipping this
# many masked cells costs. Measured: 8 to 10 on CPUs with AVX-512, about 1 on an older one; see
# docs/decisions/003-auto-layout.md.
SKIPPED_PER_SAVED = 3
MEMORY_BANDWIDTH = 10e9  # bytes per second at which keys and values are read, roughly
COPY_BANDWIDTH = 2e9  # bytes per second at which they are saved or loaded


COPIED_PER_COMPUTED = 32  # tokens that are copied between seq_ids in the time of computing one


class Layout(ABC):
    """How the seq_ids use the cells.

    ``state``: which tokens of a seq_id can be reused. ``num_spare_ids``: extra seq_ids that keep
    idle prefixes but cannot compute.
    """

    def __init__(self, state: ModelState | None = None, num_spare_ids: int = 0) -> None:
        self.state = Trimmable() if state is None else state
        self.num_spare_ids = num_spare_ids

    @abstractmethod
    def copy_cost(self, num_tokens: int) -> int:
        """Return the cost of copying a prefix, in tokens that could be computed in that time."""

    @abstractmethod
    def num_copied_cells(self, num_tokens: int) -> int:
        """Return how many cells a copy of ``num_tokens`` tokens takes."""

    @abstractmethod
    def copy(self, cells: Cells, source: Chain, num_tokens: int) -> Chain:
        """Return a leased chain for a copy of the first ``num_tokens`` tokens, at least one."""

    @abstractmethod
    def num_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        """Return how many neighbours of a free seq_id are leased, so that one pass can compute them
        together.
        """

    @abstractmethod
    def tile_offset(self, num_decoding: int, tile: int) -> int:
        """Return the position in a tile at which the step's prompt tokens begin; -1 if the first of
        them is computed with the decoding rows.
        """


class Partitioned(Layout):
    """Each seq_id has cells of its own. Gaps between leased seq_ids cost extra passes."""

    def copy_cost(self, num_tokens: int) -> int:
        return num_tokens // COPIED_PER_COMPUTED

    def num_copied_cells(self, num_tokens: int) -> int:
        return num_tokens

    def copy(self, cells: Cells, source: Chain, num_tokens: int) -> Chain:
        chain = Chain()
        cells.grow(chain, num_tokens)
        return chain

    def num_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        return seq_ids.is_leased(seq_id - 1) + seq_ids.is_leased(seq_id + 1)

    def tile_offset(self, num_decoding: int, tile: int) -> int:
        # a prompt's first token is computed with the decoding rows, the others separately
        return -1


class Unified(Layout):
    """All seq_ids use one pool and can share cells, so a copy is free."""

    def copy_cost(self, num_tokens: int) -> int:
        return 0

    def num_copied_cells(self, num_tokens: int) -> int:
        return 0

    def copy(self, cells: Cells, source: Chain, num_tokens: int) -> Chain:
        return cells.fork(source, num_tokens)

    def num_neighbours(self, seq_ids: SeqIdPool, seq_id: int) -> int:
        return 0

    def tile_offset(self, num_decoding: int, tile: int) -> int:
        return num_decoding % tile  # prompts continue the tiles of the decoding rows


# by ModelInfo.layout
LAYOUTS: dict[str, type[Partitioned | Unified]] = {
    "partitioned": Partitioned,
    "unified": Unified,
}


class Sharing(NamedTuple):
    """The number of running sequences, their tokens, the distinct ones among these, and the number
    of idle tokens.
    """

    num_seqs: int
    num_tokens: int
    num_distinct: int
    num_idle: int


class LayoutChooser:
    """Decides when to change between unified and partitioned.

    In the unified layout a shared token is read once for all sequences, but every sequence skips
    the cells of all others. The chooser adds up the time lost in the present layout and changes it
    when the loss reaches the cost of a change. So the total loss is at most twice that of an
    optimal chooser that knows the future (the ski rental rule, Karlin et al. 1988). A change that
    would stall decoding sequences for too long waits until none decodes.
    """

    def __init__(
        self, layout_seconds: float, bytes_per_token: int, max_stall: float | None
    ) -> None:
        """``layout_seconds``: time to change the layout of empty cells. ``max_stall``: seconds for
        which decoding sequences may be stalled; None means without limit.
        """
        self._bytes_per_token = bytes_per_token
        self._max_stall = max_stall
        self._layout_seconds = layout_seconds
        self.seconds_lost = 0.0

    def observe(self, sharing: Sharing, num_steps: int, *, unified: bool) -> None:
        """Add the time lost in ``num_steps`` steps with this sharing."""
        lost = self.seconds_lost + self._estimate_loss(sharing, num_steps, unified=unified)
        # the limits let old losses and gains fade
        self.seconds_lost = min(max(0.0, lost), 2 * self._estimate_change(sharing))

    def should_change(
        self, sharing: Sharing, num_steps: float, *, unified: bool, decoding: bool
    ) -> bool:
        """Return whether to change the layout now, before ``num_steps`` expected steps with this
        sharing.

        ``decoding``: whether any sequence decodes. A change would stall it, and it would come back
        with cells that no other sequence shares. So the change to unified waits until no sequence
        decodes.
        """
        change = self._estimate_change(sharing)
        if self.seconds_lost + self._estimate_loss(sharing, num_steps, unified=unified) <= change:
            return False
        return not decoding or (unified and (self._max_stall is None or change <= self._max_stall))

    def _estimate_loss(self, sharing: Sharing, num_steps: float, *, unified: bool) -> float:
        """Return the seconds lost compared to the other layout; negative if this one is better."""
        saved = sharing.num_tokens - sharing.num_distinct
        used = sharing.num_distinct + (sharing.num_idle if unified else 0)
        skipped = (sharing.num_seqs - 1) * used
        lost_tokens = (saved - skipped / SKIPPED_PER_SAVED) * (-1 if unified else 1)  # in tokens
        return lost_tokens * self._bytes_per_token / MEMORY_BANDWIDTH * num_steps

    def _estimate_change(self, sharing: Sharing) -> float:
        # cells of running sequences are saved and loaded, idle ones saved
        num_copied = 2 * sharing.num_tokens + sharing.num_idle
        return self._layout_seconds + num_copied * self._bytes_per_token / COPY_BANDWIDTH
