"""Reads request bodies: checks their size, type and JSON, and validates them with a pydantic
model.
"""

from __future__ import annotations

import asyncio
import functools
from codecs import BOM_UTF8
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any, ClassVar, TypeVar, get_args

import pydantic
import pydantic_core
from pydantic_core import CoreSchema
from starlette.requests import Request

from cllm.errors import BadRequest, EngineError
from cllm.server.body_limits import check_parts, check_structure
from cllm.server.call import Call, get_call
from cllm.server.off_loop import LARGE, admit, off_loop
from cllm.server.state import get_state
from cllm.serving.answer import SchedulingOptions

Model = TypeVar("Model", bound="Body")

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "greater_than_equal": "integer_below_min_value",
    "greater_than": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "less_than": "integer_above_max_value",
}
PACE_WINDOW = 30.0  # seconds
PACE_BYTES = 30_000  # bytes of a body that must arrive in any PACE_WINDOW
MAX_RECEIVING_BYTES = 256_000_000  # bytes of all bodies that are being received
UTF8 = {"utf_8", *(alias for alias, codec in aliases.items() if codec == "utf_8")}
UNION_MEMBERS = {"str", "int", "float", "bool", "none"}


receiving: dict[Call, int] = {}  # the bytes of unfinished bodies


def stop_at_first_fault(schema: Any) -> None:
    """Make every list in ``schema`` stop validation at its first fault.

    A body of a few megabytes can contain millions of faults, and each would become an object and a
    text.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            stop_at_first_fault(inner)
    elif isinstance(schema, (list, tuple)):
        for inner in schema:
            stop_at_first_fault(inner)


def limit_entries(count: int) -> pydantic.BeforeValidator:
    """Return a validator that limits an object to ``count`` entries.

    It counts the entries before they are validated, because each one can have a fault.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"at most {count} entries are accepted, not {len(value)}")
        return value

    return pydantic.BeforeValidator(check)


class Body(pydantic.BaseModel):
    """Base of request models: no coercion, no NaN.

    ``ignored`` has the parameters that are accepted without effect, and ``refused`` has unsupported
    ones, each with the reason. Any other parameter is unknown. docs/api.md lists them all.
    """

    model_config = pydantic.ConfigDict(
        strict=True, allow_inf_nan=False, extra="ignore", frozen=True
    )
    ignored: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    def time_limits(self) -> SchedulingOptions:
        """Return the time limits in the body, which count from now."""
        return SchedulingOptions()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        stop_at_first_fault(handler.resolve_ref_schema(schema))
        return schema


