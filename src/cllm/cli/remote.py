"""A running server, as commands use it: ``Remote`` for chats and texts, ``call`` for its other
routes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from cllm.cli.answers import AnswerFacts, AnswerOptions, AnswerPart, Messages, Parts
from cllm.cli.loading import show_loading
from cllm.errors import CLLMError, StartupError
from cllm.http_client import open_client

LOCAL = "http://127.0.0.1:8000"
Url = Annotated[str, Parameter(help="The server's address.", env_var="CLLM_URL")]

NOT_OPENAI = "the server's answer does not follow OpenAI's API"
TIMEOUT = 3600  # seconds; the server may compute a long prompt before it answers
CONTINUATION = 256  # tokens; without a limit, a continued text might never end


def server_url(text: str) -> str:
    """Return the server's URL with a scheme and without /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def auth_headers() -> dict[str, str]:
    """Return the header with CLLM_API_KEY, if it is set. Raises StartupError."""
    key = os.environ.get("CLLM_API_KEY")
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise StartupError("CLLM_API_KEY has characters that an HTTP header cannot contain")
    return {"authorization": f"Bearer {key}"}


def send(
    url: str,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    params: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> Any:
    """Send a request to a server, and return its HTTP answer. Raises StartupError if none comes."""
    import httpx2

    try:
        with open_client(server_url(url), headers=auth_headers(), timeout=timeout) as client:
            return client.request(method, server_url(url) + path, json=body, params=params)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise StartupError(f"cannot connect to {url}: {error}") from None


def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that a server answers. Raises what ``send`` raises, and CLLMError."""
    answer = send(url, method, path, body)
    if answer.status_code != 200:
        raise CLLMError(error_message(answer))
    try:
        return answer.json()
    except ValueError:
        raise CLLMError(f"{url} answered {path} with something that is not JSON") from None


class Remote:
    """A server with OpenAI's API."""

    def __init__(self, url: str, options: AnswerOptions, model: str = "") -> None:
        """Connect to the server, and ask its ``model``, or its default one.

        Raises StartupError if it does not answer or has another API, and CLLMError if it rejects
        the API key or is overloaded.
        """
        import httpx2

        timeout = httpx2.Timeout(TIMEOUT, connect=10)
        self.options, self.model, self.last = options, model, AnswerFacts()
        self.shows_loading = False  # whether a bar shows how the server loads the model
        headers = auth_headers()
        try:
            base = httpx2.URL(server_url(url))
            self._client = open_client(str(base), base_url=base, headers=headers, timeout=timeout)
            answer = self._client.get("/v1/models", timeout=10)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise StartupError(f"cannot connect to {url}: {error}") from None
        status = answer.status_code
        if status in (401, 403):
            advice = "check CLLM_API_KEY" if headers else "set CLLM_API_KEY"
            raise CLLMError(f"{error_message(answer)} ({url}; {advice})")
        if status in (429, 500, 502, 503, 504):
            raise CLLMError(f"{error_message(answer)} ({url})")
        if status != 200:
            raise StartupError(
                f"the server at {url} does not support OpenAI's API: it answered {status} to "
                "/v1/models"
            )

    def list_models(self) -> list[str]:
        """Return the names of the server's models, the default one first. Raises CLLMError."""
        answer = self._get("/v1/models")
        if answer.status_code != 200:
            raise CLLMError(error_message(answer))
        try:
            return [model["id"] for model in answer.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise CLLMError(NOT_OPENAI) from None

    def knows(self, model: str) -> bool:
        """Return whether the server has ``model``, perhaps under another name. Raises CLLMError."""
        return bool(self._get(f"/v1/models/{quote(model)}").status_code == 200)

    def switch(self, model: str) -> None:
        """Ask ``model`` from now on. Raises CLLMError if the server does not have it."""
        if not self.knows(model):
            raise CLLMError(f"the server has no model {model}; it has {self._names()}")
        self.model = model

    def _names(self) -> str:
        return ", ".join(self.list_models()) or "none"

    def _get(self, path: str) -> Any:
        import httpx2

        try:
            return self._client.get(path, timeout=10)
        except httpx2.HTTPError as error:
            raise lost(error) from None

    def ask(self, messages: Messages) -> Parts:
        """Yield the parts of the next assistant message. Closing it ends the generation."""
        fields = {"messages": messages, **self.options.for_server()}
        for choice in self._stream("/v1/chat/completions", fields):
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                yield AnswerPart(reasoning, is_reasoning=True)
            if text := delta.get("content"):
                yield AnswerPart(text)

    def complete(self, prompt: str) -> Parts:
        """Yield the parts of a continuation. Closing it ends the generation."""
        fields = {"prompt": prompt, "max_tokens": CONTINUATION, **self.options.sampling}
        for choice in self._stream("/v1/completions", fields):
            yield AnswerPart(choice.get("text") or "")

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx2

        try:
            yield from self._chunks(path, fields)
        except httpx2.HTTPError as error:
            raise lost(error) from None
        except UnicodeEncodeError:
            raise CLLMError("the prompt is not valid Unicode") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CLLMError(NOT_OPENAI) from None

    def _show_loading(self) -> AbstractContextManager[None]:
        """Show how the server loads the model, if it must be loaded and that is to be shown."""
        if not self.shows_loading:
            return nullcontext()
        try:
            model = self._get(f"/v1/models/{quote(self.model)}").json()
            is_loaded, name = model["loaded"], str(model["root"])
        except (ValueError, LookupError, TypeError):
            return nullcontext()
        return nullcontext() if is_loaded else show_loading(self._client, name)

    def _chunks(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.last = AnswerFacts()
        body = {
            **fields,
            **({"model": self.model} if self.model else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with ExitStack() as stack:
            with self._show_loading():  # the answer begins when the model is loaded
                response = stack.enter_context(self._client.stream("POST", path, json=body))
            if response.status_code != 200:
                response.read()
                raise CLLMError(error_message(response))
            for line in read_lines(response.iter_bytes()):
                name, _, data = line.partition(b":")
                if name != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                chunk = json.loads(data)
                if fault := chunk.get("error"):
                    raise CLLMError(one_line(fault))
                if usage := chunk.get("usage"):
                    details = usage.get("prompt_tokens_details") or {}
                    self.last.prompt_tokens = usage["prompt_tokens"]
                    self.last.completion_tokens = usage["completion_tokens"]
                    self.last.cached_tokens = details.get("cached_tokens") or 0
                for choice in chunk.get("choices") or ():
                    self.last.mark_arrival()
                    self.last.finish_reason = choice.get("finish_reason") or ""
                    yield choice
        if not self.last.finish_reason:
            raise CLLMError("lost the connection to the server before the answer was complete")


def read_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream. httpx also ends lines at characters that JSON may contain, such
    as U+2028.
    """
    growing = bytearray()
    for piece in pieces:
        growing += piece
        if b"\n" in piece:
            *lines, rest = growing.split(b"\n")
            yield from map(bytes, lines)
            growing = rest
    yield bytes(growing)


def lost(error: Exception) -> CLLMError:
    return CLLMError(f"lost the connection to the server: {error}")


def error_message(answer: Any) -> str:
    """Return the message of an error answer, or its status."""
    try:
        return one_line(answer.json()["error"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.url} answered with status {answer.status_code}"


def one_line(fault: Any) -> str:
    """Return the message of an error as one line without control characters. ``fault`` is an object
    with the message (OpenAI's API), or the message itself (Ollama's).
    """
    text = str(fault["message"] if isinstance(fault, dict) else fault)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
