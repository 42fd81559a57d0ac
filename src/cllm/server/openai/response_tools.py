"""The tools of a response: what the chat is told of them, and which tool a call of the model means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from cllm.server.body import Body
from cllm.server.openai.schema import MAX_TOOLS, Function, ToolName

# The arguments of the function that stands for a custom tool, whose input is plain text.
CUSTOM_ARGUMENTS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionTool(Function):
    type: Literal["function"] = "function"

    def resource(self) -> dict[str, Any]:
        return {"type": "function", "parameters": None, "strict": None, **self.model_dump(exclude_unset=True)}

    def function(self) -> dict[str, Any]:
        """As a chat declares it."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class InputFormat(Body):
    """``syntax`` and ``definition``: of a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool whose input is plain text. The model is told of its format, which is not enforced."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None

    def resource(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)

    def function(self) -> dict[str, Any]:
        description = self.description or ""
        if self.format and self.format.definition:
            syntax = self.format.syntax or "following"
            description += f"\n\nThe input must match this {syntax} grammar:\n{self.format.definition}"
        return {"name": self.name, "description": description.strip(), "parameters": CUSTOM_ARGUMENTS}


class OtherTool(Body):
    """A tool that OpenAI's servers run, or that a model must have been trained for: it is left out."""

    type: str


def tag_of(tool: Any) -> str:
    """The name of the model of ``tool``."""
    kind = tool.get("type") or "function" if isinstance(tool, dict) else type(tool).__name__
    if not isinstance(kind, str):
        return "tool:None"
    return f"tool:{kind}" if kind in ("function", "custom", "namespace") else "tool:other"


MESSAGE = "a tool must be an object with a type"
OneTool = (
    Annotated[FunctionTool, Tag("tool:function")]
    | Annotated[CustomTool, Tag("tool:custom")]
    | Annotated[OtherTool, Tag("tool:other")]
)
DISCRIMINATOR = Discriminator(tag_of, custom_error_type="tool_type", custom_error_message=MESSAGE)


class NamespaceTool(Body):
    """Tools that are called by the name of the namespace and their own."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[OneTool, DISCRIMINATOR]], Field(max_length=MAX_TOOLS)]

    def resource(self) -> dict[str, Any]:
        tools = [tool.resource() for tool in self.tools if not isinstance(tool, OtherTool)]
        return {**self.model_dump(exclude_unset=True), "tools": tools}


Tool = Annotated[OneTool | Annotated[NamespaceTool, Tag("tool:namespace")], DISCRIMINATOR]


@dataclass(frozen=True, slots=True)
class Called:
    """The tool that a function of the chat stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class Toolset:
    """functions: as the chat declares them. called: by their names. skipped: the types of tools that are left out."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    called: dict[str, Called] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def add(self, tools: list[Any], namespace: NamespaceTool | None = None) -> None:
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                self.add(tool.tools, tool)
            elif isinstance(tool, OtherTool):
                self.skipped.append(tool.type)
            else:
                name = flat_name(tool.name, namespace.name if namespace else None)
                is_custom = isinstance(tool, CustomTool)
                self.functions.append({"type": "function", "function": {**tool.function(), "name": name}})
                self.called[name] = Called(tool.name, namespace.name if namespace else None, is_custom)

    def flat_names(self, name: str, namespace: str | None) -> list[str]:
        """The functions that stand for the tool ``name``, of any namespace if none is given."""
        if (exact := flat_name(name, namespace)) in self.called:
            return [exact]
        return [flat for flat, called in self.called.items() if namespace is None and called.name == name]


def flat_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool in a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def input_of(arguments: str) -> str:
    """The input of a custom tool from the arguments of its function, which may have been cut off.

    A model is not bound to the names of the arguments, so any other single text is taken as well, and else all of them
    as they are.
    """
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    if not isinstance(values, dict):
        return arguments
    texts = [values["input"]] if "input" in values else list(values.values())
    if not texts:
        return ""
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else arguments
