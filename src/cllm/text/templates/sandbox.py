"""The sandbox in which chat templates run.

Only this module builds Jinja environments.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.sandbox

from cllm.errors import StartupError
from cllm.text.templates.fences import restore_marks


class TemplateRefusal(Exception):
    """The template called raise_exception."""


def compile_template(source: str, name: str = "the model's chat template") -> jinja2.Template:
    """Compile the template in a sandbox, with transformers' extensions.

    Raises StartupError, with the template's ``name``, on a syntax error.
    """
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
    )
    environment.code_generator_class = Unfolded
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: (
        datetime.datetime.now().astimezone().strftime(form)
    )
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        why = f"{error.message} (line {error.lineno})"
    except RecursionError as error:
        why = str(error)
    raise StartupError(f"{name} has a syntax error: {why}")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets templates append to lists and pop from them, as Kimi K2's does: their lists exist for
    one rendering only.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


class Unfolded(jinja2.compiler.CodeGenerator):
    """Does not compute constant expressions at compile time, which would happen in this process and
    without limits.
    """

    def _output_child_to_const(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: jinja2.compiler.CodeGenerator._FinalizeInfo,
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, **({"default": as_list} | options)
    )
    return restore_marks(text) if ensure_ascii else text


def as_list(value: Any) -> list[Any]:
    """Return the list of a generator, which filters like ``map`` return.

    Raises TypeError.
    """
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks a model's own text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