def describe_route(
    body: type[pydantic.BaseModel] | None = None,
    answer: Any = None,
    *,
    takes: str = "application/json",
    stream: str = "",
    error: Any = None,
) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads its body and writes its answer itself. For
    example:

    @router.post("/v1/embeddings", openapi_extra=describe_route(EmbeddingsBody, EmbeddingList))

    ``body`` is the model given to ``read_body``; None if the route reads no body. ``answer`` is the
    type of a 200 answer; it is not needed if the route returns a value of that type instead of a
    Response. ``takes`` is the media type of the body, and ``stream`` that of a streamed answer, if
    the route can stream. ``error`` is the type of 4xx and 5xx answers, if it is not the dialect's.
    A route without any of these needs no description.

    Types of answers are TypedDicts, which mypy compares with the values that routes build. Define
    them at module level, next to the function that builds the answer. A body gives its example with
    ``model_config = example(name=value)``, and an answer can have one with
    ``@with_config(example(name=value))``. The route's docstring is its description.

    openapi.py makes schemas of the types when the document is first requested, because that takes
    time. tests/server/test_openapi.py sends requests made from the schemas and compares the answers
    with them.
    """
    types = {"body": body, "answer": answer, "error": error}
    named = {
        role: f"{kind.__module__}:{kind.__qualname__}"
        for role, kind in types.items()
        if kind is not None
    }
    return {"x-models": {**named, "takes": takes, "stream": stream}}


def example(**values: Any) -> pydantic.ConfigDict:
    """Return the configuration of a model or a TypedDict that has ``values`` as its example."""
    return pydantic.ConfigDict(json_schema_extra={"examples": [values]})


def check_parameters(value: dict[str, Any], model: type[Body], call: Call, path: str = "") -> None:
    """Raise BadRequest for refused parameters, and in strict mode for unknown ones.

    Otherwise count the unknown ones.

    ``path`` is where ``value`` is in the body. Nested objects that have a model are checked too.
    """
    for name, why in model.refused.items():
        if value.get(name) not in (None, False, "", [], {}):
            param = path + name
            raise BadRequest(
                f"Unsupported parameter: '{param}': {why}.",
                param=param,
                code="unsupported_parameter",
            )
    unknown = [name for name in value if name not in known_names(model)]
    if unknown and call.state.settings.server.strict:
        param = path + unknown[0][:100]
        raise BadRequest(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    call.state.registry.metrics.count_unknown_parameters(len(unknown))
    for name, kinds in inner_models(model).items():
        if isinstance(inner := value.get(name), dict):
            meant = max(kinds, key=lambda kind: len(inner.keys() & known_names(kind)))
            check_parameters(inner, meant, call, f"{path}{name}.")


@functools.cache
def known_names(model: type[Body]) -> frozenset[str]:
    fields = {field.alias or name for name, field in model.model_fields.items()}
    return frozenset({*fields, *model.ignored, *model.refused})


@functools.cache
def inner_models(model: type[Body]) -> dict[str, list[type[Body]]]:
    """Return the fields whose value may be an object with a Body model, and the possible models of
    each.
    """
    models = {
        field.alias or name: [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, Body)
        ]
        for name, field in model.model_fields.items()
    }
    return {name: kinds for name, kinds in models.items() if kinds}


async def read_body(request: Request, model: type[Model], *, any_type: bool = False) -> Model:
    """Return the body of ``request`` as ``model``. Raises BadRequest (408, 413, 415, or 400, which
    names the field), and EngineError if too many large bodies wait.

    With ``any_type``, any Content-Type is accepted, unless a page in a browser has sent the
    request.
    """
    headers = request.headers
    if not any_type or "origin" in headers or "sec-fetch-site" in headers:
        check_type(headers.get("content-type", ""))
    data = await read_bytes(request)
    call = get_call(request)
    call.body_hash = hash(data)
    admit(call, len(data))

    def read() -> Model:
        check_structure(data)
        return read_value(parse_json(data), model, call)

    return await off_loop(call, read)


def read_value(value: dict[str, Any], model: type[Model], call: Call) -> Model:
    """Return ``value``, a body that has been parsed, as ``model``. Raises BadRequest."""
    check_parts(value)
    check_parameters(value, model, call)
    try:
        body = model.model_validate(value)
    except pydantic.ValidationError as error:
        raise first_fault(error) from None
    call.time_limits, call.lora = body.time_limits(), getattr(body, "lora", None)
    return body


def check_type(content_type: str) -> None:
    """Raise BadRequest (415) unless ``content_type`` is JSON in UTF-8 (by any of its names)."""
    media_type, *parameters = content_type.lower().split(";")
    pairs = [parameter.partition("=") for parameter in parameters]
    charsets = {
        normalize_encoding(value.strip(' \t"'))
        for name, _, value in pairs
        if name.strip() == "charset"
    }
    if media_type.strip() != "application/json" or not charsets <= UTF8:
        message = f"The Content-Type must be application/json in UTF-8, not {content_type[:80]!r}."
        raise BadRequest(message, code="unsupported_media_type", status=415)


def check_encoding(request: Request) -> None:
    """Raise BadRequest (415) if the body is compressed."""
    for coding in ",".join(request.headers.getlist("content-encoding")).split(","):
        if coding.strip().lower() not in ("", "identity"):
            message = f"The Content-Encoding {coding.strip()[:80]!r} is not supported."
            raise BadRequest(message, code="unsupported_media_type", status=415)


async def read_bytes(request: Request, max_mb: int | None = None) -> bytes:
    """Return the body, without a byte order mark.

    A body over ``max_mb``, by default the server's limit, is rejected as soon as that is known, and
    not read to its end. Raises EngineError for a large body while too many bytes of other bodies
    are being received.
    """
    check_encoding(request)
    limit = (max_mb or get_state(request).settings.server.max_body_mb) * 1_000_000
    too_large = BadRequest(
        f"The body is larger than {limit} bytes.", code="request_too_large", status=413
    )
    call = get_call(request)
    parts: list[bytes] = []
    try:
        async for part in receive_parts(request, limit, too_large):
            parts.append(part)
            size = receiving[call] = receiving.get(call, 0) + len(part)
            if size > LARGE and sum(receiving.values()) > max(limit, MAX_RECEIVING_BYTES):
                call.state.registry.metrics.count_rejection("large")
                raise EngineError("Too many large bodies are being received; please retry.")
        return b"".join(parts).removeprefix(BOM_UTF8)
    finally:
        receiving.pop(call, None)


async def receive_parts(
    request: Request, limit: int, too_large: BadRequest
) -> AsyncGenerator[bytes, None]:
    """Yield the parts of the body as they arrive. Raises ``too_large`` if there are more than
    ``limit`` bytes, and BadRequest (408) if they arrive too slowly.
    """
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    stream, size, waited = request.stream(), 0, 0.0
    pace = Pace(PACE_BYTES, PACE_WINDOW)
    clock = asyncio.get_running_loop().time
    while True:
        begun = clock()
        try:
            async with asyncio.timeout(pace.deadline - waited):
                part = await anext(stream, None)
        except TimeoutError:
            message = (
                f"The body arrives too slowly: less than {PACE_BYTES} bytes in "
                f"{PACE_WINDOW:g} seconds."
            )
            raise BadRequest(message, code="body_timeout", status=408) from None
        if part is None:
            return
        waited += clock() - begun  # excludes the time that the caller spends between two parts
        pace.add(len(part), waited)
        size += len(part)
        if size > limit:
            raise too_large
        yield part


class Pace:
    """Finds the time at which a body is too slow, because fewer than ``num_bytes`` have arrived in
    the last ``window`` seconds.

    Times are the seconds spent waiting for the body so far.
    """

    def __init__(self, num_bytes: int, window: float) -> None:
        self._num_bytes = num_bytes
        self._window = window
        # times and sizes of the latest parts, at least num_bytes together
        self._parts: deque[tuple[float, int]] = deque()
        self._size = 0
        self._since = 0.0  # when the current window began

    @property
    def deadline(self) -> float:
        """The time at which the body is too slow if nothing arrives before it."""
        return self._since + self._window

    def add(self, size: int, time: float) -> None:
        """Note that ``size`` bytes arrived at ``time``."""
        self._parts.append((time, size))
        self._size += size
        while self._size - self._parts[0][1] >= self._num_bytes:
            self._size -= self._parts.popleft()[1]
        if self._size >= self._num_bytes:
            self._since = self._parts[0][0]


def parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object. Raises BadRequest."""
    try:
        value = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(
            f"The body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return value


@contextmanager
def rename_parameters(names: Mapping[str, str], opaque: str = "") -> Iterator[None]:
    """Rename parameters in errors to the dialect's ``names``, with the path of a part of one.

    The parts of the parameter ``opaque`` have other paths in the dialect, which are left out.
    """
    try:
        yield
    except BadRequest as error:
        param, message = error.param or "", str(error)
        for name, own in names.items():
            if param == name or param.startswith((f"{name}[", f"{name}.")):
                renamed = own if name == opaque else own + param.removeprefix(name)
                message = message.replace(f"'{param}", f"'{renamed}")
                message = message.replace(f"'{name}", f"'{own}")
                raise BadRequest(
                    message, param=renamed, code=error.code, status=error.status
                ) from None
        raise


def field_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Return ``location`` without the names that pydantic gives to union members, such as str,
    list[int] or a class.
    """

    def is_field(part: str) -> bool:
        return part.isidentifier() and part not in UNION_MEMBERS and not part[0].isupper()

    return [part for part in location if isinstance(part, int) or is_field(part)]


def first_fault(error: pydantic.ValidationError) -> BadRequest:
    """Return the first fault of a body, with the field's path as OpenAI writes it."""
    faults = error.errors(include_url=False, include_input=False)
    # a value that matches no member of a union has a fault for each of them; the deepest fault
    # belongs to the member that matches best
    of_first_field = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    first = max(of_first_field, key=lambda fault: len(field_path(fault["loc"])))
    param = ""
    for part in field_path(first["loc"]):
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    message = first["msg"].removeprefix("Value error, ")
    kind = first["type"]
    code = CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")
    if kind == "missing":
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code=code)
    return BadRequest(f"Invalid '{param}': {message}.", param=param or None, code=code)
