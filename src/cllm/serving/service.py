"""Takes a neutral request and returns a stream of neutral deltas.

Dialects translate to and from this interface.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from cllm.config.settings import Sampling
from cllm.core.model_info import ModelInfo
from cllm.core.params import SamplingParams
from cllm.core.request import check_generates, check_prompt
from cllm.core.segments import Segment, TokenizedChat, join_parts
from cllm.core.vocabulary import VocabularyTable
from cllm.errors import BadRequest, EngineError, PromptTooLong, RateLimited
from cllm.observe.trace_file import Recorder
from cllm.process.backlog import QueueFull
from cllm.serving.adapter_use import NO_ADAPTERS, AdapterUse
from cllm.serving.answer import (
    Answer,
    Generation,
    SchedulingOptions,
    list_limits,
    make_request,
    took_too_long,
)
from cllm.serving.delivered import digest_inputs
from cllm.serving.model_texts import ModelTexts, is_loading
from cllm.store.charges import Charge
from cllm.store.usage import EXPECTED_OUTPUT, UsageLedger
from cllm.text.chat import Chat
from cllm.text.chat_format import THINKING
from cllm.text.grammar import FREE, CheckedGrammar, Constraint
from cllm.text.output_reader import OutputReader
from cllm.text.templates.fences import CUT, OPEN

# characters; the queue is checked before a text of this length or more is tokenized
LONG_TEXT = 16_384
# messages; the queue is checked before a chat of this length or more is rendered
MANY_MESSAGES = 100
# messages and calls; a chat of this length or more is processed in another thread
MANY_TURNS = 1000
MAX_FENCES = 20_000  # in a text that is only counted; each one costs time
MANY_FENCES = 1000  # a text with as many fenced parts or more is split in another thread
# of all prompts of one request together; a longer context raises this limit
MAX_PROMPT_TOKENS = 1_000_000
MAX_CHOICES = 1024  # prompts times n of one request

log = logging.getLogger("cllm.service")


@dataclass(eq=False)
class Service:
    """Takes text and returns text, using one engine.

    Clients know the model as ``model_name``. It computes with ``adapter_use``. ``system`` is the
    system message of conversations that have none, and ``sampling`` has the defaults of sampling
    parameters for requests that do not set them. A request may take ``request_timeout`` seconds
    from its submission to its last token. ``recorder`` gets every request when it has ended, and
    ``ledger`` limits accounts with keys.
    """

    texts: ModelTexts
    model_name: str
    request_timeout: float | None = None
    recorder: Recorder | None = None
    ledger: UsageLedger = field(default_factory=UsageLedger)
    sampling: Sampling = field(default_factory=Sampling)
    system: str = ""
    adapter_use: AdapterUse = NO_ADAPTERS

    def __post_init__(self) -> None:
        self.engine, self.metrics = self.texts.engine, self.texts.metrics

    @property
    def ready(self) -> bool:
        return self.engine.ready and not self.engine.draining

    @property
    def info(self) -> ModelInfo:
        """What is known about the model.

        Raises EngineError until it has been loaded for the first time.
        """
        if self.engine.info is None:
            raise is_loading(self.engine)
        return self.engine.info

    @property
    def vocabulary(self) -> VocabularyTable:
        """See ModelTexts."""
        return self.texts.vocabulary

    @property
    def capabilities(self) -> frozenset[str]:
        """The features that chats with this model can use: tools, thinking."""
        return self.texts.chat_formats.capabilities

    async def encode(
        self,
        text: str,
        param: str = "prompt",
        scheduling: SchedulingOptions | None = None,
    ) -> list[int]:
        """Return the tokens of a whole prompt, with control tokens parsed.

        Raises what ``check_text`` and ``tokenize`` raise.
        """
        [tokens] = await self.encode_all([(param, text)], scheduling)
        return tokens

    async def encode_all(
        self,
        prompts: Sequence[tuple[str, str | list[int]]],
        scheduling: SchedulingOptions | None = None,
    ) -> list[list[int]]:
        """Do what ``encode`` does for several prompts, each given with the name of its field.

        Token ids are returned as they are.
        """
        segments = []
        for param, text in prompts:
            if isinstance(text, str):
                self.check_text(text, param, scheduling)
                segments.append([Segment(text, add_special=True, parse_special=True)])
        tokenized = iter(await self.tokenize(*segments, scheduling=scheduling))
        return [next(tokenized) if isinstance(text, str) else text for _, text in prompts]

    def check_text(self, text: str, param: str, scheduling: SchedulingOptions | None) -> None:
        """Raise BadRequest for a text that has too many characters to fit, and QueueFull for a long
        text that would be rejected with these ``scheduling`` options.
        """
        self._check_length(len(text), param)
        if len(text) >= LONG_TEXT:
            self._check_room(len(text), scheduling)

    async def tokenize(
        self, *texts: list[Segment], scheduling: SchedulingOptions | None = None
    ) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError without an engine or if too many texts wait, and RequestTimeout.
        """
        if not texts:
            return []
        scheduling = scheduling or SchedulingOptions()
        self._check_limits(scheduling)
        limits = list_limits(self.request_timeout, scheduling)
        first = min(limits, key=attrgetter("at"), default=None)
        try:
            with self.admission(), scheduling.timing("tokenize"):
                async with asyncio.timeout(first and first.at - time.monotonic()):
                    return await self.engine.tokenize([*texts])
        except TimeoutError:
            raise first.error if first else took_too_long(0) from None

    async def prepare(
        self,
        request_id: str,
        chat: Chat,
        params: SamplingParams,
        scheduling: SchedulingOptions,
        param: str = "messages",
        answer: CheckedGrammar = FREE,
    ) -> Generation:
        """Return the generation of a chat's next message, ready to be submitted.

        Its deltas use all channels.

        ``answer`` constrains the text of the message, not its reasoning. Raises BadRequest (param
        tool_choice or tools) for a choice of tools that cannot be enforced, and what ``encode`` and
        ``ChatFormat.plan_output`` raise.
        """
        params = params.replace_unchecked(grammar=answer.grammar)
        prompt, boundaries = await self.encode_chat(chat, scheduling, param)
        await self._tokenize_marks(scheduling)
        chat_format = self.texts.chat_formats.of(chat)
        begun = chat_format.split_begun(chat)
        message: list[int] = []
        if text := chat.budget_message:
            [message] = await self.tokenize([Segment(text)], scheduling=scheduling)
        plan = chat_format.plan_output(prompt, begun, params, message)
        params, unenforced = plan.params, answer.unenforced
        if plan.constraint is not None:
            with scheduling.timing("grammar"):
                checked = await self.texts.grammars.bind(plan.constraint, scheduling.cache_salt)
            params = plan.constrained_params(checked.grammar)
            unenforced += checked.unenforced
        return Generation(
            request_id,
            [prompt],
            params,
            scheduling,
            param,
            plan.output,
            unenforced=unenforced,
            boundaries=boundaries,
        )

    async def _tokenize_marks(self, scheduling: SchedulingOptions) -> None:
        """Tokenize the marks that the chat formats need, once."""
        if self.texts.mark_tokens or not (marks := self.texts.chat_formats.marks):
            return
        texts = ([Segment(mark, parse_special=True)] for mark in marks)
        tokens = await self.tokenize(*texts, scheduling=scheduling)
        self.texts.mark_tokens.update(zip(marks, tokens, strict=True))

    async def encode_chat(
        self, chat: Chat, scheduling: SchedulingOptions, param: str = "messages"
    ) -> TokenizedChat:
        """Return the tokens of a conversation by the model's template.

        Raises what ``encode`` raises.
        """
        self._check_generates()
        self._check_limits(scheduling)
        length = sum(len(str(message.get("content") or "")) for message in chat.messages)
        self._check_length(length, param)
        if length >= LONG_TEXT or len(chat.messages) >= MANY_MESSAGES:
            self._check_room(length, scheduling)
        with scheduling.timing("render"):
            text = await self.render_chat(chat, has_boundaries=self.info.needs_checkpoints)
        num_fenced = text.count(OPEN)  # each fenced part has at least one token
        self._check_length(len(text) - 2 * num_fenced, param)
        self._check_length(num_fenced * self.vocabulary.longest_piece, param)
        return await self.encode_rendered(text, param, scheduling)

    async def count_chat(self, chat: Chat, param: str = "messages") -> int:
        """Return the number of tokens of a conversation, which need not fit into the context.

        Raises what ``encode_rendered`` raises.
        """
        self._check_generates()
        return len((await self.encode_rendered(await self.render_chat(chat), param)).tokens)

    async def encode_rendered(
        self, text: str, param: str, scheduling: SchedulingOptions | None = None
    ) -> TokenizedChat:
        """Return the tokens of a conversation that has been rendered.

        Raises BadRequest if it has far too many fences, and what ``tokenize`` raises.
        """
        num_fenced = text.count(OPEN)
        if num_fenced >= max(self.info.context_length, MAX_FENCES):
            raise PromptTooLong(num_fenced, self.info.context_length, param, at_least=True)
        split = partial(self.texts.fences.split_at_boundaries, text)
        parts = split() if num_fenced < MANY_FENCES else await asyncio.to_thread(split)
        return join_parts(await self.tokenize(*parts, scheduling=scheduling))

    async def render_chat(self, chat: Chat, *, has_boundaries: bool = False) -> str:
        """Return the text of a conversation by the model's template, with fences around plain
        text, and with boundaries if asked.
        """
        if self.system and not any(message["role"] == "system" for message in chat.messages):
            system = {"role": "system", "content": self.system}
            chat = replace(chat, messages=[system, *chat.messages])
        chat_format = self.texts.chat_formats.of(chat)
        chat, shows_thought = chat_format.split_begun(chat), chat_format.shows_thought(chat)
        num_turns = sum(1 + len(message.get("tool_calls") or ()) for message in chat.messages)
        get_input = partial(chat_format.template_input, chat)
        messages, tools, variables = (
            get_input() if num_turns < MANY_TURNS else await asyncio.to_thread(get_input)
        )
        if not chat.continued:
            return await self.texts.renderer.render(
                messages, tools, "", has_boundaries, **variables
            )
        text = await self._render_begun(
            messages, tools, chat.continued, variables, has_boundaries=has_boundaries
        )
        thought = (chat.messages[-1].get("reasoning_content") or "") if shows_thought else ""
        return chat_format.begin(text, chat, self.texts.fences.enclose(thought))

    async def _render_begun(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        continued: str,
        variables: dict[str, Any],
        *,
        has_boundaries: bool,
    ) -> str:
        """Render a chat whose last message is to be continued.

        If the template omits that message's field ``continued``, its text is appended to the prompt
        for a new message.
        """
        try:
            return await self.texts.renderer.render(
                messages, tools, continued, has_boundaries, **variables
            )
        except BadRequest as error:
            if error.code is not None:  # no template, or a limit exceeded
                raise
        if continued == "reasoning_content":
            variables = variables | THINKING
        variables = variables | {"add_generation_prompt": True}
        *others, last = messages
        begun: str = self.texts.fences.enclose(last[continued])
        opened = await self.texts.renderer.render(others, tools, "", has_boundaries, **variables)
        return opened + CUT + begun

    async def grammar(
        self, constraint: Constraint, param: str, scheduling: SchedulingOptions
    ) -> CheckedGrammar:
        """Return the checked grammar that enforces ``constraint``, which came as the field
        ``param``.

        Raises BadRequest if it cannot be enforced, and EngineError if too many grammars are being
        checked.
        """
        with scheduling.timing("grammar"):
            return await self.texts.grammars.check(constraint, param, scheduling.cache_salt)

    def _check_length(self, num_characters: int, param: str) -> None:
        at_least = self.least_tokens(num_characters)
        if at_least >= self.info.context_length:
            raise PromptTooLong(at_least, self.info.context_length, param, at_least=True)

    def least_tokens(self, num_characters: int) -> int:
        """Return how many tokens a text of ``num_characters`` has at least."""
        return num_characters // self.vocabulary.longest_piece

    def _check_limits(self, scheduling: SchedulingOptions | None) -> None:
        """Raise RateLimited before a prompt is read if its account has used up a limit."""
        if scheduling is not None and scheduling.account.has_key:
            with self.admission():
                self.ledger.check(scheduling.account)

    def _check_room(self, num_characters: int, scheduling: SchedulingOptions | None) -> None:
        """Raise QueueFull before a long text is tokenized, because that takes longer than a
        rejection may take.
        """
        if scheduling is None:
            return
        num_tokens = max(1, self.least_tokens(num_characters))
        with self.admission():
            self.engine.check_room(
                num_tokens, scheduling.account.name, scheduling.priority, scheduling.claim
            )

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Reject requests while the server shuts down, and count the pool's rejections. Call the
        pool within this context.

        Raises EngineError, and what the call raises.
        """
        if self.engine.draining:
            self.metrics.count_rejection("draining")
            raise EngineError("The server is shutting down.")
        try:
            yield
        except RateLimited as error:
            self.metrics.count_rejection(error.limit)
            raise
        except QueueFull as error:
            self.metrics.count_rejection(error.bound)
            raise
        except EngineError as error:
            self.metrics.count_rejection(error.reason)
            raise

    def _check(self, generation: Generation) -> None:
        """Raise BadRequest if the generation can never be computed, and EngineError until the model
        has been loaded for the first time.
        """
        self._check_generates()
        info = self.info
        generation.params.check_vocabulary(info.vocabulary_size)
        limit = max(MAX_PROMPT_TOKENS, info.context_length)
        if (num_tokens := sum(map(len, generation.prompts))) > limit:
            message = (
                f"Invalid '{generation.param}': the prompts have {num_tokens} tokens "
                f"together, {limit} are allowed."
            )
            raise BadRequest(message, param=generation.param, code="max_tokens_per_request")
        for prompt in generation.prompts:
            check_prompt(prompt, info.vocabulary_size, info.context_length, generation.param)
        if len(generation.prompts) * generation.params.n > MAX_CHOICES:
            message = f"A request may ask for at most {MAX_CHOICES} choices."
            raise BadRequest(message, param="n", code="invalid_value")

    def _check_generates(self) -> None:
        check_generates(self.info, "/v1/embeddings, /v1/rerank")

    def submit(self, generation: Generation) -> Answer:
        """Send a generation to the engine. The caller must close the answer.

        Raises BadRequest if it can never be computed, EngineError while no requests are accepted,
        QueueFull and RateLimited, so a dialect can reject the request before the first byte.
        """
        self._check(generation)
        requests = [
            make_request(
                f"{generation.engine_id}-{i}",
                prompt,
                generation.params,
                generation.scheduling,
                self.adapter_use,
                generation.plan,
                generation.boundaries,
            )
            for i, prompt in enumerate(generation.prompts)
        ]
        usage, delivered = generation.usage, generation.scheduling.delivered
        usage.prompt_tokens = sum(map(len, generation.prompts))
        reader = OutputReader(requests, self.vocabulary.pieces, generation.plan, usage)
        deltas = begun = None
        if delivered is not None:
            inputs = digest_inputs(self.info, requests, self.adapter_use.contents)
            requests = delivered.restore(requests, inputs)
            usage.cached_tokens = delivered.origin.num_reused_tokens
            deltas = delivered.read(reader, requests)
            begun = delivered.list_begun(requests, reader.list_unfinished())
        charge = self._reserve(generation)
        try:
            with self.admission():
                stream = self.engine.submit(
                    requests,
                    generation.scheduling.claim,
                    begun,
                    ends_reasoning=delivered is not None and delivered.ends_reasoning,
                )
        except BaseException as error:
            if charge is not None:
                charge.settle(failed=True)
            if self.recorder is not None and isinstance(error, QueueFull):
                for request in requests:
                    self.recorder.record(request, 0.0, [0] * request.params.n, self.model_name)
            raise
        generation.model, generation.adapters = self.model_name, self.adapter_use.contents
        usage.cached_tokens += stream.num_reused_tokens
        self.metrics.count_request(usage.prompt_tokens, stream.num_shared, stream.num_recalled)
        self.metrics.count_unenforced_keywords(generation.unenforced)
        return Answer(
            generation,
            stream,
            self.engine,
            self.metrics,
            reader,
            self.request_timeout,
            self.recorder,
            charge,
            deltas,
        )

    def _reserve(self, generation: Generation) -> Charge | None:
        """Reserve the most that a generation may cost its account. Return None for an account
        without a key.

        Raises RateLimited.
        """
        account = generation.scheduling.account
        if not account.has_key:
            return None
        params, prompts = generation.params, generation.prompts
        rest = sum(self.info.context_length - len(prompt) for prompt in prompts) * params.n
        if params.max_tokens is not None:
            limit, num_extra = min(rest, params.max_tokens * len(prompts) * params.n), 0
        else:
            limit, num_extra = 0, min(rest, EXPECTED_OUTPUT * len(prompts) * params.n)
        num_tokens = sum(map(len, prompts)) + limit
        with self.admission():
            return self.ledger.admit(
                account, num_tokens, num_extra, generation.usage, self.model_name
            )
