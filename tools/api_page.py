"""Prints the page docs/api.md: every route, and whether each parameter is done, ignored or
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import RootModel

from cllm.server.app import routes
from cllm.server.body import PACE_BYTES, PACE_WINDOW, Body
from cllm.server.body_limits import MAX_PARTS, MAX_STRUCTURE, MAX_VALUES
from cllm.server.http.protocol import HEAD_TIMEOUT, MAX_FIELDS, MAX_HEAD, READ_TIMEOUT
from cllm.server.off_loop import LARGE, MAX_WAITING_BYTES
from cllm.server.openapi import find_type
from cllm.server.queueing import TICKET

INTRODUCTION = f"""\
# API

This page lists all routes and parameters, by dialect. `make docs` generates it from the code, with `tools/api_page.py`.

A parameter is

* **done**: it works as in its dialect,
* **ignored**: it is accepted and has no effect, for the given reason,
* **refused**: the request gets 400 with the reason, unless the value requests nothing (null, false, empty).

Unknown parameters are counted (`cllm:unknown_parameters_total`) and ignored, or get 400 if `server.strict` is set. The
lists include extensions of the dialects, such as `priority` and `top_k`. With OpenAI's client, put them into
`extra_body`.

Types are strict: numbers must not be quoted, and NaN is not a number. Errors have the form of their dialect and name
the field and the limit.

## Connections

The server speaks HTTP/1.0 and HTTP/1.1. Every answer has the header `x-request-id`, including errors of HTTP itself.

| Limit | Answer |
|---|---|
| A request's head must be complete {HEAD_TIMEOUT:g} seconds after its first byte | 408 |
| It has at most {MAX_HEAD:,} bytes and {MAX_FIELDS} header fields | 431 |
| HTTP/1.1 needs exactly one `Host` header field, a host name with an optional port | 400 |
| `chunked` is the only transfer coding, and `identity` the only content coding | 501, 415 |
| At least {PACE_BYTES:,} bytes of a body must arrive in any {PACE_WINDOW:g} seconds; there is no total limit | 408 |
| A client must read its answer, or a good part of it, every {READ_TIMEOUT:g} seconds | the connection is closed |

`Upgrade` header fields are ignored. If data that is not HTTP follows complete requests, these are answered first.

A client may shut down its sending side after its request (half-close) and still gets the answer. The server cannot
distinguish such a client from a disconnected one, so it sends `100 Continue`, or a comment in an event stream, from
time to time. If the client's machine rejects these, the request is aborted.

If the server finds an error before the whole body has arrived, it answers immediately, with `connection: close`. It
reads and discards the rest of the body for a while, so that clients that send everything first can read the answer.

A JSON body may have at most {MAX_STRUCTURE:,} objects, lists and members of objects, {MAX_VALUES:,} values in total,
and {MAX_PARTS:,} messages and parts of a conversation; otherwise it gets 400. `server.max_body_mb` limits its size
(413).

The number of connections is limited by the files that the process may open (`ulimit -n`). When there is no room for
another connection, the one that has been idle for longest is closed; while all have requests, new ones wait.

## Overload

A request that finds the queue full gets 429 (529 on Anthropic's routes) with the headers `retry-after`, in seconds, and
`{TICKET}`. A client that sends the same request after that time, with `{TICKET}` as it was received, goes
before new requests of its class: see [scheduling](scheduling.md#overload).

Requests over {LARGE:,} bytes are read one after the other, so that they do not hold up small ones. While more than
{MAX_WAITING_BYTES:,} bytes of them wait, further ones get 503 with `retry-after`.
"""
HEAD = "| Parameter | | |\n|---|---|---|\n"


def render_page() -> str:
    return "\n".join(sections())


def sections() -> Iterator[str]:
    yield INTRODUCTION
    # without the OpenAPI document and its page
    listed = [route for route in routes() if route.tags]
    shown: dict[type[Body], str] = {}
    for dialect in dict.fromkeys(map(name_dialect, listed)):
        yield f"## {dialect}\n"
        for route in listed:
            if name_dialect(route) == dialect:
                yield route_section(route, shown)


def name_dialect(route: APIRoute) -> str:
    return str(route.tags[0])


def route_section(route: APIRoute, shown: dict[type[Body], str]) -> str:
    """Return the section about a route. ``shown``: bodies described so far, and their routes."""
    name = f"{' '.join(sorted(route.methods or ()))} {route.path}"
    text = f"### {name}\n"
    if route.description:
        text += f"\n{' '.join(route.description.split())}\n"
    model = body_model(route)
    if model in shown:
        return f"{text}\nThe parameters are those of `{shown[model]}`.\n"
    if model is not None:
        shown[model] = name
    rows = [*query_rows(route), *(body_rows(model) if model else ())]
    if rows:
        text += f"\n{HEAD}" + "".join(
            f"| `{name}` | {state} | {cell(what)} |\n" for name, state, what in rows
        )
    return text


def body_model(route: APIRoute) -> type[Body] | None:
    """Return the model of a route's body; that of the entries if it is a list."""
    name = (route.openapi_extra or {}).get("x-models", {}).get("body")
    model = None if name is None else find_type(name)
    if model is not None and issubclass(model, RootModel):
        [model] = get_args(model.model_fields["root"].annotation)
    assert model is None or issubclass(model, Body)
    return model


def query_rows(route: APIRoute) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each query parameter."""
    for field in route.dependant.query_params:
        yield f"?{field.alias}", "done", ""


def body_rows(
    model: type[Body], path: str = "", above: tuple[type[Body], ...] = ()
) -> Iterator[tuple[str, str, str]]:
    """Yield name, state and meaning of each parameter of a body. Fields of an object follow as a.b.

    ``above``: the models that contain this one, which are not described again inside it.
    """
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    properties = (
        definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    ).get("properties", {})
    for name, field in model.model_fields.items():
        shown = field.alias or name
        about = properties[shown]
        parts = [described(about, definitions), about.get("description", "")]
        yield path + shown, "done", ". ".join(part.removesuffix(".") for part in parts if part)
        inner = inner_models(field.annotation)
        if len(inner) == 1 and not {*inner} & {model, *above}:
            ((model_of_field, place),) = inner.items()
            yield from body_rows(model_of_field, f"{path}{shown}{place}.", (*above, model))
    for state, names in (("ignored", model.ignored), ("refused", model.refused)):
        for name, why in names.items():
            yield path + name, state, why


def inner_models(annotation: Any) -> dict[type[Body], str]:
    """Return the models of a parameter's possible objects, each with "[]" if it may be a list of
    them.
    """
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return {annotation: ""}
    found: dict[type[Body], str] = {}
    for member in get_args(annotation):
        found |= {
            model: ("[]" if get_origin(annotation) is list else "") + place
            for model, place in inner_models(member).items()
        }
    return found


def described(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        return described(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema or "const" in schema:
        return ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    members = [
        member
        for key in ("anyOf", "oneOf")
        for member in schema.get(key, ())
        if member.get("type") != "null"
    ]
    if members:
        return " or ".join(dict.fromkeys(described(member, definitions) for member in members))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {described(schema.get('items', {}), definitions)}"
    if kind in ("integer", "number"):
        return f"{kind}{bounds(schema)}"
    return {"string": "text", "boolean": "true or false", "object": "object"}.get(
        str(kind), "anything"
    )


def bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f" from {low}" if low is not None else f" up to {high}" if high is not None else ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render_page(), end="")
