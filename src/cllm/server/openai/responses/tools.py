"""Tools of the Responses API.

They are declared to the model as functions; a call is mapped back to its tool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic_core import from_json

from cllm.server.body import Body
from cllm.server.openai.conversation import MAX_TOOLS, FunctionDeclaration, ToolName

# Custom tools take plain text. The model calls them as functions with these arguments.
CUSTOM_ARGUMENTS = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The input of the tool, as plain text."}
    },
    "required": ["input"],
    "additionalProperties": False,
}


class FunctionTool(FunctionDeclaration):
    type: Literal["function"] = "function"

    def resource(self) -> dict[str, Any]:
        return {
            "type": "function",
            "parameters": None,
            "strict": None,
            **self.model_dump(exclude_unset=True),
        }

    def function(self) -> dict[str, Any]:
        """Return the declaration of the function for a chat."""
        return self.model_dump(exclude={"type"}, exclude_none=True)


class InputFormat(Body):
    """The format of a custom tool's input; ``syntax`` and ``definition`` describe a grammar."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool whose input is plain text. Its format is described to the model but not enforced."""

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
            description += (
                f"\n\nThe input must match this {syntax} grammar:\n{self.format.definition}"
            )
        return {
            "name": self.name,
            "description": description.strip(),
            "parameters": CUSTOM_ARGUMENTS,
        }


class OtherTool(Body):
    """A tool that this server cannot offer, such as web_search. It is left out."""

    type: str


def tag_tool(tool: Any) -> str:
    """Return the tag of the pydantic model for ``tool``."""
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
DISCRIMINATOR = Discriminator(tag_tool, custom_error_type="tool_type", custom_error_message=MESSAGE)


class NamespaceTool(Body):
    """A group of tools; a call names the namespace and the tool."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[OneTool, DISCRIMINATOR]], Field(max_length=MAX_TOOLS)]

    def resource(self) -> dict[str, Any]:
        tools = [tool.resource() for tool in self.tools if not isinstance(tool, OtherTool)]
        return {**self.model_dump(exclude_unset=True, exclude={"tools"}), "tools": tools}


ResponseTool = Annotated[OneTool | Annotated[NamespaceTool, Tag("tool:namespace")], DISCRIMINATOR]


@dataclass(frozen=True, slots=True)
class ToolTarget:
    """The tool behind a function that is declared to the model."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class Toolset:
    """The tools of a request as a chat declares them.

    ``functions`` are the declarations. ``called`` has the tool behind each function. ``skipped``
    has the types of the tools that are left out.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    called: dict[str, ToolTarget] = field(default_factory=dict)
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
                self.functions.append(
                    {"type": "function", "function": {**tool.function(), "name": name}}
                )
                self.called[name] = ToolTarget(
                    tool.name, namespace.name if namespace else None, is_custom
                )

    def flat_names(self, name: str, namespace: str | None) -> list[str]:
        """Return the names of the functions for the tool ``name``; without a namespace, those of
        all namespaces.
        """
        if (exact := flat_name(name, namespace)) in self.called:
            return [exact]
        return [
            flat
            for flat, called in self.called.items()
            if namespace is None and called.name == name
        ]


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function for a tool."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def extract_input(arguments: str) -> str:
    """Extract the input of a custom tool from the arguments that the model wrote, which may be cut
    off.

    The model may have used another name than ``input``, so any single text is accepted. Other
    arguments are returned as they are.
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
