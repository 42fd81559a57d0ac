"""Short forms of public chat templates, and conversations of any form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cllm.backends.fake.vocabulary import FakeVocabulary

FOLDER = Path(__file__).parent / "data" / "templates"
FAMILIES = sorted(path.stem for path in FOLDER.iterdir())
# Letters of forms. s: a system message, u: a user's, a: the assistant's, r: with reasoning, c: a call, C: with a text,
# R: with reasoning, B: with both, p: two calls, t: a result, x: one without text, e: an empty user's,
# E: an empty assistant's
NAMES = ("get_weather", "get_time")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Tells it.", "parameters": {}}}
    for name in NAMES
]


class Vocabulary(FakeVocabulary):
    def __init__(self, template: str) -> None:
        super().__init__()
        self.chat_template = template
        self.special_texts = {"bos_token": "<s>", "eos_token": "</s>"}


def talk(form: str, *, first: str = "system") -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's form, with a text of its own in each message."""
    roles = {"s": first, "u": "user", "e": "user", "t": "tool", "x": "tool"}
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []
    num_calls = 0
    for i, kind in enumerate(form):
        text = f"text{i}x" if kind in "sutarCBP" else ""
        message: dict[str, Any] = {"role": roles.get(kind, "assistant"), "content": text}
        if kind in "rRB":
            message["reasoning_content"] = f"thought{i}x"
        for _ in range(2 if kind in "pP" else kind in "cCRB"):
            waiting.append(f"call_{num_calls}")
            arguments = json.dumps({"city": f"argument{num_calls}x"})
            function = {"name": NAMES[num_calls % 2], "arguments": arguments}
            call = {"id": waiting[-1], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
            num_calls += 1
        if kind in "tx":
            message["tool_call_id"] = waiting.pop(0) if waiting else f"lost_{i}"
        messages.append(message)
    return messages
