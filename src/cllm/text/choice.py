"""Convert the tokens of one sequence to text as they arrive."""

from __future__ import annotations

from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.vocabulary import Pieces
from cllm.text.alignment import Alignment, TokenLogprob
from cllm.text.detokenizer import Detokenizer
from cllm.text.stop_strings import StopStrings
from cllm.text.tools.parser import Channel, OutputPart, Parser

TOOL_CALLS = "tool_calls"


class Choice:
    """Detokenizes one choice of an answer, and ends it at a stop string.

    ``finish`` is "" until the choice ends, and then the reason. ``num_tokens`` counts the tokens
    fed. With a ``parser``, call ``parts`` instead of ``feed``; stop strings then apply to the text
    channel, not to reasoning and calls. If logprobs were requested, ``token_logprobs`` has the
    tokens of the text that the last call returned.
    """

    def __init__(
        self, index: int, pieces: Pieces, params: SamplingParams, parser: Parser | None = None
    ) -> None:
        """``pieces`` has the bytes of each token id."""
        self.index = index
        self.finish = ""
        self.num_tokens = 0
        self.parser = parser
        self.texts: list[str] | None = None  # of the tokens so far, if a list was set
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens if params.stop else 0
        self._alignment = None if params.logprobs is None else Alignment()
        self.token_logprobs: list[TokenLogprob] = []
        self._pending_logprobs: list[TokenLogprob] = []

    def feed(self, output: TokenOutput) -> tuple[str, str]:
        """Return the text that ``output`` adds, and ``finish``.

        Once ``finish`` is set, feed nothing more.
        """
        if output.token < 0:  # the sequence ended without a token
            self.finish = str(output.finish)
            return "", self.finish
        self.num_tokens += 1
        text = self._detokenizer.feed(output.token) if output.is_text else ""
        if output.finish:
            text += self._detokenizer.flush()
        if self.texts is not None:
            self.texts.append(text)
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
            self.token_logprobs = self._alignment.shown(
                text, is_all=bool(self.finish) and not stopped
            )
        return text, self.finish

    def begin_parsing(self, pieces: Pieces, parser: Parser) -> None:
        """Use ``parser`` from now on. ``pieces`` has the bytes of each token id, marks included. An
        incomplete character at the end of the text so far is dropped.
        """
        self.parser, self._detokenizer = parser, Detokenizer(pieces)
        parser.note_text("".join(self.texts or ()))
        if self._alignment is not None:
            self._pending_logprobs = self._alignment.shown("", is_all=True)

    def parts(self, output: TokenOutput) -> list[OutputPart]:
        """Return the parts that ``output`` adds or continues.

        Sets ``finish`` as ``feed`` does, or to "tool_calls" if the model called tools and then
        stopped.
        """
        assert self.parser
        if output.token < 0:
            self.finish = str(output.finish)
            return []
        self.num_tokens += 1
        text = self._detokenizer.feed(output.token) if output.is_text else ""
        is_control = output.token in self.parser.control_ids
        is_thought = is_control or self.parser.channel == Channel.REASONING
        parts = self.parser.feed(text, is_control=is_control)
        if output.finish:
            is_cut = output.finish == FinishReason.LENGTH
            parts += self.parser.flush(self._detokenizer.flush(), is_cut=is_cut)
            self.finish = str(output.finish)
        if self.parser.done:  # takes precedence over the length limit
            self.finish = FinishReason.STOP.value
        if self._stops:
            parts = self._cut_at_stop(parts)
        if output.logprobs is not None:
            if not is_thought:
                self._pending_logprobs.append(TokenLogprob(output.token, 0, output.logprobs))
            self._attach_logprobs(parts)
        if self.parser.num_calls and self.finish == FinishReason.STOP:
            self.finish = TOOL_CALLS
        return parts

    def _attach_logprobs(self, parts: list[OutputPart]) -> None:
        """Report pending tokens with the next text part.

        Tokens of reasoning, calls and marks are not reported.
        """
        self.token_logprobs = []
        for part in parts:
            if part.channel == Channel.TEXT and part.text:
                self.token_logprobs += self._pending_logprobs
            if part.channel != Channel.TEXT or part.text:
                self._pending_logprobs = []

    def _cut_at_stop(self, parts: list[OutputPart]) -> list[OutputPart]:
        """Return ``parts`` up to a stop string."""
        kept: list[OutputPart] = []
        for part in parts:
            if part.channel != Channel.TEXT:
                if held := self._stops.flush():
                    kept.append(OutputPart(Channel.TEXT, held))
                kept.append(part)
                continue
            text, stopped = part.text, False
            if self.num_tokens > self._min_tokens:
                text, stopped = self._stops.feed(part.text)
            kept.append(OutputPart(Channel.TEXT, text))
            if stopped:
                self.finish = FinishReason.STOP.value
                return kept
        if self.finish and (held := self._stops.flush()):
            kept.append(OutputPart(Channel.TEXT, held))
        return kept

    @property
    def stop(self) -> str:
        """The stop string that ended the choice, or ""."""
        return self._stops.matched
