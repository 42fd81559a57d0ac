"""Where ``cllm chat`` and ``cllm generate`` get their answers: from a running server, or from a
model in this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypedDict

import msgspec
from cyclopts import Parameter

from cllm.cli.progress import open_bar
from cllm.cli.remarks import print_notes, remarks
from cllm.cli.settings_flags import settings_from_flags
from cllm.config import OPTIONS
from cllm.config_sources import LoadedConfig
from cllm.core.params import PARAMETERS, SamplingParams
from cllm.errors import CLLMError, StartupError

Messages = list[dict[str, Any]]
UrlFlag = Annotated[
    str | None, Parameter(help="A running server, e.g. http://127.0.0.1:8000. [env: CLLM_URL]")
]

CONTINUATION = 256  # tokens; without a limit, a continued text might never end


def sampling_flags() -> Any:
    """Return the type of an argument with sampling parameters: those of the configuration, and the
    seed.

    It contains only the given ones. The model or the server chooses the others.
    """
    limit = Annotated[int, Parameter(help="Largest number of tokens in an answer.")]
    flags = {
        name: Annotated[parameter.type, Parameter(help=parameter.help)]
        for name, parameter in PARAMETERS.items()
        if parameter.default is not None or name == "seed"
    }
    given: Any = TypedDict("SamplingFlags", {"max_tokens": limit, **flags}, total=False)  # type: ignore[misc]
    return Annotated[given, Parameter(name="*")]


if TYPE_CHECKING:
    SamplingFlags = dict[str, Any]
else:
    SamplingFlags = sampling_flags()


class Answer(msgspec.Struct):
    """How the last answer ended."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Talker(Protocol):
    last: Answer

    def ask(self, messages: Messages) -> Iterator[str]:
        """Yield the pieces of the next assistant message."""
        ...

    def complete(self, prompt: str) -> Iterator[str]:
        """Yield the pieces of a continuation."""
        ...


def make_talker(
    url: str | None,
    sampling: Mapping[str, Any] | None,
    config: Path | None,
    settings: Mapping[str, object] | None,
    model: str | None = None,
) -> Talker:
    """Return a client of the server at ``url`` (or at CLLM_URL if no model is named), or load a
    model here.

    sampling: the sampling parameters that were given. config, settings, model: as in
    ``settings_from_flags``. Raises StartupError.
    """
    sampling = sampling or {}
    of_a_model = [OPTIONS[key].flag for key in settings or {}]
    of_a_model += [
        word for word, given in ((f"the model {model}", model), ("--config", config)) if given
    ]
    if url and of_a_model:
        raise StartupError(
            f"--url uses the model of a running server; remove --url or {of_a_model[0]}"
        )
    if not of_a_model:
        url = url or os.environ.get("CLLM_URL")
    return (
        Remote(url, sampling)
        if url
        else Local(settings_from_flags(config, settings, model), sampling)
    )


class Local:
    """A model in this process."""

    def __init__(self, loaded: LoadedConfig, sampling: Mapping[str, Any]) -> None:
        """Load the model, with a progress bar on stderr. Raises StartupError."""
        from cllm.llm import LLM

        print_notes(loaded)
        settings = loaded.settings
        self._params = SamplingParams(
            **{**settings.sampling.model_dump(exclude_none=True), **sampling}
        )
        with closing(open_bar("loading the model")) as bar:
            self._llm = LLM.from_settings(settings, bar.update)
        for line in remarks(loaded, self._llm.info):
            print("cllm:", line, file=sys.stderr)
        self.last = Answer()

    def ask(self, messages: Messages) -> Iterator[str]:
        return self._stream(self._llm.encode_chat(messages), self._params)

    def complete(self, prompt: str) -> Iterator[str]:
        params = msgspec.structs.replace(
            self._params, max_tokens=self._params.max_tokens or CONTINUATION
        )
        return self._stream(self._llm.encode(prompt), params)

    def _stream(self, prompt: list[int], params: SamplingParams) -> Iterator[str]:
        self.last = Answer(prompt_tokens=len(prompt))
        for piece in self._llm.stream(prompt, params):
            self.last.completion_tokens += len(piece.tokens)
            self.last.finish_reason = piece.finish_reason
            yield piece.text


class Remote:
    """A server with OpenAI's API."""

    def __init__(self, url: str, sampling: Mapping[str, Any], model: str = "") -> None:
        """Connect to the server. Raises StartupError if it does not answer or has another API.

        ``model``: which of its models to ask; the default one if empty.
        """
        import httpx2

        key = os.environ.get("CLLM_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(base_url=server_url(url), headers=headers, timeout=600)
        self._fields = {**sampling, **({"model": model} if model else {})}
        self.last = Answer()
        try:
            status = self._client.get("/v1/models", timeout=10).status_code
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise StartupError(f"cannot connect to {url}: {error}") from None
        if status != 200:
            raise StartupError(
                f"the server at {url} does not support OpenAI's API: it answered {status} to "
                f"/v1/models"
            )

    def ask(self, messages: Messages) -> Iterator[str]:
        for choice in self._stream("/v1/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for choice in self._stream(
            "/v1/completions", {"prompt": prompt, "max_tokens": CONTINUATION}
        ):
            yield choice["text"]

    def _stream(self, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx2

        try:
            yield from self._chunks(path, content)
        except httpx2.HTTPError as error:
            raise CLLMError(f"lost the connection to the server: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise CLLMError("the server's answer does not follow OpenAI's API") from None

    def _chunks(self, path: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.last = Answer()
        body = {
            **content,
            **self._fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise CLLMError(error_message(response.read()))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise CLLMError(chunk["error"]["message"])
                if usage := chunk.get("usage"):
                    self.last.prompt_tokens = usage["prompt_tokens"]
                    self.last.completion_tokens = usage["completion_tokens"]
                for choice in chunk["choices"]:
                    self.last.finish_reason = choice["finish_reason"] or ""
                    yield choice


def server_url(text: str) -> str:
    """Return the server's URL with a scheme and without /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def error_message(data: bytes) -> str:
    """Return the message of an error answer, or the beginning of its body."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")


def print_stream(pieces: Iterator[str]) -> str:
    """Print the pieces as they arrive and end the line. Return the whole text."""
    parts = []
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            parts.append(piece)
    except CLLMError:
        if parts:
            print()  # the error message gets its own line
        raise
    print()
    return "".join(parts)
