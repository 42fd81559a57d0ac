"""An agent: the model calls functions until it can answer.

python examples/agent.py "How is the weather in Cairo?"
MODEL=hf:Qwen/Qwen3-4B-GGUF:Q4_K_M python examples/agent.py "How warm is it in Oslo?"
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from cllm import LLM, SamplingParams

MAX_TURNS = 8


def multiply(a: int, b: int) -> dict[str, Any]:
    return {"product": a * b}


def get_weather(city: str) -> dict[str, Any]:
    weather = {"Oslo": ("rainy", 12), "Cairo": ("sunny", 31)}
    sky, degrees = weather.get(city, ("cloudy", 20))
    return {"weather": sky, "degrees": degrees}


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "multiply": multiply,
    "get_weather": get_weather,
}


def declare(name: str, description: str, **types: str) -> dict[str, Any]:
    """Return the declaration of a tool, as in OpenAI's API."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    declare("multiply", "Multiply two numbers", a="integer", b="integer"),
    declare("get_weather", "Get the weather of a city", city="string"),
]


def run(llm: LLM, question: str) -> list[dict[str, Any]]:
    """Return the whole conversation; its last message is the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        done = llm.chat(messages, SamplingParams(temperature=0, max_tokens=500), TOOLS)
        messages.append(done.message)
        if not done.tool_calls:
            break
        for call in done.tool_calls:
            try:
                result = FUNCTIONS[call.name](**call.parsed)
            except (TypeError, ValueError) as error:  # the model can correct its call
                result = {"error": str(error)}
            content = json.dumps(result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return messages


def main(question: str = "How is the weather in Oslo?") -> None:
    with LLM(os.environ.get("MODEL"), model_max_context_length=2048) as llm:
        for message in run(llm, question):
            calls = [call["function"] for call in message.get("tool_calls", [])]
            print(f"{message['role']}:", message["content"], *calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
