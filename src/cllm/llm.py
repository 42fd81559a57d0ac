"""A model in the caller's own process, for scripts and notebooks.

from cllm import LLM, SamplingParams

llm = LLM()
print(llm.chat([{"role": "user", "content": "What is 27 plus 45?"}], SamplingParams(temperature=0)).text)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self, TypeVar, cast

import numpy as np

from cllm.backends.base import Vectors
from cllm.config import OPTIONS, Settings
from cllm.config_sources import load_settings
from cllm.core.output import NO_TOKEN, FinishReason, Logprobs
from cllm.core.params import SamplingParams
from cllm.core.request import EmbeddingRequest, Request, check_prompt
from cllm.engine.build import build_backend, build_engine, build_vocabulary, fitted
from cllm.engine.commands import Abort, Add, Embed
from cllm.engine.settings import engine_params
from cllm.errors import BadRequest, EngineError
from cllm.models import catalog
from cllm.text.chat_template import ChatTemplate
from cllm.text.choice import Choice

T = TypeVar("T")
Prompt = str | list[int]
Messages = list[dict[str, Any]]
Progress = Callable[[float], None]
"""Called with the loaded share of the model, 0 to 1."""

ABANDONED_TIMEOUT = 1.0  # seconds that an interrupted load gets to free what it has


@dataclass(slots=True)
class Output:
    """One of the ``n`` continuations of a prompt. finish_reason is stop or length.

    logprobs: of the tokens, if SamplingParams.logprobs asks for them.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[Logprobs] = field(default_factory=list)


@dataclass(slots=True)
class Completion:
    """What became of one prompt; ``prompt_tokens`` of it were read, ``cached_tokens`` of them not computed again.

    prompt_logprobs: of its tokens from the second one on, if SamplingParams.prompt_logprobs asks for them.
    """

    outputs: list[Output]
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class Piece:
    """New text of output ``index`` of prompt ``prompt``; finish_reason is "" while it goes on."""

    prompt: int
    index: int
    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[Logprobs] = field(default_factory=list)


