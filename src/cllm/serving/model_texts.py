"""Converts the texts of one model: templates and grammars."""

from __future__ import annotations

from functools import cached_property

from cllm.core.vocabulary import VocabularyTable
from cllm.errors import EngineError
from cllm.observe.metrics import Metrics
from cllm.process.pool import Pool
from cllm.text.chat_format import ChatFormats
from cllm.text.dry_breakers import DryBreakers
from cllm.text.grammar import Special
from cllm.text.grammar_process import GrammarProcess
from cllm.text.rendering import Renderer
from cllm.text.templates.fences import Fences


class ModelTexts:
    """The processes that render a model's chat template and check grammars, and data that is
    computed once from its vocabulary. The services of all names of a model share this object.
    """

    def __init__(self, engine: Pool, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.dry_breakers = DryBreakers(lambda: self.vocabulary.pieces)
        self.renderer = Renderer(lambda: self.vocabulary)
        self.grammars = GrammarProcess(
            lambda: Special(self.vocabulary.size, self.vocabulary.special_tokens),
            metrics.observe_grammar_check,
        )
        self.mark_tokens: dict[str, list[int]] = {}  # of the marks that ``chat_formats`` need

    @property
    def vocabulary(self) -> VocabularyTable:
        """The model's vocabulary.

        Raises EngineError until the model has been loaded for the first time.
        """
        if self.engine.vocabulary is None:
            raise is_loading(self.engine)
        return self.engine.vocabulary

    @cached_property
    def fences(self) -> Fences:
        return Fences(self.vocabulary)

    @cached_property
    def chat_formats(self) -> ChatFormats:
        return ChatFormats(self.vocabulary, self.mark_tokens.__getitem__)

    def end_idle(self) -> None:
        """End the idle processes. The next text starts them again."""
        self.renderer.end_idle()
        self.grammars.end_idle()

    async def close(self) -> None:
        """End the processes. Nothing can be rendered or checked afterwards."""
        await self.renderer.close()
        await self.grammars.close()


def is_loading(engine: Pool) -> EngineError:
    """Return the error for a request that needs facts that only a loaded model provides."""
    return EngineError("The model is being loaded; please retry.", engine.seconds_until_ready())
