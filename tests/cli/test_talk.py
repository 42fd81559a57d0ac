"""``cllm generate`` and ``cllm chat`` as a person or a script runs them."""

import json
import subprocess
import sys

import pytest

FAKE = ("--backend.name", "fake")


def cllm(*arguments, text=None):
    command = [sys.executable, "-m", "cllm", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_generate_prints_the_text():
    """From an argument, or from stdin."""
    for arguments, text in ((("a",), None), ((), "a"), (("-",), "a")):
        done = cllm("generate", *arguments, *FAKE, "--max-tokens", "3", "--temperature", "0", text=text)
        assert (done.returncode, done.stdout) == (0, "bcd\n"), done.stderr


def test_generate_as_json():
    """One object, with the counts."""
    done = cllm("generate", "a", *FAKE, "--max-tokens", "3", "--temperature", "0", "--json")
    assert json.loads(done.stdout) == {
        "text": "bcd",
        "finish_reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("",), "no prompt"), (("a", "--temperature", "-1"), "temperature"), (("a", "--model", "x.gguf"), "x.gguf")],
)
def test_what_cannot_work_is_one_line(arguments, word):
    """Exit code 2, no trace."""
    more = () if "--model" in arguments else FAKE
    done = cllm("generate", *arguments, *more)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert word in line


def test_chat_without_a_server():
    """Each line of stdin is a turn; a history is kept until /new."""
    done = cllm("chat", *FAKE, "--max-tokens", "2", "--temperature", "0", text="hi\n\n/new\nho\n/exit\nnot read\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.llama
def test_chat_with_the_built_in_model(builtin_path):
    """Two turns, the right answers."""
    done = cllm("chat", "--temperature", "0", "--context", "512", text="What is 27 plus 45?\nSpell the word garden.\n")
    assert done.stdout == "72\ng-a-r-d-e-n\n"


def test_chat_with_nobody():
    """A server that does not answer is one line."""
    done = cllm("chat", "--url", "http://127.0.0.1:9", text="hi\n")
    assert done.returncode == 2
    assert "no server answers" in done.stderr


@pytest.mark.llama
def test_doctor_finds_a_sound_build(builtin_path):
    """Decodes in a child process and says what it found."""
    done = cllm("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["passed"]
    assert report["cure"] == ""
