"""A model in the caller's own process: the parts that ``LLM`` and ``AsyncLLM`` share."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, TypeVar, cast

from cllm.config.settings import OPTIONS, Settings
from cllm.config.sources import load_settings
from cllm.core.params import MAX_LEXER_STATES, SamplingParams
from cllm.core.request import (
    EmbeddingRequest,
    Priority,
    PriorityName,
    Request,
    check_generates,
    check_prompt,
)
from cllm.core.segments import TokenizedChat, join_parts, tokenize_segments
from cllm.engine.build import build_backend, build_engine, fit_memory
from cllm.engine.settings import make_engine_params, resolve_model
from cllm.engine.shared import SharedEngine
from cllm.errors import BadRequest
from cllm.local.completion import Ranked
from cllm.local.response_format import AnswerFormat
from cllm.local.work import EmbeddingWork, GenerationWork, PreparedPrompt
from cllm.text import grammar
from cllm.text.chat import Chat
from cllm.text.chat_format import ChatFormats, OutputPlan
from cllm.text.messages import Messages, messages_for_template, tools_for_template
from cllm.text.output_reader import OutputReader
from cllm.text.pairs import PairFormat, name_texts
from cllm.text.templates.boundaries import render_with_boundaries
from cllm.text.templates.chat_template import make_templates
from cllm.text.templates.fences import Fences
from cllm.text.tools.call_grammar import message_grammar

T = TypeVar("T")
Prompt = str | list[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
"""Params for all prompts, or one for each; None means the params from the settings."""
Conversations = Messages | list[Messages]
Progress = Callable[[float], None]
"""Called with the loaded share of the model, 0 to 1."""

NOT_COPIED = "a loaded model cannot be copied or pickled; load it in the process that uses it"
ABANDONED_TIMEOUT = 1.0  # seconds for an interrupted load to free its memory
MAX_GRAMMARS = 64  # checked grammars that are remembered


class LocalModel:
    """A loaded model and its engine.

    Its methods raise BadRequest (a ValueError), naming the field, for input that cannot be
    computed, EngineError if computing fails, and RuntimeError after ``close`` or in a process that
    was forked after loading.
    """

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        """Load the model of ``settings``. Raises StartupError."""
        path = resolve_model(settings)
        params = fit_memory(make_engine_params(settings, path, check_tokens=True))
        self._backend = interruptible(lambda report: build_backend(params, report), progress)
        self._own_template = params.chat_template
        self._chat_templates = make_templates(self._backend.vocabulary, self._own_template)
        self._fences = Fences(self._backend.vocabulary)
        self.info = self._backend.info
        """Sizes and limits of the model, such as ``context_length`` and ``embedding_size``."""
        self._engine = build_engine(self._backend, params)
        self._shared = SharedEngine(self._engine)
        self._ids = count()
        self._default = SamplingParams(**settings.sampling.model_dump(exclude_none=True))
        self._check_grammar = lru_cache(MAX_GRAMMARS)(self._grammar_checker())
        weakref.finalize(
            self, self._shared.close, self._backend.close, waits=False
        ).atexit = False  # the end of the process frees everything

    def __reduce__(self) -> Any:
        raise TypeError(NOT_COPIED)

    def close(self) -> None:
        """Free the model, after the step that is being computed. Prefixes are saved on disk if
        ``kv.disk_cache`` is set. Calls that wait for answers raise RuntimeError; so does every
        later call of another method. May be called again.
        """
        self._shared.close(self._end)

    def _end(self) -> None:
        self._engine.close()
        self._backend.close()

    # --- texts and tokens ------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a whole prompt, with the model's begin token.

        Control tokens written in the text are recognized.
        """
        return self._tokenize(text, "text", add_special=True, parse_special=True)

    def encode_chat(
        self, messages: Messages, tools: Messages | None = None, **variables: Any
    ) -> list[int]:
        """Return the token ids of a conversation up to where the next assistant message begins.

        ``messages`` are dictionaries with ``role`` and ``content``, in OpenAI's format, like
        ``tools``. ``variables`` are passed to the model's chat template, such as
        ``enable_thinking=True``.
        """
        return self._render(make_chat(messages, tools, "auto", variables)).tokens

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a part of a text: without begin and end tokens, and with control
        tokens as plain text.
        """
        return self._tokenize(text, "text", add_special=False, parse_special=False)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids. Control tokens have none; bytes that are not UTF-8 become
        U+FFFD.
        """
        size = self.info.vocabulary_size
        if not isinstance(tokens, Iterable):
            raise BadRequest("tokens must be a list of token ids.", param="tokens")
        if not all(isinstance(token, int) and 0 <= token < size for token in tokens):
            message = f"Invalid 'tokens': token ids must be between 0 and {size - 1}."
            raise BadRequest(message, param="tokens", code="invalid_value")
        with self._shared.in_use():
            pieces = self._backend.vocabulary.pieces
        return b"".join([pieces[token] for token in tokens]).decode("utf-8", "replace")

    def _tokenize(
        self, text: str, param: str, *, add_special: bool, parse_special: bool
    ) -> list[int]:
        if not isinstance(text, str):
            raise BadRequest(f"{param} must be text, not {type(text).__name__}.", param=param)
        with self._shared.in_use():
            try:
                return self._backend.vocabulary.tokenize(
                    text, add_special=add_special, parse_special=parse_special
                )
            except UnicodeEncodeError:
                raise lone_surrogate(param) from None

    def _render(self, chat: Chat) -> TokenizedChat:
        messages, tools, variables = self._chat_formats.of(chat).template_input(chat)
        template = self._chat_templates[bool(tools)]
        with self._shared.in_use():
            try:
                if self.info.needs_checkpoints:
                    text = render_with_boundaries(
                        template.render, template.fences, messages, tools, "", variables
                    )
                else:
                    text = template.render(messages, tools, **variables)
                parts = self._fences.split_at_boundaries(text)
                return join_parts(tokenize_segments(self._backend.vocabulary, p) for p in parts)
            except UnicodeEncodeError:
                raise lone_surrogate("messages") from None

    @cached_property
    def _chat_formats(self) -> ChatFormats:
        with self._shared.in_use():
            vocabulary = self._backend.vocabulary
            tokens_of = partial(vocabulary.tokenize, add_special=False, parse_special=True)
            return ChatFormats(vocabulary, tokens_of, self._own_template)

    # --- prompts ---------------------------------------------------------------------------------

    def _prepare(
        self, prompts: Prompts, params: Params, response_format: Any = None
    ) -> list[PreparedPrompt]:
        """Return prompts to continue."""
        check_generates(self.info)
        encoded = self._encode_all(prompts)
        prepared = []
        asked = self._params_for(params, len(encoded))
        answer = None if response_format is None else AnswerFormat.of(response_format)
        for i, (tokens, one) in enumerate(zip(encoded, asked, strict=True)):
            self._check_prompt(tokens, one, f"prompts[{i}]")
            prepared.append(PreparedPrompt(tokens, self._bind(one, answer), None, answer))
        return prepared

    def _prepare_chats(
        self,
        messages: Conversations,
        params: Params,
        tools: Messages | None,
        tool_choice: str,
        response_format: Any,
        variables: dict[str, Any],
    ) -> list[PreparedPrompt]:
        """Return the prompts of conversations."""
        check_generates(self.info)
        are_many = is_list_of_conversations(messages)
        chats = [
            make_chat(one, tools, tool_choice, variables, f"messages[{i}]" if are_many else "")
            for i, one in enumerate(messages if are_many else [messages])
        ]
        answer = None if response_format is None else AnswerFormat.of(response_format)
        asked = self._params_for(params, len(chats))
        prepared = []
        for i, (chat, one) in enumerate(zip(chats, asked, strict=True)):
            tokens, boundaries = self._render(chat)
            self._check_prompt(tokens, one, f"messages[{i}]" if are_many else "messages")
            bound = self._bind(one, answer)
            plan = self._plan(tokens, chat, bound)
            prepared.append(PreparedPrompt(tokens, *plan, answer, boundaries))
        return prepared

    def _plan(
        self, tokens: list[int], chat: Chat, params: SamplingParams
    ) -> tuple[SamplingParams, OutputPlan | None]:
        """Return the params that constrain a chat's next message, and how to read it."""
        with self._shared.in_use():
            plan = self._chat_formats.of(chat).plan_output(tokens, chat, params)
            special = self._backend.vocabulary.special_tokens
        if plan.constraint is None:
            return plan.params, plan.output
        grammar = message_grammar(plan.constraint, special)
        return plan.constrained_params(grammar), plan.output

    def _bind(self, params: SamplingParams, answer: AnswerFormat | None) -> SamplingParams:
        """Return params whose grammar enforces ``answer``."""
        if answer is None:
            return params
        if params.grammar:
            message = "'response_format' and the params' 'grammar' cannot be combined."
            raise BadRequest(message, param="response_format", code="invalid_value")
        try:
            key = json.dumps(answer.constraint)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(
                f"Invalid 'response_format': {str(error)[:200]}.", param="response_format"
            ) from None
        return params.replace_unchecked(grammar=self._check_grammar(key))

    def _grammar_checker(self) -> Callable[[str], str]:
        """Return a function that returns the grammar of a constraint in JSON. It does not refer to
        this object, which is freed when nothing else does.
        """
        vocabulary = self._backend.vocabulary
        special = [vocabulary.size, [*vocabulary.special_tokens.items()], MAX_LEXER_STATES]

        def check(key: str) -> str:
            work = grammar.prepare(special)
            text: str = json.loads(work([json.loads(key), "response_format"]))[0]
            return text

        return check

    def _check_prompt(self, tokens: list[int], params: SamplingParams, param: str) -> None:
        params.check_vocabulary(self.info.vocabulary_size)
        check_prompt(tokens, self.info.vocabulary_size, self.info.context_length, param)

    def _encode_all(self, prompts: Prompts) -> list[list[int]]:
        if isinstance(prompts, str) or (
            isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)
        ):
            prompts = [cast("Prompt", prompts)]
        if not isinstance(prompts, Sequence):
            raise BadRequest("prompts must be text, token ids, or a list of them.", param="prompts")
        return [
            self._encode_one(cast("Prompt", prompt), f"prompts[{i}]")
            for i, prompt in enumerate(prompts)
        ]

    def _encode_one(self, prompt: Prompt, param: str) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenize(prompt, param, add_special=True, parse_special=True)
        if not (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
            raise BadRequest(f"{param} must be text or a list of token ids.", param=param)
        return prompt

    def _params_for(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        """Return the params of each prompt."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self._default] * num_prompts
        if not isinstance(params, Sequence) or not all(
            isinstance(one, SamplingParams) for one in params
        ):
            raise BadRequest("params must be SamplingParams, or a list of them.", param="params")
        if len(params) != num_prompts:
            raise BadRequest(
                f"{len(params)} params were given for {num_prompts} prompts.", param="params"
            )
        return list(params)

    # --- texts to embed --------------------------------------------------------------------------

    def _prepare_texts(self, texts: str | Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts to embed."""
        if self.info.pooling == "rank" or not self.info.embedding_size:
            raise BadRequest("This model does not compute embeddings.", param="model")
        given: Any = [texts] if isinstance(texts, str) else texts
        listed = list_of_texts(given, "texts", "text or a list of texts")
        return self._encode_texts(listed, name_texts("texts", len(listed)))

    def _prepare_ranking(self, query: str, documents: Sequence[str]) -> list[list[int]]:
        """Return the token ids of the texts that ``read_scores`` needs: the pairs for a reranker,
        otherwise the query and the documents.
        """
        if not self.info.embedding_size:
            raise BadRequest("This model does not compute embeddings.", param="model")
        listed = list_of_texts(documents, "documents")
        names = name_texts("documents", len(listed))
        encoded = self._encode_texts([query, *listed], ["query", *names])
        if self.info.pooling != "rank":
            return encoded
        with self._shared.in_use():
            vocabulary = self._backend.vocabulary
            form = PairFormat(vocabulary, self._fences)
            pairs = form.join(
                tokenize_segments(vocabulary, text) for text in form.split(query, listed)
            )
        self._check_texts(pairs, names)
        return pairs

    def _encode_texts(self, texts: Sequence[str], names: list[str]) -> list[list[int]]:
        encoded = [
            self._tokenize(text, name, add_special=True, parse_special=False)
            for text, name in zip(texts, names, strict=True)
        ]
        self._check_texts(encoded, names)
        return encoded

    def _check_texts(self, encoded: list[list[int]], names: list[str]) -> None:
        limit = self.info.max_embedding_tokens
        for tokens, name in zip(encoded, names, strict=True):
            if not 0 < len(tokens) <= limit:
                message = f"{name} has {len(tokens)} tokens; it must have 1 to {limit}."
                raise BadRequest(message, param=name)

    # --- computing -------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[PreparedPrompt],
        priority: PriorityName,
        wake: Callable[[], None] | None = None,
    ) -> GenerationWork:
        """Begin to continue ``prompts``."""
        chosen = read_priority(priority)
        with self._shared.in_use():
            pieces = self._backend.vocabulary.pieces
        requests = [
            Request(
                f"r{next(self._ids)}",
                prompt.tokens,
                prompt.params,
                "",
                chosen,
                boundaries=prompt.boundaries,
            ).with_seed()
            for prompt in prompts
        ]
        readers = {
            request.request_id: (i, OutputReader([request], pieces, prompt.plan))
            for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        }
        return GenerationWork(self._shared, prompts, requests, readers, wake)

    def _embed(
        self,
        texts: list[list[int]],
        priority: PriorityName,
        wake: Callable[[], None] | None = None,
    ) -> EmbeddingWork:
        """Begin to embed ``texts``."""
        request = EmbeddingRequest(f"e{next(self._ids)}", texts, "", read_priority(priority))
        return EmbeddingWork(self._shared, request, self.info.embedding_size, wake)


def read_settings(model: str | None, settings: dict[str, object]) -> Settings:
    """Return the settings for the arguments of ``LLM``. Raises StartupError and TypeError."""
    flags = {option_key(name): value for name, value in settings.items()}
    if model is not None:
        flags["model.path"] = model
    return load_settings(None, {}, flags).settings


def option_key(name: str) -> str:
    """Return the dotted key of an option written with underscores: ``kv_layout`` is ``kv.layout``.

    Raises TypeError if there is no such option.
    """
    keys = {key.replace(".", "_"): key for key in OPTIONS}
    if name not in keys:
        raise TypeError(f"LLM() has no option {name!r}; see docs/configuration.md")
    return keys[name]


def is_list_of_conversations(messages: Any) -> bool:
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)


