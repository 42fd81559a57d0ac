"""Layouts of the cells, and the choice of the best one for the present load."""

from __future__ import annotations

from typing import NamedTuple

# Reading a shared token's keys and values once instead of twice saves as much time as skipping this
# many masked cells costs. Measured: 8 to 10 on CPUs with AVX-512, about 1 on an older one; see
# docs/decisions/003-auto-layout.md.
SKIPPED_PER_SAVED = 3
MEMORY_BANDWIDTH = 10e9  # bytes per second at which keys and values are read, roughly
COPY_BANDWIDTH = 2e9  # bytes per second at which they are saved or loaded


class Layout(NamedTuple):
    """What a backend can do with its cells.

    shares: several sequences can share a cell, so copying a prefix is free (unified). dense: gaps
    between leased seq_ids cost extra passes (partitioned). trims: a sequence can free its last
    cells; otherwise (checkpoint) its recurrent state is kept or lost as a whole. num_spare_ids:
    extra seq_ids that keep idle prefixes but cannot compute.
    """

    shares: bool = False
    dense: bool = True
    trims: bool = True
    num_spare_ids: int = 0


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
        lost = self.seconds_lost + self._loss(sharing, num_steps, unified=unified)
        # the bounds forget what is long past
        self.seconds_lost = min(max(0.0, lost), 2 * self._change(sharing))

    def wants_change(
        self, sharing: Sharing, num_steps: float, *, unified: bool, decoding: bool
    ) -> bool:
        """Return whether to change the layout now, before ``num_steps`` expected steps with this
        sharing.

        ``decoding``: whether any sequence decodes. A change would stall it, and it would come back
        with cells that no other sequence shares. So the change to unified waits until no sequence
        decodes.
        """
        change = self._change(sharing)
        if self.seconds_lost + self._loss(sharing, num_steps, unified=unified) <= change:
            return False
        return not decoding or (unified and (self._max_stall is None or change <= self._max_stall))

    def _loss(self, sharing: Sharing, num_steps: float, *, unified: bool) -> float:
        """Return the seconds lost compared to the other layout; negative if this one is better."""
        saved = sharing.num_tokens - sharing.num_distinct
        used = sharing.num_distinct + (sharing.num_idle if unified else 0)
        skipped = (sharing.num_seqs - 1) * used
        gain = (saved - skipped / SKIPPED_PER_SAVED) * (-1 if unified else 1)  # in tokens
        return gain * self._bytes_per_token / MEMORY_BANDWIDTH * num_steps

    def _change(self, sharing: Sharing) -> float:
        # running ones are saved and loaded, idle ones saved
        num_copied = 2 * sharing.num_tokens + sharing.num_idle
        return self._layout_seconds + num_copied * self._bytes_per_token / COPY_BANDWIDTH
