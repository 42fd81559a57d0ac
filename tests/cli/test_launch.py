"""``cllm launch``, with a program in place of each tool that prints how it was started."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE
from openai_server import openai_server

from cllm.cli.launch import TOOLS, ServerModel, launch_claude, launch_opencode

STAND_IN = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


@pytest.fixture
def server():
    with openai_server() as server:
        yield server


@pytest.fixture
def launch(server, tmp_path: Path, monkeypatch):
    """A function that launches a stand-in in a process, and returns its arguments and variables."""
    for tool in TOOLS:
        (tmp_path / tool).write_text(STAND_IN)
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def run(tool: str, *words: str) -> tuple[list[str], dict[str, str]]:
        command = [sys.executable, "-m", "cllm", "launch", tool, "--url", server.url, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert (done.returncode, done.stderr) == (7, "")
        arguments, variables = json.loads(done.stdout)
        return arguments, variables

    return run


def test_claude_gets_variables_for_all_model_sizes(launch, server) -> None:
    arguments, variables = launch("claude", "--model", "other/model:Q4", "--", "-p", "Hello there")
    assert arguments == ["-p", "Hello there"]
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["ANTHROPIC_API_KEY"] == ""
    models = {value for name, value in variables.items() if name.endswith("_MODEL")}
    assert models == {"other/model:Q4"}
    assert variables["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in variables


@pytest.mark.parametrize(("length", "output"), [(32_768, "8192"), (262_144, "32000")])
def test_claude_gets_the_context_window(length: int, output: str) -> None:
    """Without it, Claude Code would let a conversation grow to 200,000 tokens."""
    variables = launch_claude("http://127.0.0.1:8000", ServerModel("m", length), "none").variables
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(length)
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(length)
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == output


def test_codex_gets_a_provider_with_the_responses_api(launch, server) -> None:
    arguments, variables = launch("codex", "exec", "Hello")
    assert arguments == [
        *("-c", 'model_provider="cllm"'),
        *("-c", 'model_providers.cllm.name="cLLM"'),
        *("-c", f'model_providers.cllm.base_url="{server.url}/v1"'),
        *("-c", 'model_providers.cllm.wire_api="responses"'),
        *("-c", 'model_providers.cllm.env_key="CLLM_API_KEY"'),
        *("-m", "m", "exec", "Hello"),
    ]
    assert variables["CLLM_API_KEY"] == "none"


def test_aider_gets_openai_variables(launch, server) -> None:
    arguments, variables = launch("aider")
    assert arguments == ["--model", "openai/m"]
    assert variables["OPENAI_API_BASE"] == f"{server.url}/v1"


def test_opencode_gets_a_configuration(launch, server, monkeypatch) -> None:
    monkeypatch.setenv("CLLM_API_KEY", "secret")
    _, variables = launch("opencode")
    settings = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == settings["small_model"] == "cllm/m"
    assert settings["provider"]["cllm"]["options"]["baseURL"] == f"{server.url}/v1"
    assert settings["provider"]["cllm"]["models"] == {"m": {"name": "m"}}
    assert "secret" not in variables["OPENCODE_CONFIG_CONTENT"]
    assert variables["CLLM_API_KEY"] == "secret"


def test_opencode_leaves_most_of_the_context_to_the_prompt() -> None:
    found = launch_opencode("http://127.0.0.1:8000", ServerModel("m", 4096), "none")
    settings = json.loads(found.variables["OPENCODE_CONFIG_CONTENT"])
    limits = settings["provider"]["cllm"]["models"]["m"]["limit"]
    assert limits == {"context": 4096, "output": 1024}


@pytest.mark.parametrize("tool", TOOLS)
def test_print_shows_a_command_for_the_shell(cllm, server, monkeypatch, tool: str) -> None:
    """The API key is not shown."""
    monkeypatch.setenv("CLLM_API_KEY", "secret")
    done = cllm("launch", tool, "--url", server.url, "--print", "--", "two words")
    words = shlex.split(done.out)
    assert (done.code, words[-1]) == (0, "two words")
    assert tool in words
    assert "secret" not in done.out
    shown = json.loads(cllm("launch", tool, "--url", server.url, "--json").out)
    assert shown["command"][0] == tool


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("claude", "--url", "http://127.0.0.1:9"), "start a server with cllm serve"),
        (("claude", "--model", "x"), "has no model x; it has m, other/model:Q4"),
        (("codex",), "codex is not installed; install it with: npm install -g @openai/codex"),
        (("emacs",), "emacs"),
    ],
)
def test_what_prevents_a_launch_is_one_line(cllm, server, monkeypatch, words, message) -> None:
    monkeypatch.setenv("PATH", "")
    done = cllm("launch", *words, *(() if "--url" in words else ("--url", server.url)))
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err