class LLM:
    """An engine without a server. Not for several threads at once; all prompts of one call are batched."""

    def __init__(self, model: str | None = None, **settings: object) -> None:
        """Load ``model``: a path, hf:owner/repo[:quantization], or None for the built-in one.

        settings: any option of docs/configuration.md with its section, written with underscores, for example
        ``scheduler_max_num_seqs=8`` or ``model_max_context_length=2048``. Raises StartupError.
        """
        flags = {option_key(name): value for name, value in settings.items()}
        if model is not None:
            flags["model.path"] = model
        self._load(load_settings(None, {}, flags).settings)

    @classmethod
    def from_settings(cls, settings: Settings, progress: Progress | None = None) -> Self:
        """Load what a whole settings tree says. Raises StartupError."""
        llm = cls.__new__(cls)
        llm._load(settings, progress)  # noqa: SLF001  # its own
        return llm

    def _load(self, settings: Settings, progress: Progress | None = None) -> None:
        path = None
        if settings.backend.name != "fake":
            path = catalog.resolve(settings.model.path, settings.model.quantization)
        params = fitted(engine_params(settings, path))
        self.vocabulary = interruptible(lambda _: build_vocabulary(params))
        self._chat_template = ChatTemplate(self.vocabulary)
        self._backend = interruptible(lambda report: build_backend(params, report), progress)
        self.info = self._backend.info
        self._engine = build_engine(self._backend, params)
        self._ids = count()
        self._streaming = False
        self._default = SamplingParams(**settings.sampling.model_dump(exclude_none=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole prompt, control tokens included that it spells out."""
        return self.vocabulary.tokenize(text, add_special=True, parse_special=True)

    def encode_chat(self, messages: Messages, tools: Messages | None = None, **variables: Any) -> list[int]:
        """Token ids that ask for the next assistant message; ``variables`` reach the model's chat template."""
        return self._chat_template.encode(messages, tools or [], **variables)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete each prompt (text or token ids). Raises BadRequest, naming the field, and EngineError."""
        encoded = self._encode(prompts)
        return self._collect(encoded, params or self._default)

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, tools: Messages | None = None, **variables: Any
    ) -> Completion:
        """The next assistant message of a conversation."""
        return self._collect([self.encode_chat(messages, tools, **variables)], params or self._default)[0]

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Piece]:
        """The pieces of all completions as they come; leaving the loop early aborts the rest.

        A chat is streamed as ``llm.stream(llm.encode_chat(messages))``.
        """
        return self._stream(self._encode(prompts), params or self._default)

    def embed(self, texts: str | Sequence[str]) -> Vectors:
        """A vector of length 1 for each text, shape (number of texts, info.embedding_size).

        Raises BadRequest for a text that is empty or too long, or if the model gives no vectors, and EngineError.
        """
        if self.info.pooling == "rank" or not self.info.embedding_size:
            raise BadRequest("The model does not give embeddings.", param="model")
        some = [texts] if isinstance(texts, str) else texts
        encoded = [self.vocabulary.tokenize(text, add_special=True, parse_special=False) for text in some]
        for i, tokens in enumerate(encoded):
            if not 0 < len(tokens) <= self.info.max_embedding_tokens:
                message = f"texts[{i}] has {len(tokens)} tokens; 1 to {self.info.max_embedding_tokens} are possible."
                raise BadRequest(message, param=f"texts[{i}]")
        if self._streaming:
            raise RuntimeError("a stream of this LLM is open; finish or close it first")
        request = EmbeddingRequest(f"e{next(self._ids)}", encoded)
        vectors: list[bytes] = []
        try:
            self._engine.handle(Embed(request))
            while len(vectors) < len(encoded):
                self._engine.step()
                for embedded in self._engine.embeddings.take():
                    if embedded.error:
                        raise EngineError(f"the texts could not be embedded: {embedded.error}")
                    vectors += embedded.vectors
        finally:
            self._engine.handle(Abort(request.request_id))
        return np.frombuffer(b"".join(vectors), "<f4").reshape(len(encoded), self.info.embedding_size)

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        elif prompts and isinstance(prompts[0], int):
            prompts = [cast("list[int]", prompts)]
        some = cast("Sequence[Prompt]", prompts)
        return [self.encode(prompt) if isinstance(prompt, str) else prompt for prompt in some]

    def _collect(self, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
        completions = [Completion([Output() for _ in range(params.n)], len(prompt)) for prompt in prompts]
        for piece in self._stream(prompts, params, completions):
            output = completions[piece.prompt].outputs[piece.index]
            output.text += piece.text
            output.tokens += piece.tokens
            output.logprobs += piece.logprobs
            output.finish_reason = piece.finish_reason
        return completions

    def _stream(
        self, prompts: list[list[int]], params: SamplingParams, completions: list[Completion] | None = None
    ) -> Iterator[Piece]:
        if self._streaming:
            raise RuntimeError("another stream of this LLM is open; finish or close it first")
        if not self.info.generates:
            raise BadRequest("The model gives embeddings; it does not generate text.", param="model")
        params.check_vocabulary(self.info.vocabulary_size)
        for prompt in prompts:
            check_prompt(prompt, self.info.vocabulary_size, self.info.context_length, "prompt")
        names = {f"r{next(self._ids)}": i for i in range(len(prompts))}
        choices = {(name, j): Choice(j, self.vocabulary.pieces, params) for name in names for j in range(params.n)}
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.handle(Add(Request(name, prompt, params)))
        going = len(choices)
        self._streaming = True
        try:
            while going:
                for output in self._engine.step():
                    choice = choices[output.request_id, output.index]
                    if output.finish == FinishReason.GRAMMAR:
                        raise BadRequest("the grammar cannot be compiled, or allows no further token", param="grammar")
                    if output.finish == FinishReason.ERROR:
                        raise EngineError("the engine failed to compute the prompt")
                    if completions is not None:
                        completion = completions[names[output.request_id]]
                        completion.cached_tokens += output.num_cached_tokens
                        completion.prompt_logprobs += output.prompt_logprobs or ()
                    if output.prompt_logprobs is not None:
                        continue
                    text, finish = choice.feed(output)
                    if finish:
                        going -= 1
                        if not output.finish:
                            self._engine.handle(Abort(output.request_id, output.index))
                    tokens = [output.token] if output.token != NO_TOKEN else []
                    told = [output.logprobs] if output.logprobs is not None else []
                    yield Piece(names[output.request_id], output.index, text, tokens, finish, told)
        finally:
            self._streaming = False
            for name in names:
                self._engine.handle(Abort(name))

    def close(self) -> None:
        """Free the model."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def option_key(name: str) -> str:
    """The dotted key of an option written with underscores: ``kv_layout`` is ``kv.layout``."""
    keys = {key.replace(".", "_"): key for key in OPTIONS}
    if name not in keys:
        raise TypeError(f"LLM() has no option {name!r}; see docs/configuration.md")
    return keys[name]


def interruptible(work: Callable[[Progress], T], progress: Progress | None = None) -> T:
    """The result of ``work`` in a thread, so that Ctrl-C comes here at once: in a callback of C code it would be lost.

    ``work`` gets a function to report its progress with, which raises InterruptedError once nobody waits any more.
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
            pass  # not for ever: a signal that came to another thread would not wake this one
        return result.result()
    except KeyboardInterrupt:
        interrupted.set()
        wait([result], ABANDONED_TIMEOUT)
        raise
