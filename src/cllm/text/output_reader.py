"""Turn the engine's outputs into deltas: text, reasoning, tool calls, logprobs and token counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from cllm.core.output import FAILURES, FinishReason, Logprobs, PrefillProgress, TokenOutput
from cllm.core.request import Request
from cllm.core.vocabulary import Pieces
from cllm.text.alignment import TokenLogprob
from cllm.text.chat_format import OutputPlan
from cllm.text.choice import Choice
from cllm.text.tools.parser import Channel


class Delta(msgspec.Struct, gc=False):
    """New text of one choice, in one channel. The deltas of a choice are in order.

    ``finish`` is "" while the choice continues; else it is stop, length or tool_calls, and no delta
    follows. ``stop`` is the stop string that ended it. ``channel`` says whether the text is the
    visible answer, reasoning, or the arguments of the ``call``-th tool call. The function's
    ``name`` comes with the first delta of its call; the texts of a call form one JSON object. If
    the request's params ask for logprobs, ``logprobs`` has the tokens that begin in this text. A
    delta with ``prefill`` only tells how far the prompt is.
    """

    index: int
    text: str
    num_tokens: int
    finish: str = ""
    stop: str = ""
    channel: Channel = Channel.TEXT
    call: int = 0
    name: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prefill: PrefillProgress | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request, complete when its deltas have ended.

    Reasoning tokens are completion tokens. ``num_guesses`` draft tokens were verified, of which
    ``num_accepted`` were right.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    num_guesses: int = 0
    num_accepted: int = 0


class Ended(msgspec.Struct, gc=False):
    """A choice that has finished. Unless ``is_known``, the engine must still be told to stop it."""

    request_id: str
    index: int
    finish: str
    is_known: bool


class OutputReader:
    """Reads the outputs of requests with the same params, which were submitted together.

    It knows no clock, engine or process. Choice ``i * n + j`` is the j-th continuation of the i-th
    request. ``usage`` counts tokens. If the params ask for prompt logprobs, ``prompt_logprobs`` has
    those of each prompt's tokens from the second one on. They are complete with the first delta of
    the prompt's first continuation. ``failure`` is None, or says why the engine gave up a choice;
    then nothing more is read.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        pieces: Pieces,
        plan: OutputPlan | None = None,
        usage: Usage | None = None,
    ) -> None:
        """``pieces`` has the bytes of each token id. ``plan`` says how to parse a message."""
        params = requests[0].params
        self._n = params.n
        self._plan = plan
        self._opener = plan.opener if plan else None
        at_once = plan if self._opener is None else None
        self._choices = {
            (request.request_id, j): Choice(
                i * params.n + j,
                at_once.pieces if at_once else pieces,
                params,
                at_once.parser() if at_once else None,
            )
            for i, request in enumerate(requests)
            for j in range(params.n)
        }
        if self._opener is not None:
            for choice in self._choices.values():
                choice.texts = []
        self._num_going = len(self._choices)
        self.usage = Usage() if usage is None else usage
        self.prompt_logprobs: list[list[Logprobs]] = [[] for _ in requests]
        self.failure: FinishReason | None = None

    @property
    def finished(self) -> bool:
        """Whether every choice has finished."""
        return not self._num_going

    def num_tokens(self, request_id: str) -> list[int]:
        """Return how many tokens of each choice of a request were read."""
        return [self._choices[request_id, j].num_tokens for j in range(self._n)]

    def list_unfinished(self) -> list[int]:
        """Return the choices that have not finished."""
        return [choice.index for choice in self._choices.values() if not choice.finish]

    def read(self, outputs: Iterable[TokenOutput]) -> tuple[list[Delta], list[Ended]]:
        """Return the deltas of ``outputs``, and the choices that have finished.

        There is one delta for each choice, or one for each part of a choice that is parsed.
        """
        usage = self.usage
        deltas: dict[int, Delta] = {}
        parsed: list[Delta] = []
        prefills: list[Delta] = []
        ended: list[Ended] = []
        for output in outputs:
            choice = self._choices[output.request_id, output.index]
            if choice.finish:  # sampled before the engine learned of the stop string
                continue
            if output.finish in FAILURES:
                self.failure = FinishReason(output.finish)
                break
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[choice.index // self._n] += output.prompt_logprobs
                continue
            if output.prefill is not None:
                prefills.append(Delta(choice.index, "", 0, prefill=output.prefill))
                continue
            count = int(output.token >= 0)
            usage.cached_tokens += output.num_cached_tokens
            usage.completion_tokens += count
            usage.num_guesses += output.num_guesses
            usage.num_accepted += output.num_accepted
            if output.token == self._opener and self._plan and not choice.parser:
                choice.begin_parsing(self._plan.pieces, self._plan.parser())
            if choice.parser:
                finish = self._parse(choice, output, parsed)
            else:
                text, finish = choice.feed(output)
                if (delta := deltas.get(choice.index)) is None:
                    delta = deltas[choice.index] = Delta(choice.index, text, count, finish)
                else:
                    delta.text += text
                    delta.num_tokens += count
                    delta.finish = finish
                if choice.token_logprobs:
                    delta.logprobs += tuple(choice.token_logprobs)
            if finish:
                self._num_going -= 1
                (parsed[-1] if choice.parser else deltas[choice.index]).stop = choice.stop
                ended.append(Ended(output.request_id, output.index, finish, bool(output.finish)))
        return [*prefills, *deltas.values(), *parsed], ended

    def _parse(self, choice: Choice, output: TokenOutput, deltas: list[Delta]) -> str:
        """Add to ``deltas`` what ``output`` adds to a choice with a parser.

        Returns the reason if it has finished.
        """
        assert choice.parser
        if choice.parser.channel == Channel.REASONING:
            self.usage.reasoning_tokens += 1
        last = deltas[-1] if deltas and deltas[-1].index == choice.index else None
        for part in choice.parts(output):
            if last and last.channel == part.channel and last.call == part.call and not part.name:
                last.text += part.text
            else:
                last = Delta(
                    choice.index, part.text, 0, channel=part.channel, call=part.call, name=part.name
                )
                deltas.append(last)
        if last is None:
            last = Delta(choice.index, "", 0)
            deltas.append(last)
        last.num_tokens += output.token >= 0
        last.finish = choice.finish
        if choice.token_logprobs:
            said = next(delta for delta in reversed(deltas) if delta.channel == Channel.TEXT)
            said.logprobs += tuple(choice.token_logprobs)
        return choice.finish
