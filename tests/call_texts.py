"""Tool calls in each family's format, and whether a grammar allows a text with control tokens."""

from __future__ import annotations

import re
from functools import partial

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from cllm.backends.base import Vocabulary
from cllm.text.chat_format import ChatFormat
from cllm.text.tools.call_grammar import BoundMessage, CallableTool, message_grammar
from cllm.text.tools.model_family import ModelFamily, load_families, one_of_texts

THINK = load_families()["think"].reasoning
FAMILIES = sorted(load_families())
CALLING = [name for name in FAMILIES if load_families()[name].calls]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = {"get_weather": CITY, "get_time": {"type": "object", "properties": {}}}
WEATHER = {
    "deepseek_r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "harmony": "<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Oslo", "days": 2}',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": '
    "2}}\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter '
    'name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]',
    "mistral_args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 2}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
}
DSML = """<｜DSML｜{0}>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜{0}>"""
WEATHER |= {"deepseek_v32": DSML.format("function_calls"), "deepseek_v4": DSML.format("tool_calls")}
WEATHER["prompted"] = WEATHER["hermes"]
WEATHER["llama4"] = WEATHER["llama3"]
WEATHER["pythonic"] = '[get_weather(city="Oslo", days=2)]'
WEATHER["lfm2"] = f"<|tool_call_start|>{WEATHER['pythonic']}<|tool_call_end|>"
WEATHER["function_gemma"] = (
    "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
)
WEATHER["functionary"] = '<function=get_weather>{"city": "Oslo", "days": 2}</function>'
WEATHER["seed"] = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>"
)
WEATHER["minicpm"] = (
    '<function name="get_weather"><param name="city">Oslo</param><param '
    'name="days">2</param></function>'
)
LIST = '[{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]'
WEATHER |= {
    "granite3": f"<|tool_call|>{LIST}",
    "phi4": f"<|tool_call|>{LIST}<|/tool_call|>",
    "nemotron2": f"<TOOLCALL>{LIST}</TOOLCALL>",
    "tool_calls": f"<tool_calls>{LIST}</tool_calls>",
    "gigachat": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{LIST[1:-1]}",
    "gigachat31": f"<|function_call|>{LIST[1:-1]}",
    "apertus": '<|tools_prefix|>[{"get_weather": {"city": "Oslo", "days": 2}}]<|tools_suffix|>',
    "command": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "Oslo", "days": 2}}\n]<|END_ACTION|>',
}


FEW = [
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|constrain|>",
    "[TOOL_CALLS]",
    "[ARGS]",
]
FEW += [
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
]
MANY = sorted(
    {
        mark
        for family in load_families().values()
        for mark in family.marks
        if re.match(r"<.*>$|\[[A-Z_]+\]$", mark)
    }
)


class Words:
    """A vocabulary with a token for each byte, ``special`` ones, and the end."""

    bos_token_id = None

    def __init__(self, special: list[str]) -> None:
        self.control = {text: 256 + i for i, text in enumerate(special)}
        self.eos_token_id = 256 + len(special)
        marks = [b"\xff" + text.encode() for text in [*special, "<end>"]]
        self.tokens = [bytes([i]) for i in range(256)] + marks
        self.special_token_ids = range(256, self.eos_token_id + 1)
        self._split = re.compile("(" + one_of_texts(set(special)) + ")")
        self.tokenizer = LLTokenizer(TokenizerWrapper(self))
        self._compiled: dict[str, LLMatcher] = {}

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text: str) -> list[int]:
        parts = [part for part in self._split.split(text) if part]
        return [
            token
            for part in parts
            for token in ([self.control[part]] if part in self.control else part.encode())
        ]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.tokens[token].removeprefix(b"\xff") for token in tokens).decode(
            errors="replace"
        )

    def matcher(self, grammar: str) -> LLMatcher:
        if grammar not in self._compiled:
            self._compiled[grammar] = LLMatcher(self.tokenizer, grammar, log_level=0)
            assert not self._compiled[grammar].is_error(), self._compiled[grammar].get_error()
        return self._compiled[grammar].deep_copy()

    def follows(self, grammar: str, text: str) -> bool:
        """Return whether the text is exactly what the grammar asks for."""
        matcher, tokens = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def refuses(self, grammar: str, text: str) -> bool:
        """Return whether the grammar rejects the text before its end."""
        tokens = self.encode(text)
        return self.matcher(grammar).try_consume_tokens(tokens) < len(tokens)


WORDS = {"few": Words(FEW), "many": Words(MANY)}


def chat_format_of(vocabulary: Vocabulary) -> ChatFormat:
    return ChatFormat(
        vocabulary, partial(vocabulary.tokenize, add_special=False, parse_special=True)
    )


def with_thoughts(name: str) -> ModelFamily:
    family = load_families()[name]
    return family if family.reasoning or family.header else ModelFamily((), family.calls, THINK)


def pieces_of(name: str) -> list[str]:
    """Return parts of messages of a family, of which random ones make a broken message."""
    whole = WEATHER.get(name, "")
    halves = [whole[: len(whole) // 2], whole[len(whole) // 2 :], whole]
    marks = sorted(with_thoughts(name).marks)
    words = ["get_weather", "x", *'{}"\\ \n\u00e9:,', '{"name": ', '"get_time"', ', "arguments": {']
    return marks + [mark[:-1] for mark in marks] + words + halves


def grammar_of(
    family: ModelFamily,
    tools=TOOLS,
    words: Words = WORDS["few"],
    strict: bool = True,
    unenforced=None,
    **options,
) -> str:
    declared = {name: CallableTool(schema, strict) for name, schema in tools.items()}
    calls = family.calls
    texts = [*family.marks, *([calls.begin, calls.write, calls.end, calls.pair] if calls else [])]
    used = {
        text: token
        for text, token in words.control.items()
        if any(text in other for other in texts)
    }
    special = range(256, words.eos_token_id)
    return message_grammar(
        BoundMessage(family, declared, used, **{"calls": True} | options), special, unenforced
    )
