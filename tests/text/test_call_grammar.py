"""The grammars of forced calls and of reasoning before them: what they let pass, the parser reads."""

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from cllm.errors import BadRequest
from cllm.text.call_grammar import CallGrammar
from cllm.text.chat import Channel
from cllm.text.form import Form, forms
from cllm.text.parser import Parser

SPECIAL = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "[TOOL_CALLS]", "[ARGS]"]
SPECIAL += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
CONTROL = {text: 256 + i for i, text in enumerate(SPECIAL)}
END = 256 + len(SPECIAL)
SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")
THINK = forms()["think"].reasoning
CALLING = sorted(name for name, form in forms().items() if form.calls)

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
TOOLS = {"get_weather": CITY, "get_time": {"type": "object", "properties": {}}}
WEATHER = {
    "deepseek_r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo", "days": 2}',
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 2}}',
    "minimax": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
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
WEATHER["spoken"] = WEATHER["hermes"]
WEATHER["llama4"] = WEATHER["llama3"]
WEATHER["pythonic"] = '[get_weather(city="Oslo", days=2)]'
WEATHER["lfm2"] = f"<|tool_call_start|>{WEATHER['pythonic']}<|tool_call_end|>"
WEATHER["function_gemma"] = "<start_function_call>call:get_weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
WEATHER["functionary"] = '<function=get_weather>{"city": "Oslo", "days": 2}</function>'
WEATHER["seed"] = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n"
    "</function>\n</seed:tool_call>"
)
WEATHER["minicpm"] = (
    '<function name="get_weather"><param name="city">Oslo</param><param name="days">2</param></function>'
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


class Bytes:
    """A token a byte, some special ones, and the end."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), *(b"\xff" + text.encode() for text in SPECIAL), b"\xff<end>")
    special_token_ids = range(256, END + 1)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def follows(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text is what the grammar asks for."""
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for part in SPLIT.split(text):
        tokens += [CONTROL[part]] if part in CONTROL else part.encode()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def with_thoughts(name: str) -> Form:
    form = forms()[name]
    return form if form.reasoning or form.header else Form((), form.calls, THINK)


def grammar_of(form: Form, tools=TOOLS, answer: str = "", **options) -> str:
    defaults = {"calls": True, "parallel": True, "thinks": False, "inside": False}
    return CallGrammar(form, CONTROL).write(tools, answer, **defaults | options)


@pytest.mark.parametrize("name", CALLING)
def test_a_forced_call(name: str, tokenizer) -> None:
    """The form's own way to write passes and is read as that call; text, unknown tools and wrong types do not pass."""
    grammar, call = grammar_of(with_thoughts(name)), WEATHER[name]
    assert follows(tokenizer, grammar, call)
    parser = Parser(forms()[name], TOOLS)
    parts = [part for part in parser.feed(call) + parser.flush() if part.channel == Channel.CALL]
    assert "".join(part.name for part in parts) == "get_weather"
    assert json.loads("".join(part.text for part in parts)) == {"city": "Oslo", "days": 2}
    for wrong in ("hello", call[:-3], call.replace("get_weather", "get_news"), call.replace("2", '"x"'), call + " so"):
        assert not follows(tokenizer, grammar, wrong)


@pytest.mark.parametrize("name", CALLING)
def test_reasoning_comes_first(name: str, tokenizer) -> None:
    """Where the message may begin with it, and where it begins in its middle."""
    form, call = with_thoughts(name), WEATHER[name]
    if form.header:
        thought = f"<|channel|>analysis<|message|>a < b<|end|><|start|>assistant{call}"
    else:
        thought = f"{form.reasoning.open}\na < b\n{form.reasoning.close}\n\n{call}"
        inside = grammar_of(form, inside=True)
        assert follows(tokenizer, inside, thought.removeprefix(form.reasoning.open))
        assert not follows(tokenizer, inside, call)
    assert follows(tokenizer, grammar_of(form, thinks=True), thought)
    assert follows(tokenizer, grammar_of(form, thinks=True), call)
    assert not follows(tokenizer, grammar_of(form), thought)


@pytest.mark.parametrize("name", sorted(set(CALLING) - {"harmony"}))
def test_calls_in_parallel(name: str, tokenizer) -> None:
    form, call = forms()[name], WEATHER[name]
    how = form.calls
    inner = call.removeprefix(how.begin).removesuffix(how.end or "\0")
    both = how.begin + inner + how.between + inner + how.end
    assert follows(tokenizer, grammar_of(form), both)
    assert not follows(tokenizer, grammar_of(form, parallel=False), both)


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_an_answer_that_is_bound_otherwise(name: str, tokenizer) -> None:
    """What binds the text does not bind reasoning, and calls may stand in its place."""
    form = with_thoughts(name)
    begin = form.header.final if form.header else ""
    thought = "<|channel|>analysis<|message|>x<|end|><|start|>assistant" if form.header else "<think>x</think>\n"
    grammar = grammar_of(form, answer='start: "yes" | "no"', thinks=True)
    for text in (f"{begin}yes", f"{thought}{begin}no", WEATHER[name], thought + WEATHER[name]):
        assert follows(tokenizer, grammar, text), text
    assert not follows(tokenizer, grammar, f"{begin}maybe")
    assert not follows(tokenizer, grammar_of(form, answer='start: "yes"', calls=False), WEATHER[name])


@pytest.mark.parametrize(
    ("name", "schema", "good", "bad"),
    [
        ("qwen3_coder", {"enum": ["a", "b"]}, "\nb\n", "\nc\n"),
        ("qwen3_coder", {"type": "array", "items": {"type": "integer"}}, "\n[1, 2]\n", "\n[true]\n"),
        ("glm", {"type": "string"}, "a <b> \n c", None),
        ("gemma4", {"type": "array", "items": {"enum": ["a", "b"]}}, '[<|"|>a<|"|>,<|"|>b<|"|>]', '[<|"|>c<|"|>]'),
        ("gemma4", {"type": "boolean"}, "true", "maybe"),
    ],
)
def test_values_without_quotes(name: str, schema: dict, good: str, bad: str | None, tokenizer) -> None:
    tool = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    grammar = grammar_of(forms()[name], tool)
    frame = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>{}</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "gemma4": "<|tool_call>call:f{{x:{}}}<tool_call|>",
    }[name]
    assert follows(tokenizer, grammar, frame.format(good))
    assert bad is None or not follows(tokenizer, grammar, frame.format(bad))


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("hermes", {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}),
        ("glm", {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}),
        ("glm", {"type": "object", "properties": {"x": {"type": ["string", "integer"]}}}),
        ("gemma4", {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
        ("qwen3_coder", {"type": "object", "oneOf": []}),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(name: str, schema: dict) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(forms()[name], {"f": schema})
    assert caught.value.param == "tools"


JSON = sorted(name for name in CALLING if forms()[name].calls.writes_json and name != "spoken")


@pytest.mark.parametrize("name", JSON)
def test_text_is_free_and_calls_in_it_are_bound(name: str, tokenizer) -> None:
    """Any text passes, and a call with the right arguments behind it; no wrong call."""
    form, call = with_thoughts(name), WEATHER[name]
    say = forms()["harmony"].header.final if form.header else ""
    then = "<|end|><|start|>assistant" if form.header else ""
    grammar = grammar_of(form, free=True)
    for text in ("", "a < b and { [ so on\n", "<tool_", "\n\nhello"):
        assert follows(tokenizer, grammar, say + text), text
    assert follows(tokenizer, grammar, call)
    if not form.calls.bare:
        assert follows(tokenizer, grammar, f"{say}I look.\n{then}{call}")
    for wrong in (call.replace("2", '"x"'), call.replace("get_weather", "get_news"), call.replace('"city"', '"town"')):
        assert not follows(tokenizer, grammar, wrong)
    thinks = grammar_of(form, free=True, thinks=True)
    if not form.header:
        assert follows(tokenizer, thinks, f"{form.reasoning.open}hm{form.reasoning.close}\n{call}")
    assert not follows(tokenizer, grammar_of(form, free=True, parallel=False), call + then + call)
