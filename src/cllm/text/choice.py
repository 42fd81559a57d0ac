"""The text of one sequence as it grows."""

from __future__ import annotations

from cllm.core.output import TokenOutput
from cllm.core.sequence import FinishReason
from cllm.text.detokenizer import Detokenizer
from cllm.text.stop_strings import StopStrings


class Choice:
    """Detokenizes, and ends at a stop string.

    ``finish`` is "" while it goes on, then the reason; ``num_tokens`` have been fed.
    """

    def __init__(self, index: int, pieces: list[bytes], stops: tuple[str, ...]) -> None:
        """``pieces``: the bytes of each token id."""
        self.index = index
        self.finish = ""
        self.num_tokens = 0
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(stops)

    def feed(self, output: TokenOutput) -> tuple[str, str]:
        """The text that ``output`` adds, and ``finish``; once that is set, feed nothing more."""
        self.num_tokens += 1
        text = self._detokenizer.feed(output.token) if output.is_text else ""
        if output.finish:
            text += self._detokenizer.flush()
        text, stopped = self._stops.feed(text)
        if stopped:
            self.finish = FinishReason.STOP.value
        elif output.finish:
            text += self._stops.flush()
            self.finish = str(output.finish)
        return text, self.finish
