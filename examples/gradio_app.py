"""A chat in the browser with Gradio.

Not run by the tests, because Gradio is not installed there; they run ``respond``.

    pip install gradio
    python examples/gradio_app.py
"""

import os
from collections.abc import AsyncIterator
from typing import Any

from cllm import AsyncLLM, SamplingParams

llm = AsyncLLM(os.environ.get("MODEL"), model_max_context_length=2048)


async def respond(message: str, history: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield the answer so far. Gradio calls it with the messages before, in OpenAI's format."""
    await llm.load()
    earlier = [{"role": one["role"], "content": one["content"]} for one in history]
    text = ""
    pieces = llm.stream_chat(
        [*earlier, {"role": "user", "content": message}],
        SamplingParams(temperature=0, max_tokens=500),
    )
    async for piece in pieces:
        text += piece.text
        yield text


def main() -> None:
    import gradio

    gradio.ChatInterface(respond, type="messages", title="cLLM").launch()


if __name__ == "__main__":
    main()
