"""``cllm generate`` and ``cllm chat`` as a person or a script runs them."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cllm.backends.fake import Costs, FakeBackend

FAKE = ("--backend.name", "fake")
GREEDY = ("--temperature", "0")


def test_generate_as_a_process():
    """The text and nothing else."""
    command = [sys.executable, "-m", "cllm", "generate", "a", *FAKE, *GREEDY, "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bcd\n", "")


def test_generate_prints_the_text(cllm):
    """From an argument, or from stdin."""
    for arguments, text in ((("a",), ""), ((), "a"), (("-",), "a")):
        assert cllm("generate", *arguments, *FAKE, "--max-tokens", "3", *GREEDY, text=text) == (0, "bcd\n", "")


def test_generate_as_json(cllm):
    """One object, with the counts."""
    done = cllm("generate", "a", *FAKE, "--max-tokens", "3", *GREEDY, "--json")
    assert json.loads(done.out) == {
        "text": "bcd",
        "finish_reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("",), "no prompt"), (("a", "--temperature", "-1"), "temperature"), (("a", "--model", "x.gguf"), "x.gguf")],
)
def test_what_cannot_work_is_one_line(cllm, arguments, word):
    """Exit code 2, no trace."""
    more = () if "--model" in arguments else FAKE
    done = cllm("generate", *arguments, *more)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert word in line


def test_chat_without_a_server(cllm):
    """Each line of stdin is a turn; a history is kept until /new."""
    done = cllm("chat", *FAKE, "--max-tokens", "2", *GREEDY, text="hi\n\n/new\nho\n/exit\nnot read\n")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) >= 2


@pytest.mark.llama
def test_chat_with_the_built_in_model(builtin_path, cllm):
    """Two turns, the right answers."""
    done = cllm("chat", *GREEDY, "--context", "512", text="What is 27 plus 45?\nSpell the word garden.\n")
    assert done.out == "72\ng-a-r-d-e-n\n"


def test_chat_with_nobody(cllm):
    """A server that does not answer is one line."""
    done = cllm("chat", "--url", "http://127.0.0.1:9", text="hi\n")
    assert done.code == 2
    assert "no server answers" in done.err


def test_chat_with_another_kind_of_server(cllm):
    """One that answers, but not what was asked."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = cllm("chat", "--url", f"127.0.0.1:{server.server_port}/v1", text="hi\n")
        thread.join()
    assert done.code == 2
    assert "it answers 501 to /v1/models" in done.err


@pytest.mark.parametrize(
    ("arguments", "word"), [(("m.gguf",), "m.gguf"), (("--context", "99"), "context"), (("--config", "c"), "--config")]
)
def test_a_server_and_a_model_at_once(cllm, monkeypatch, arguments, word):
    """The server has its own model; but a model that was named counts more than the server of the environment."""
    done = cllm("chat", *arguments, "--url", "http://127.0.0.1:9")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert word in done.err
    monkeypatch.setenv("CLLM_URL", "http://127.0.0.1:9")
    assert "no server answers" not in cllm("chat", *arguments, *FAKE, "--context", "99").err


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_options_of_a_server_are_no_options_here(cllm, command):
    """Neither those of HTTP nor those that have another name here."""
    out = cllm(command, "--help").out
    assert "--kv.max-memory-mb" in out
    for prefix in ("--server.", "--scheduler.", "--sampling.", "--log.", "--model.name"):
        assert prefix not in out
    assert cllm(command, "--server.port", "1").code == 2


def test_a_text_that_is_continued_has_an_end(cllm, monkeypatch):
    """256 tokens, if nothing else is asked for; an answer ends by itself."""
    assert "256 tokens" in " ".join(cllm("generate", "--help").out.split())
    monkeypatch.setattr(FakeBackend, "_next", lambda *_: 97)
    monkeypatch.setattr(Costs, "of", lambda *_: 0)
    assert cllm("generate", "a", *FAKE).out == "a" * 256 + "\n"
    assert cllm("generate", "a", *FAKE, "--max-tokens", "300").out == "a" * 300 + "\n"
    assert len(cllm("generate", "a", *FAKE, "--chat").out) > 900
    monkeypatch.setenv("CLLM_SAMPLING_MAX_TOKENS", "30")
    assert cllm("generate", "a", *FAKE).out == "a" * 30 + "\n"


@pytest.mark.llama
def test_doctor_finds_a_sound_build(builtin_path, cllm):
    """Decodes in a child process and says what it found."""
    done = cllm("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 0, report
    assert report["passed"]
    assert report["cure"] == ""


def test_unknown_variable_is_a_warning(cllm, monkeypatch):
    """One line on stderr, and the command goes on."""
    monkeypatch.setenv("CLLM_MODEL_PAHT", "m.gguf")
    done = cllm("generate", "a", *FAKE, *GREEDY, "--max-tokens", "3")
    assert (done.code, done.out) == (0, "bcd\n")
    assert done.err == "cllm: ignored: CLLM_MODEL_PAHT is not a setting; did you mean CLLM_MODEL_PATH?\n"
