"""The prefixes of recent requests, which a replica tells the other fronts in its lease, so that a
conversation finds its cached tokens through any front.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from cllm.core.carried import Carried

MAX_REQUESTS = 1024  # that are remembered


class RecentPrefixes:
    """The names of the prefixes of the last requests that fronts have sent.

    ``num_noted`` counts all that have ever been noted.
    """

    def __init__(self) -> None:
        self.num_noted = 0
        self._noted: deque[tuple[str, list[int]]] = deque(maxlen=MAX_REQUESTS)

    def note(self, carried: Carried) -> None:
        if carried.prefixes:
            self.num_noted += 1
            self._noted.append((carried.front, carried.prefixes))

    def list_others(self, front: str, after: int) -> list[list[int]]:
        """Return those of other fronts than ``front`` that were noted after the first ``after``."""
        begin = max(0, len(self._noted) - max(0, self.num_noted - after))
        return [names for sender, names in islice(self._noted, begin, None) if sender != front]
