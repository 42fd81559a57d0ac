"""A model in the caller's own process, for scripts and notebooks.

from cllm import LLM, SamplingParams

llm = LLM()
messages = [{"role": "user", "content": "What is 27 plus 45?"}]
print(llm.chat(messages, SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any, Self, TypeVar, cast

import numpy as np

from cllm.backends.base import Vectors
from cllm.backends.registry import import_loader
from cllm.config import OPTIONS, Settings
from cllm.config_sources import load_settings
from cllm.core.output import NO_TOKEN, EmbeddingOutput, FinishReason, Logprobs, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import EmbeddingRequest, Request, check_prompt
from cllm.core.segments import tokenize_segments
from cllm.engine.build import build_backend, build_engine, fit_memory
from cllm.engine.commands import Add, Embed
from cllm.engine.settings import engine_params
from cllm.engine.shared import SharedEngine
from cllm.errors import BadRequest, EngineError
from cllm.text.call_grammar import message_grammar
from cllm.text.chat import Channel, Chat
from cllm.text.chat_format import ChatFormat, OutputPlan
from cllm.text.chat_template import ChatTemplate
from cllm.text.fences import Fences
from cllm.text.messages import Messages, messages_for_template, tools_for_template
from cllm.text.output_reader import Delta, OutputReader

T = TypeVar("T")
Prompt = str | list[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
"""Params for all prompts, or one for each; None means the params from the settings."""
Progress = Callable[[float], None]
"""Called with the loaded share of the model, 0 to 1."""

ABANDONED_TIMEOUT = 1.0  # seconds that an interrupted load gets to free its memory


@dataclass(slots=True)
class ToolCall:
    """A call of a function: its name, and its arguments as JSON text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Output:
    """One of the ``n`` continuations of a prompt.

    finish_reason: stop, length or, in a chat, tool_calls. tokens: all that were generated, marks
    included. logprobs: those of ``tokens``, if SamplingParams.logprobs asks for them. reasoning and
    tool_calls: of a chat, as far as the model's format is known; ``text`` is then without them.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The output as a message in OpenAI's format, with which a conversation can go on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": asdict(call)}
                for i, call in enumerate(self.tool_calls)
            ]
        return message

    def add(self, piece: Piece, deltas: Iterable[Delta]) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason
        for delta in deltas:
            if delta.name:
                self.tool_calls.append(ToolCall(delta.name))
            match delta.channel:
                case Channel.TEXT:
                    self.text += delta.text
                case Channel.REASONING:
                    self.reasoning += delta.text
                case Channel.CALL:
                    self.tool_calls[delta.call].arguments += delta.text


@dataclass(slots=True)
class Completion:
    """The result of one prompt.

    It has ``prompt_tokens`` tokens; ``cached_tokens`` of them came from the prefix cache.

    prompt_logprobs: those of its tokens from the second one on, if SamplingParams.prompt_logprobs
    asks for them.
    """

    outputs: list[Output]
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        return self.outputs[0].message

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class Piece:
    """New text of output ``index`` of prompt ``prompt``; finish_reason is "" while the output
    continues.
    """

    prompt: int
    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[Logprobs] = field(default_factory=list)


class LLM:
    """An engine without a server.

    All prompts of a call are batched together, and with those of other threads.

    Its methods raise BadRequest, naming the field, for input that cannot be computed, EngineError
    if computing fails, and RuntimeError after ``close``.
    """

    def __init__(self, model: str | None = None, **settings: object) -> None:
        """Load ``model``: a path, hf:owner/repo[:quantization], or None for the built-in model.

        settings: any option of docs/configuration.md with its section, written with underscores,
        for example ``scheduler_max_num_seqs=8`` or ``model_max_context_length=2048``. Raises
        StartupError. The likely kinds of damage to a file are found before llama.cpp reads it;
        other damage may abort the process.
        """
        flags = {option_key(name): value for name, value in settings.items()}
        if model is not None:
            flags["model.path"] = model
        self._load(load_settings(None, {}, flags).settings)

    @classmethod
    def from_settings(cls, settings: Settings, progress: Progress | None = None) -> Self:
        """Load the model of a complete settings tree. Raises StartupError."""
        llm = cls.__new__(cls)
        llm._load(settings, progress)  # noqa: SLF001  # its own
        return llm

    def _load(self, settings: Settings, progress: Progress | None = None) -> None:
        model = settings.model
        path = import_loader(settings.backend.name).resolve(model.path, model.quantization)
        params = fit_memory(engine_params(settings, path, check_tokens=True))
        self._backend = interruptible(lambda report: build_backend(params, report), progress)
        self._chat_template = ChatTemplate(self._backend.vocabulary)
        self._fences = Fences(self._backend.vocabulary)
        self.info = self._backend.info
        self._engine = build_engine(self._backend, params)
        self._shared = SharedEngine(self._engine)
        self._ids = count()
        self._default = SamplingParams(**settings.sampling.model_dump(exclude_none=True))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a whole prompt.

        Control tokens written in the text are recognized.
        """
        return self._tokenize(text, "text", parse_special=True)

    def encode_chat(
        self, messages: Messages, tools: Messages | None = None, **variables: Any
    ) -> list[int]:
        """Return the token ids of a conversation up to where the next assistant message begins.

        messages: dictionaries with ``role`` and ``content``, in OpenAI's format, like ``tools``.
        ``variables`` are passed to the model's chat template.
        """
        with self._shared.in_use():
            try:
                text = self._chat_template.render(
                    messages_for_template(messages), tools_for_template(tools), **variables
                )
                return tokenize_segments(self._backend.vocabulary, self._fences.split(text))
            except UnicodeEncodeError:
                raise BadRequest(
                    "messages have a lone surrogate, which is not valid text.", param="messages"
                ) from None

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """Complete each prompt (text or token ids)."""
        return self._collect(self._encode(prompts), params)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        tools: Messages | None = None,
        **variables: Any,
    ) -> Completion:
        """Return the next assistant message of a conversation: text, reasoning and tool calls.

        Tool calls name one of ``tools``, and their arguments follow the schema as far as that can
        be enforced. A ``grammar`` in the params constrains the whole text instead. Raises
        BadRequest for a ``strict`` tool whose schema cannot be enforced.
        """
        prompt = self.encode_chat(messages, tools, **variables)
        (params,) = self._params_of(params, 1)
        if params.grammar:
            return self._collect([prompt], params)[0]
        with self._shared.in_use():
            plan, params, bound = self._chat_format.plan_output(
                prompt, Chat([], tools or []), params
            )
            special = self._backend.vocabulary.special_tokens
        if bound is not None:
            grammar = message_grammar(bound, special)
            params = params.replace_unchecked(grammar=grammar, grammar_is_loose=True)
        return self._collect([prompt], params, plan)[0]

    def stream(self, prompts: Prompts, params: Params = None) -> Iterator[Piece]:
        """Return an iterator over the pieces of all completions as they arrive.

        Leaving its loop early aborts the rest.

        To stream a chat, call ``llm.stream(llm.encode_chat(messages))``.
        """
        encoded = self._encode(prompts)
        return self._stream(encoded, self._params_of(params, len(encoded)))

    def embed(self, texts: str | Sequence[str]) -> Vectors:
        """Return a vector of length 1 for each text, shape (number of texts, info.embedding_size).

        Raises BadRequest if a text is empty or too long, or if the model does not give embeddings.
        """
        if self.info.pooling == "rank" or not self.info.embedding_size:
            raise BadRequest("This model does not compute embeddings.", param="model")
        some: Any = [texts] if isinstance(texts, str) else texts
        if not isinstance(some, Iterable) or isinstance(some, bytes):
            raise BadRequest("texts must be text or a list of texts.", param="texts")
        encoded = [
            self._tokenize(text, f"texts[{i}]", parse_special=False) for i, text in enumerate(some)
        ]
        for i, tokens in enumerate(encoded):
            if not 0 < len(tokens) <= self.info.max_embedding_tokens:
                message = (
                    f"texts[{i}] has {len(tokens)} tokens; it must have 1 to "
                    f"{self.info.max_embedding_tokens}."
                )
                raise BadRequest(message, param=f"texts[{i}]")
        vectors: list[bytes] = []
        inbox = self._shared.submit([Embed(EmbeddingRequest(f"e{next(self._ids)}", encoded))])
        try:
            while len(vectors) < len(encoded):
                embedded = self._shared.take(inbox)
                assert isinstance(embedded, EmbeddingOutput)
                if embedded.error:
                    raise EngineError(f"the texts could not be embedded: {embedded.error}")
                vectors += embedded.vectors
        finally:
            self._shared.drop(inbox)
        return np.frombuffer(b"".join(vectors), "<f4").reshape(
            len(encoded), self.info.embedding_size
        )

    @cached_property
    def _chat_format(self) -> ChatFormat:
        tokenize = self._backend.vocabulary.tokenize
        return ChatFormat(
            self._backend.vocabulary, partial(tokenize, add_special=False, parse_special=True)
        )

    def _tokenize(self, text: str, param: str, *, parse_special: bool) -> list[int]:
        if not isinstance(text, str):
            raise BadRequest(f"{param} must be text, not {type(text).__name__}.", param=param)
        with self._shared.in_use():
            try:
                return self._backend.vocabulary.tokenize(
                    text, add_special=True, parse_special=parse_special
                )
            except UnicodeEncodeError:
                raise BadRequest(
                    f"{param} has a lone surrogate, which is not valid text.", param=param
                ) from None

    def _encode(self, prompts: Prompts) -> list[list[int]]:
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
            return self._tokenize(prompt, param, parse_special=True)
        if not (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)):
            raise BadRequest(f"{param} must be text or a list of token ids.", param=param)
        check_prompt(prompt, self.info.vocabulary_size, self.info.context_length, param)
        return prompt

    def _params_of(self, params: Params, num_prompts: int) -> list[SamplingParams]:
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

    def _collect(
        self, prompts: list[list[int]], params: Params, plan: OutputPlan | None = None
    ) -> list[Completion]:
        each = self._params_of(params, len(prompts))
        completions = [
            Completion([Output() for _ in range(one.n)], len(prompt))
            for prompt, one in zip(prompts, each, strict=True)
        ]
        for piece, deltas, reader in self._read(prompts, each, plan):
            completion = completions[piece.prompt]
            completion.outputs[piece.index].add(piece, deltas)
            completion.cached_tokens = reader.usage.cached_tokens
            completion.prompt_logprobs = reader.prompt_logprobs[0]
        return completions

    def _stream(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Piece]:
        for piece, _, _ in self._read(prompts, params):
            yield piece

    def _read(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        plan: OutputPlan | None = None,
    ) -> Iterator[tuple[Piece, list[Delta], OutputReader]]:
        """Submit the prompts; yield what each output of the engine adds, and what has read it."""
        if not self.info.generates:
            raise BadRequest(
                "This model computes embeddings; it does not generate text.", param="model"
            )
        readers: dict[str, tuple[int, OutputReader]] = {}
        requests = []
        with self._shared.in_use():
            pieces = self._backend.vocabulary.pieces
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            one.check_vocabulary(self.info.vocabulary_size)
            check_prompt(
                prompt, self.info.vocabulary_size, self.info.context_length, f"prompts[{i}]"
            )
            request = Request(f"r{next(self._ids)}", prompt, one).with_seed()
            requests.append(Add(request))
            readers[request.request_id] = i, OutputReader([request], pieces, plan)
        inbox = self._shared.submit(requests)
        try:
            num_going = len(readers)
            while num_going:
                output = self._shared.take(inbox)
                assert isinstance(output, TokenOutput)
                i, reader = readers[output.request_id]
                deltas, ended = reader.read([output])
                if reader.failure == FinishReason.GRAMMAR:
                    raise BadRequest(
                        "the grammar cannot be compiled, or allows no further token",
                        param="grammar",
                    )
                if reader.failure is not None:
                    raise EngineError("the engine failed to compute the prompt")
                for choice in ended:
                    num_going -= reader.finished
                    if not choice.is_known:
                        self._shared.abort(choice.request_id, choice.index)
                if not deltas:  # prompt logprobs, or sampled after a stop string
                    continue
                tokens = [output.token] if output.token != NO_TOKEN else []
                token_logprobs = [output.logprobs] if output.logprobs is not None else []
                text = "".join(delta.text for delta in deltas if delta.channel == Channel.TEXT)
                finish = deltas[-1].finish
                yield (
                    Piece(i, output.index, text, tokens, finish, token_logprobs),
                    deltas,
                    reader,
                )
        finally:
            self._shared.drop(inbox)

    def close(self) -> None:
        """Free the model. Calls that other threads are waiting for raise RuntimeError."""
        self._shared.close(self._backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def option_key(name: str) -> str:
    """Return the dotted key of an option written with underscores: ``kv_layout`` is ``kv.layout``.

    Raises TypeError if there is no such option.
    """
    keys = {key.replace(".", "_"): key for key in OPTIONS}
    if name not in keys:
        raise TypeError(f"LLM() has no option {name!r}; see docs/configuration.md")
    return keys[name]


def interruptible(work: Callable[[Progress], T], progress: Progress | None = None) -> T:
    """Run ``work`` in a thread and return its result.

    So Ctrl-C takes effect immediately; in a callback of C code it would be lost. ``work`` gets a
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
