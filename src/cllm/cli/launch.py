"""``cllm launch``: starts a coding tool with a running server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from cyclopts import Parameter

from cllm.cli.remote import LOCAL, Url, call, server_url
from cllm.errors import StartupError

NO_KEY = "none"  # tools insist on a key, and servers without keys accept any


@dataclass(frozen=True)
class Launch:
    """A command, and the variables that it needs in addition to those of this process."""

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line for a shell, without the API key."""
        key = os.environ.get("CLLM_API_KEY")
        assignments = [
            f'{name}="$CLLM_API_KEY"' if key and value == key else f"{name}={shlex.quote(value)}"
            for name, value in self.variables.items()
        ]
        return " ".join([*assignments, *map(shlex.quote, self.command)])


class ServerModel(NamedTuple):
    """A model of a server. ``context_length`` is None if the server does not report it."""

    name: str
    context_length: int | None


def launch_claude(url: str, model: ServerModel, key: str) -> Launch:
    """Return how to start Claude Code, with Anthropic's API. The variables for models of all sizes
    name the same model.

    Claude Code assumes 200,000 tokens of context for a model that it does not know. Its reminder of
    how many tokens are left would change the prompt in every turn.
    """
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # of earlier versions
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
    )
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_API_KEY": "",  # one in the environment would be sent to this server
        **dict.fromkeys(names, model.name),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
    }
    if model.context_length is not None:
        output = min(32_000, model.context_length // 4)  # it reserves room for them
        variables |= {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(model.context_length),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(model.context_length),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output),
        }
    return Launch(["claude"], variables)


def launch_codex(url: str, model: ServerModel, key: str) -> Launch:
    """Return how to start Codex CLI, with the Responses API. The values of -c are TOML, in which
    strings are written as in JSON.
    """
    provider = "model_providers.cllm"
    settings: dict[str, Any] = {
        "model_provider": "cllm",
        f"{provider}.name": "cLLM",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "CLLM_API_KEY",
    }
    if model.context_length is not None:
        settings["model_context_window"] = model.context_length
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in settings.items())
    options = [argument for pair in pairs for argument in pair]
    return Launch(["codex", *options, "-m", model.name], {"CLLM_API_KEY": key})


def launch_aider(url: str, model: ServerModel, key: str) -> Launch:
    """Return how to start Aider, with chat completions."""
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
    return Launch(["aider", "--model", f"openai/{model.name}"], variables)


def launch_opencode(url: str, model: ServerModel, key: str) -> Launch:
    """Return how to start OpenCode, with chat completions. Its other settings stay as they are."""
    about: dict[str, Any] = {"name": model.name}
    if model.context_length is not None:
        output = model.context_length // 4  # opencode reserves it; the rest is for the prompt
        about["limit"] = {"context": model.context_length, "output": output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "cLLM",
        "options": {"baseURL": f"{url}/v1", "apiKey": "{env:CLLM_API_KEY}"},
        "models": {model.name: about},
    }
    name = f"cllm/{model.name}"
    settings = {"provider": {"cllm": provider}, "model": name, "small_model": name}
    content = json.dumps(settings, separators=(",", ":"))
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": content, "CLLM_API_KEY": key})


TOOLS: dict[str, tuple[Callable[[str, ServerModel, str], Launch], str]] = {
    "claude": (launch_claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (launch_codex, "npm install -g @openai/codex"),
    "aider": (launch_aider, "uv tool install aider-chat"),
    "opencode": (launch_opencode, "npm install -g opencode-ai"),
}
"""How each tool is launched and installed."""


def launch(
    tool: Annotated[
        Literal["claude", "codex", "aider", "opencode"], Parameter(help="The tool to start.")
    ],
    /,
    *arguments: Annotated[
        str, Parameter(help="Arguments of the tool, after --.", allow_leading_hyphen=True)
    ],
    url: Url = LOCAL,
    model: Annotated[
        str | None,
        Parameter(name=["--model", "-m"], help="One of its models. [default: the server's]"),
    ] = None,
    prints: Annotated[
        bool, Parameter(name="--print", help="Print the command; do not start it.")
    ] = False,
    as_json: Annotated[bool, Parameter(name="--json", help="Print the command as JSON.")] = False,
) -> None:
    """Start Claude Code, Codex CLI, aider or OpenCode with a model of a running server. Nothing is
    written to the tool's own settings.
    """
    make, installation = TOOLS[tool]
    key = os.environ.get("CLLM_API_KEY") or NO_KEY
    prepared = make(server_url(url), choose_model(url, model), key)
    prepared = Launch([*prepared.command, *arguments], prepared.variables)
    if as_json:
        print(json.dumps({"command": prepared.command, "environment": prepared.variables}))
    elif prints:
        print(prepared)
    else:
        start(prepared, installation)


def choose_model(url: str, name: str | None) -> ServerModel:
    """Return the model to use: ``name``, or the server's default one. Raises StartupError."""
    models = list_models(url)
    matching = [model for model in models if name in (None, model.name)]
    if not matching:
        names = ", ".join(model.name for model in models) or "none"
        wanted = "model" if name is None else f"model {name}"
        raise StartupError(f"the server at {url} has no {wanted}; it has {names}")
    return matching[0]


def list_models(url: str) -> list[ServerModel]:
    """Return the server's models. Raises StartupError if it does not answer."""
    try:
        entries = call(url, "GET", "/v1/models")["data"]
        return [ServerModel(entry["id"], entry.get("max_model_len")) for entry in entries]
    except StartupError as error:
        advice = "start a server with cllm serve, or name one with --url"
        raise StartupError(f"{error}; {advice}") from None
    except (KeyError, TypeError):
        raise StartupError(f"the server at {url} does not support OpenAI's API") from None


def start(prepared: Launch, installation: str) -> NoReturn:
    """Run the command in place of this process. Raises StartupError if it is not installed."""
    name, *arguments = prepared.command
    program = shutil.which(name)
    if program is None:
        raise StartupError(f"{name} is not installed; install it with: {installation}")
    environment = {**os.environ, **prepared.variables}
    sys.stdout.flush()
    if os.name == "nt":  # on Windows, exec does not wait for the program
        sys.exit(subprocess.call([program, *arguments], env=environment))
    os.execve(program, prepared.command, environment)  # noqa: S606  # the user asked for it
