"""Render chat templates in child processes, which are killed if they take too much time or
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import to_json

from cllm.core.vocabulary import VocabularyFacts
from cllm.errors import BadRequest
from cllm.text.worker import MEMORY_LIMIT
from cllm.text.workers import Workers

MAX_PROCESSES = 2
CPU_LIMIT = 2.0  # seconds of CPU time for one prompt


class Renderer(Workers):
    """Renders chat templates in at most MAX_PROCESSES processes."""

    def __init__(self, vocabulary: Callable[[], VocabularyFacts]) -> None:
        """``vocabulary`` returns the model's vocabulary, and is called before the first process
        starts.
        """

        def begin() -> bytes:
            facts = vocabulary()
            return to_json(
                {
                    name: getattr(facts, name)
                    for name in (
                        *("chat_template", "tool_template"),
                        *("control_tokens", "special_texts"),
                    )
                }
            )

        super().__init__(
            "cllm.text.templates.chat_template:prepare", begin, MAX_PROCESSES, CPU_LIMIT
        )

    async def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        continued: str = "",
        has_boundaries: bool = False,
        /,
        **variables: Any,
    ) -> str:
        """Render as ChatTemplate.render does, or with boundaries (boundaries.py).

        Raises BadRequest, also if rendering takes too much CPU time or memory; EngineError if the
        processes are stopped or killed.
        """
        try:
            question = to_json([messages, tools, continued, variables, has_boundaries])
        except ValueError:
            raise BadRequest(
                "The messages or tools are nested too deeply.", param="messages"
            ) from None
        reply = await self.ask(question)
        if reply is None:
            message = (
                f"The chat template failed: for these messages it takes more than {CPU_LIMIT:g} "
                f"seconds of CPU time, "
                f"or more than {MEMORY_LIMIT >> 20} MiB of memory."
            )
            raise BadRequest(message, param="messages", code="template_limit")
        return reply.get()