def make_chat(
    messages: Any,
    tools: Any,
    tool_choice: Any,
    variables: dict[str, Any],
    param: str = "",
) -> Chat:
    """Return a conversation, checked. Errors name it ``param`` if it is one of several."""
    try:
        checked = messages_for_template(messages)
    except BadRequest as error:
        if not param:
            raise
        name = f"{param}{(error.param or '').removeprefix('messages')}"
        message = str(error).replace(error.param or param, name, 1)
        raise BadRequest(message, param=name, code=error.code) from None
    declared = tools_for_template(tools)
    names = [tool["function"]["name"] for tool in declared]
    if tool_choice in ("auto", "none", "required"):
        return Chat(checked, declared, tool_choice, variables=variables)
    if tool_choice not in names:
        known = ", ".join(["auto", "none", "required", *names])
        raise BadRequest(
            f"tool_choice must be one of {known}, not {str(tool_choice)[:40]!r}.",
            param="tool_choice",
        )
    return Chat(checked, declared, "required", (tool_choice,), variables=variables)


def read_priority(name: Any) -> Priority:
    if isinstance(name, str) and (chosen := Priority.__members__.get(name.upper())) is not None:
        return chosen
    known = ", ".join(priority.name.lower() for priority in Priority)
    raise BadRequest(f"priority must be one of {known}, not {str(name)[:40]!r}.", param="priority")


