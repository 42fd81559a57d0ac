"""Stop strings that may be split across tokens and chunks."""

from __future__ import annotations


class StopStrings:
    """Passes text on up to the first stop string, which is either cut off or included.

    Holds back only the longest end of the text that could still become a stop string. The cost of a
    piece depends on its length and on the stop strings, not on the text so far.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        """If ``include``, the stop string itself is shown too."""
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self.matched = ""  # the stop string that ended the text

    def __bool__(self) -> bool:
        """Whether there are any stop strings."""
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string was found.

        If so, feed nothing more.
        """
        if not self._stops:
            return text, False
        text = self._held + text
        # take the stop string that ends first; otherwise the result would depend on how the text is
        # cut into pieces
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at = min(ends)
            self.matched = text[at:end]
            self._held = ""
            return text[: min(ends)[0 if self._include else 1]], True
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
        """Return the text still held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held
