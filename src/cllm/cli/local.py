"""A model in this process, for ``cllm chat``, ``run`` and ``generate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from cllm.cli.answers import AnswerFacts, AnswerOptions, AnswerPart, Messages, Parts
from cllm.cli.conversation.printer import silence_keyboard
from cllm.cli.models import list_installed, resolve_model
from cllm.cli.progress import open_bar
from cllm.cli.remarks import print_notes, remark_on_base, remarks
from cllm.cli.remote import CONTINUATION
from cllm.config.sources import LoadedConfig
from cllm.core.params import SamplingParams
from cllm.local.completion import Piece
from cllm.local.llm import LLM
from cllm.models.description import describe_model
from cllm.models.task import find_task


class Local:
    """A model in this process."""

    def __init__(
        self,
        loaded: LoadedConfig,
        options: AnswerOptions,
        load_other: Callable[[str | None], LoadedConfig],
        *,
        chats: bool = True,
    ) -> None:
        """Load the model, with a progress bar on stderr. ``load_other`` returns the settings for
        another model. With ``chats``, a remark is printed before a base model is loaded.

        Raises StartupError.
        """
        self._chats = chats
        self.options, self._load_other = options, load_other
        self.model, self.last = "", AnswerFacts()
        self._open(loaded)

    def _open(self, loaded: LoadedConfig) -> None:
        print_notes(loaded)
        self._defaults = loaded.settings.sampling.model_dump(exclude_none=True)
        self._params()  # checks the options before the model is loaded
        model = loaded.settings.model
        path = None if model.chat_template_file or not self._chats else model.path
        if path and find_task(Path(path).expanduser()) == "completion":
            print("cllm:", remark_on_base(path), file=sys.stderr)
        with silence_keyboard(), closing(open_bar("loading the model")) as bar:
            self._llm = LLM.from_settings(loaded.settings, bar.update)
        for line in remarks(loaded, self._llm.info):
            print("cllm:", line, file=sys.stderr)
        self.model = loaded.settings.model.path or ""

    def list_models(self) -> list[str]:
        """Return the names of the models on this machine."""
        return [entry.name for entry in list_installed(self._load_other(None))]

    def switch(self, model: str) -> None:
        """Load ``model`` instead of the present one. If there is no such model, raise CLLMError and
        keep the present one.
        """
        path = resolve_model(self._load_other(None), model)
        describe_model(path)
        self._llm.close()
        self._open(self._load_other(str(path)))
        self.model = model

    def _params(self) -> SamplingParams:
        return SamplingParams(**{**self._defaults, **self.options.sampling})

    def ask(self, messages: Messages) -> Parts:
        """Yield the parts of the next assistant message. Closing it ends the generation."""
        self.last = AnswerFacts()
        pieces = self._llm.stream_chat(
            messages,
            self._params(),
            response_format=self.options.response_format,
            **self.options.variables,
        )
        for piece in pieces:
            self._note(piece)
            if piece.reasoning:
                yield AnswerPart(piece.reasoning, is_reasoning=True)
            if piece.text:
                yield AnswerPart(piece.text)

    def complete(self, prompt: str) -> Parts:
        """Yield the parts of a continuation. Closing it ends the generation."""
        params = self._params()
        params = msgspec.structs.replace(params, max_tokens=params.max_tokens or CONTINUATION)
        self.last = AnswerFacts()
        for piece in self._llm.stream(prompt, params):
            self._note(piece)
            yield AnswerPart(piece.text)

    def _note(self, piece: Piece) -> None:
        self.last.mark_arrival()
        self.last.prompt_tokens = piece.prompt_tokens
        self.last.cached_tokens = piece.cached_tokens
        self.last.completion_tokens += len(piece.tokens)
        self.last.finish_reason = piece.finish_reason