def list_of_texts(texts: Any, param: str, form: str = "a list of texts") -> list[str]:
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | str):
        raise BadRequest(f"{param} must be {form}.", param=param)
    return list(texts)


def rank(documents: Sequence[str], scores: list[float], top_n: int | None) -> list[Ranked]:
    """Return the ``top_n`` documents with the highest scores, the best first."""
    ranked = [
        Ranked(i, score, document)
        for i, (score, document) in enumerate(zip(scores, documents, strict=True))
    ]
    return sorted(ranked, key=lambda one: -one.score)[:top_n]


def check_top_n(top_n: int | None) -> None:
    """Raise BadRequest unless it is a number of documents."""
    if top_n is not None and (not isinstance(top_n, int) or top_n < 0):
        raise BadRequest("top_n must be a whole number from 0.", param="top_n")


def lone_surrogate(param: str) -> BadRequest:
    return BadRequest(f"{param} has a lone surrogate, which is not valid text.", param=param)


def interruptible(work: Callable[[Progress], T], progress: Progress | None = None) -> T:
    """Run ``work`` in a thread and return its result.

    Ctrl-C then takes effect immediately; in a callback of C code, it would be lost. ``work`` gets a
    function to report its progress, which raises InterruptedError after Ctrl-C.
    """
    result: Future[T] = Future()
    interrupted = threading.Event()

    def report(share: float) -> None:
        if interrupted.is_set():
            raise InterruptedError
        if progress is not None:
            progress(share)

    def run() -> None:
        try:
            result.set_result(work(report))
        except BaseException as error:  # noqa: BLE001  # it is raised below
            result.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
        while not wait([result], 0.2).done:
            pass  # wait() has a timeout because a signal to another thread would not wake this one
        return result.result()
    except KeyboardInterrupt:
        interrupted.set()
        wait([result], ABANDONED_TIMEOUT)
        raise
