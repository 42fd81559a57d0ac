"""Stop strings that may lie across tokens and chunks."""

from __future__ import annotations


class StopStrings:
    """Passes text on and ends before the first stop string, or behind it.

    Holds back the longest end of the text that could still become a stop string, never more. The cost of a piece
    depends on its length and on the stop strings, not on the text so far.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """``include``: the stop string that is found is shown."""
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self.found = ""  # the one that ended the text

    def __bool__(self) -> bool:
        """Whether there is something to look for."""
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found; after that, feed nothing more."""
        if not self._stops:
            return text, False
        text = self._held + text
        # the one that ends first, or the text would depend on how it was cut into pieces
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, at = min(found)
            self.found = text[at:end]
            self._held = ""
            return text[: min(found)[0 if self._include else 1]], True
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _num_held(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def flush(self) -> str:
        """What was held back and turned out to be text."""
        held, self._held = self._held, ""
        return held
