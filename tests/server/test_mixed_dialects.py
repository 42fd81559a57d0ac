"""Concurrent clients of all dialects, streamed and whole, with tools and output schemas, each get
their own answer.
"""

import asyncio
import json
from typing import Any

import anthropic
import ollama
import openai
import pytest

from cllm.models.builtin.questions import TOOLS

pytestmark = [pytest.mark.llama, pytest.mark.slow]

MODEL = "cllm-builtin"
MULTIPLY = TOOLS["multiply"].declare("multiply")
FUNCTION = MULTIPLY["function"]
CUSTOM = {
    "name": "multiply",
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}


def asked(text):
    return [{"role": "user", "content": text}]


def schema(answer):
    properties = {"sum": {"const": answer}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["sum"],
        "additionalProperties": False,
    }


class Asker:
    """Asks for a sum, a call or structured output in each dialect, ``streamed`` or whole."""

    def __init__(self, url):
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        self.ollama = ollama.AsyncClient(url)

    async def close(self):
        await asyncio.gather(self.openai.close(), self.anthropic.close(), self.ollama.close())

    async def by_openai(self, messages, streamed, tool=None, form=None):
        more: dict[str, Any] = {"tools": [MULTIPLY]} if tool else {}
        if form:
            more["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": form},
            }
        create = self.openai.chat.completions.create
        if not streamed:
            message = (
                (await create(model=MODEL, messages=messages, temperature=0, **more))
                .choices[0]
                .message
            )
            return json.loads(message.tool_calls[0].function.arguments) if tool else message.content
        text = arguments = ""
        async for chunk in await create(
            model=MODEL, messages=messages, temperature=0, stream=True, **more
        ):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                arguments += "".join(
                    call.function.arguments or "" for call in choice.delta.tool_calls or []
                )
        return json.loads(arguments) if tool else text

    async def by_anthropic(self, messages, streamed, tool=None, form=None):
        more: dict[str, Any] = {"tools": [CUSTOM]} if tool else {}
        if form:
            more["output_config"] = {"format": {"type": "json_schema", "schema": form}}
        more |= {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
        if streamed:
            async with self.anthropic.messages.stream(messages=messages, **more) as stream:
                block = (await stream.get_final_message()).content[0]
        else:
            block = (await self.anthropic.messages.create(messages=messages, **more)).content[0]
        return block.input if tool else block.text

    async def by_ollama(self, messages, streamed, tool=None, form=None):
        more: dict[str, Any] = {"tools": [MULTIPLY]} if tool else {}
        more |= {"format": form, "options": {"temperature": 0}}
        if not streamed:
            message = (await self.ollama.chat(MODEL, messages, **more)).message
            return message.tool_calls[0].function.arguments if tool else message.content
        lines = [
            line.message
            async for line in await self.ollama.chat(MODEL, messages, stream=True, **more)
        ]
        if tool:
            return next(line.tool_calls[0].function.arguments for line in lines if line.tool_calls)
        return "".join(line.content for line in lines)


def test_64_clients_of_all_dialects_get_their_own_answers(builtin_server):
    async def one(asker, i):
        ask = (asker.by_openai, asker.by_anthropic, asker.by_ollama)[i % 3]
        streamed, a, b = i // 3 % 2, 20 + i // 6, 31
        match i // 6 % 3:
            case 0:
                assert await ask(asked(f"What is {a} plus {b}?"), streamed) == str(a + b)
            case 1:
                arguments = await ask(asked(f"Multiply {a} by {b}."), streamed, tool=True)
                assert arguments == {"a": a, "b": b}
            case 2:
                text = await ask(asked(f"What is {a} plus {b}?"), streamed, form=schema(a + b))
                assert json.loads(text) == {"sum": a + b}

    async def all_of_them():
        asker = Asker(builtin_server.url)
        try:
            await asyncio.gather(*(one(asker, i) for i in range(64)))
        finally:
            await asker.close()

    asyncio.run(all_of_them())
    stats = builtin_server.wait_until_idle()
    assert stats["num_seq_ids_in_use"] == 0
