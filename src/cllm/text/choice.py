"""The text of one sequence as it grows."""

from __future__ import annotations

from cllm.core.output import TokenOutput
from cllm.core.sequence import FinishReason
from cllm.text.chat import Channel, Part
from cllm.text.detokenizer import Detokenizer
from cllm.text.parser import Parser
from cllm.text.stop_strings import StopStrings

TOOL_CALLS = "tool_calls"


class Choice:
    """Detokenizes, and ends at a stop string.

    ``finish`` is "" while it goes on, then the reason; ``num_tokens`` have been fed. Who has a ``parser`` is read by
    ``parts`` and no longer by ``feed``; then stop strings are looked for in what the model says, not in what it thinks
    or calls.
    """

    def __init__(self, index: int, pieces: list[bytes], stops: tuple[str, ...], parser: Parser | None = None) -> None:
        """``pieces``: the bytes of each token id."""
        self.index = index
        self.finish = ""
        self.num_tokens = 0
        self.parser = parser
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

    def parts(self, output: TokenOutput) -> list[Part]:
        """The parts that ``output`` adds or continues; ``finish`` as in ``feed``, and tool_calls if there were any."""
        assert self.parser
        self.num_tokens += 1
        text = self._detokenizer.feed(output.token) if output.is_text else ""
        if output.finish:
            text += self._detokenizer.flush()
        parts = self.parser.feed(text)
        if output.finish:
            parts += self.parser.flush()
            self.finish = str(output.finish)
        elif self.parser.done:
            self.finish = FinishReason.STOP.value
        if self._stops:
            parts = self._stopped(parts)
        if self.parser.num_calls and self.finish == FinishReason.STOP:
            self.finish = TOOL_CALLS
        return parts

    def _stopped(self, parts: list[Part]) -> list[Part]:
        """``parts`` up to a stop string."""
        kept: list[Part] = []
        for part in parts:
            if part.channel != Channel.TEXT:
                if held := self._stops.flush():
                    kept.append(Part(Channel.TEXT, held))
                kept.append(part)
                continue
            text, stopped = self._stops.feed(part.text)
            kept.append(Part(Channel.TEXT, text))
            if stopped:
                self.finish = FinishReason.STOP.value
                return kept
        if self.finish and (held := self._stops.flush()):
            kept.append(Part(Channel.TEXT, held))
        return kept

    @property
    def stop(self) -> str:
        """The stop string that has ended it."""
        return self._stops.found
