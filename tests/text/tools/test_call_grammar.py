"""The grammars of forced calls and of reasoning before them: the parser reads whatever they allow."""

import json

import pytest
from call_texts import CALLING, TOOLS, WEATHER, WORDS, grammar_of, with_thoughts

from cllm.errors import BadRequest
from cllm.text.tools.model_family import load_families
from cllm.text.tools.parser import Channel, Parser


def follows(grammar: str, text: str) -> bool:
    return WORDS["few"].follows(grammar, text)


@pytest.mark.parametrize("name", CALLING)
def test_forced_call_allows_only_declared_tools_with_valid_arguments(name: str) -> None:
    """Written as the family writes calls, and read by the parser as that call."""
    grammar, call = grammar_of(with_thoughts(name)), WEATHER[name]
    assert follows(grammar, call)
    parser = Parser(load_families()[name], TOOLS)
    parts = [part for part in parser.feed(call) + parser.flush() if part.channel == Channel.CALL]
    assert "".join(part.name for part in parts) == "get_weather"
    assert json.loads("".join(part.text for part in parts)) == {"city": "Oslo", "days": 2}
    for wrong in (
        "hello",
        call[:-3],
        call.replace("get_weather", "get_news"),
        call.replace("2", '"x"'),
        call + " so",
    ):
        assert not follows(grammar, wrong)


@pytest.mark.parametrize("name", CALLING)
def test_reasoning_may_precede_a_forced_call(name: str) -> None:
    """The message begins with reasoning, or inside it."""
    family, call = with_thoughts(name), WEATHER[name]
    if family.header:
        thought = f"<|channel|>analysis<|message|>a < b<|end|><|start|>assistant{call}"
    else:
        thought = f"{family.reasoning.open}\na < b\n{family.reasoning.close}\n\n{call}"
        inside = grammar_of(family, inside=True)
        assert follows(inside, thought.removeprefix(family.reasoning.open))
        assert not follows(inside, call)
    assert follows(grammar_of(family, thinks=True), thought)
    assert follows(grammar_of(family, thinks=True), call)
    assert not follows(grammar_of(family), thought)


@pytest.mark.parametrize("name", sorted(set(CALLING) - {"harmony"}))
def test_number_of_forced_calls_is_limited(name: str) -> None:
    family, call = load_families()[name], WEATHER[name]
    how = family.calls
    inner = call.removeprefix(how.begin).removesuffix(how.end or "\0")

    def calls(count: int) -> str:
        return how.begin + how.between.join([inner] * count) + how.end

    assert follows(grammar_of(family), calls(20))
    for most in (1, 3):
        grammar = grammar_of(family, max_calls=most)
        assert [follows(grammar, calls(count)) for count in range(1, 5)] == [
            count <= most for count in range(1, 5)
        ]


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_answer_grammar_leaves_reasoning_and_calls_free(name: str) -> None:
    """A call may take the place of the constrained text."""
    family = with_thoughts(name)
    begin = family.header.final if family.header else ""
    thought = (
        "<|channel|>analysis<|message|>x<|end|><|start|>assistant"
        if family.header
        else "<think>x</think>\n"
    )
    grammar = grammar_of(family, answer='start: "yes" | "no"', thinks=True)
    for text in (f"{begin}yes", f"{thought}{begin}no", WEATHER[name], thought + WEATHER[name]):
        assert follows(grammar, text), text
    assert not follows(grammar, f"{begin}maybe")
    assert not follows(grammar_of(family, answer='start: "yes"', calls=False), WEATHER[name])


@pytest.mark.parametrize(
    ("name", "schema", "good", "bad"),
    [
        ("qwen3_coder", {"enum": ["a", "b"]}, "\nb\n", "\nc\n"),
        (
            "qwen3_coder",
            {"type": "array", "items": {"type": "integer"}},
            "\n[1, 2]\n",
            "\n[true]\n",
        ),
        ("glm", {"type": "string"}, "a <b> \n c", None),
        (
            "gemma4",
            {"type": "array", "items": {"enum": ["a", "b"]}},
            '[<|"|>a<|"|>,<|"|>b<|"|>]',
            '[<|"|>c<|"|>]',
        ),
        ("gemma4", {"type": "boolean"}, "true", "maybe"),
    ],
)
def test_unquoted_values_follow_the_schema(
    name: str, schema: dict, good: str, bad: str | None
) -> None:
    tool = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    grammar = grammar_of(load_families()[name], tool)
    frame = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>{}</parameter>\n</function>\n</tool_call>",
        "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "gemma4": "<|tool_call>call:f{{x:{}}}<tool_call|>",
    }[name]
    assert follows(grammar, frame.format(good))
    assert bad is None or not follows(grammar, frame.format(bad))


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
def test_schema_that_cannot_be_enforced_is_rejected(name: str, schema: dict) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar_of(load_families()[name], {"f": schema})
    assert caught.value.param == "tools"
