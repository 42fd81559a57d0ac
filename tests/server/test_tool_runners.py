"""The tool runners of Anthropic's and OpenAI's clients call functions until the model answers."""

import asyncio
import json

import anthropic
import pytest
from openai.lib.responses_tool_runner import RegisteredFunction, ResponsesToolRunner

from cllm.models.builtin.questions import TOOLS

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

DECLARED = TOOLS["get_weather"].declare("get_weather")["function"]
ASKED = {
    "model": "cllm-builtin",
    "max_tokens": 200,
    "messages": [{"role": "user", "content": "How is the weather in Berlin?"}],
    "extra_body": {"temperature": 0},
}
REPORT = json.dumps({"weather": "rainy", "degrees": 17})
ANSWER = "It is rainy in Berlin, 17 degrees."
NAMED = {
    "name": "get_weather",
    "description": DECLARED["description"],
    "input_schema": DECLARED["parameters"],
}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner_finishes_its_loop(builtin_server, stream):
    """The client first requests a thread, and needs the right error to continue without one."""
    cities = []

    @anthropic.beta_tool(**NAMED)
    def get_weather(city):
        cities.append(city)
        return REPORT

    with anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(tools=[get_weather], stream=stream, **ASKED)
        message = runner.until_done()
    assert cities == ["Berlin"]
    assert [block.text for block in message.content] == [ANSWER]


def test_anthropic_async_tool_runner_finishes_its_loop(builtin_server):
    cities = []

    @anthropic.beta_async_tool(**NAMED)
    async def get_weather(city):
        cities.append(city)
        return REPORT

    async def run():
        async with anthropic.AsyncAnthropic(
            base_url=builtin_server.url, api_key="none", max_retries=0
        ) as client:
            return await client.beta.messages.tool_runner(tools=[get_weather], **ASKED).until_done()

    message = asyncio.run(run())
    assert cities == ["Berlin"]
    assert [block.text for block in message.content] == [ANSWER]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tool_runner_finishes_its_loop(client, stream):
    called = []

    def get_weather(arguments):
        called.append(arguments)
        return REPORT

    runner = ResponsesToolRunner(
        functions=[RegisteredFunction({"type": "function", **DECLARED}, get_weather)]
    )
    asked = {"model": "cllm-builtin", "input": "How is the weather in Berlin?", "temperature": 0}
    response = runner.run(client, asked, stream=stream)
    assert called == [{"city": "Berlin"}]
    assert response.output_text == ANSWER
