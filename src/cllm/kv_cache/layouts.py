"""How cells are laid out, and which layout suits what is running now."""

from __future__ import annotations

from typing import NamedTuple

# Reading a shared token's keys and values once instead of twice saves what skipping so many masked cells costs. That
# is 8 to 10 on CPUs with AVX-512 and about 1 on an older one: see docs/decisions/003-auto-layout.md.
SKIPPED_PER_SAVED = 3
MEMORY_BANDWIDTH = 10e9  # bytes a second at which keys and values are read, roughly
COPY_BANDWIDTH = 2e9  # and saved or loaded


class Layout(NamedTuple):
    """What a backend can do with its cells.

    shares: sequences may own a cell together, so that a copy costs nothing (unified). dense: holes between leased
    seq_ids cost passes (partitioned). trims: a sequence can give up its last cells; recurrent state is kept or lost as
    a whole (checkpoint). num_spare_ids: further seq_ids, at which idle prefixes can stay but nothing is computed.
    """

    shares: bool = False
    dense: bool = True
    trims: bool = True
    num_spare_ids: int = 0


class Sharing(NamedTuple):
    """What the running sequences hold: how many they are, their tokens, how many of these are distinct; idle ones."""

    num_seqs: int
    num_tokens: int
    num_distinct: int
    num_idle: int


class LayoutChooser:
    """Decides when to change between unified and partitioned.

    In the unified layout a shared token is read once for all, but every sequence skips the cells of all the others.
    The time lost in the present layout is added up, and when it has reached what a change costs, the change is made:
    so, whatever comes, at most twice as much is lost as by one who knows the future (the ski rental rule, Karlin et
    al. 1988). But a change that would keep who decodes waiting for too long is put off until nobody does.
    """

    def __init__(self, layout_seconds: float, bytes_per_token: int, max_stall: float | None) -> None:
        """``layout_seconds``: what it takes to lay out empty cells. ``max_stall``: seconds that one who decodes may be
        kept waiting; None is without limit.
        """
        self._bytes_per_token = bytes_per_token
        self._max_stall = max_stall
        self._layout_seconds = layout_seconds
        self.seconds_lost = 0.0

    def observe(self, sharing: Sharing, num_steps: int, *, unified: bool) -> None:
        """So many steps were made with sequences that share so much."""
        lost = self.seconds_lost + self._loss(sharing, num_steps, unified=unified)
        self.seconds_lost = min(max(0.0, lost), 2 * self._change(sharing))  # what is long past is forgotten

    def wants_change(self, sharing: Sharing, num_steps: float, *, unified: bool, decoding: bool) -> bool:
        """True if the layout is to be changed now, before so many steps with such sequences, known to be coming.

        ``decoding``: somebody would be kept waiting, and each who decodes would come back with cells of his own; so a
        pool is made only while nobody does.
        """
        change = self._change(sharing)
        if self.seconds_lost + self._loss(sharing, num_steps, unified=unified) <= change:
            return False
        return not decoding or (unified and (self._max_stall is None or change <= self._max_stall))

    def _loss(self, sharing: Sharing, num_steps: float, *, unified: bool) -> float:
        """Seconds that steps take longer than in the other layout; less than 0 if this one is better."""
        saved = sharing.num_tokens - sharing.num_distinct
        used = sharing.num_distinct + (sharing.num_idle if unified else 0)
        skipped = (sharing.num_seqs - 1) * used
        gain = (saved - skipped / SKIPPED_PER_SAVED) * (-1 if unified else 1)  # in tokens
        return gain * self._bytes_per_token / MEMORY_BANDWIDTH * num_steps

    def _change(self, sharing: Sharing) -> float:
        num_copied = 2 * sharing.num_tokens + sharing.num_idle  # saved and loaded; saved
        return self._layout_seconds + num_copied * self._bytes_per_token / COPY_BANDWIDTH
