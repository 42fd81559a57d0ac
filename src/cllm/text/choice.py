"""The text of one sequence as it grows."""

from __future__ import annotations

from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.sequence import FinishReason
from cllm.text.alignment import Alignment, ToldToken
from cllm.text.detokenizer import Detokenizer
from cllm.text.stop_strings import StopStrings


class Choice:
    """Detokenizes, and ends at a stop string.

    ``finish`` is "" while it goes on, then the reason; ``num_tokens`` have been fed. ``told``: the tokens of the text
    that the last call of ``feed`` gave, if logprobs were asked for.
    """

    def __init__(self, index: int, pieces: list[bytes], params: SamplingParams) -> None:
        """``pieces``: the bytes of each token id."""
        self.index = index
        self.finish = ""
        self.num_tokens = 0
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens if params.stop else 0
        self._alignment = None if params.logprobs is None else Alignment()
        self.told: list[ToldToken] = []

    def feed(self, output: TokenOutput) -> tuple[str, str]:
        """The text that ``output`` adds, and ``finish``; once that is set, feed nothing more."""
        if output.token < 0:  # it ended without a token
            self.finish = str(output.finish)
            return "", self.finish
        self.num_tokens += 1
        text = self._detokenizer.feed(output.token) if output.is_text else ""
        if output.finish:
            text += self._detokenizer.flush()
        if self._alignment is not None:
            self._alignment.add(output.token, text, output.logprobs if output.is_text else None)
        stopped = False
        if self.num_tokens > self._min_tokens:
            text, stopped = self._stops.feed(text)
        if stopped:
            self.finish = FinishReason.STOP.value
        elif output.finish:
            text += self._stops.flush()
            self.finish = str(output.finish)
        if self._alignment is not None:
            self.told = self._alignment.shown(text, is_all=bool(self.finish) and not stopped)
        return text, self.finish
