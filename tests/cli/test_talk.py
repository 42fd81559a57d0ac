"""``cllm generate`` and ``cllm chat``, for people and scripts."""

import io
import json
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from conftest import PATIENCE

from cllm.backends.fake.backend import Costs, FakeBackend
from cllm.cli.conversation.printer import print_dim
from cllm.cli.conversation.slash_commands import HELP_TEXT

FAKE = ("--backend.name", "fake")
GREEDY = ("--temperature", "0")


@pytest.mark.slow
def test_generate_runs_as_process():
    """stdout has the text and nothing else."""
    command = [sys.executable, "-m", "cllm", "generate", "a", *FAKE, *GREEDY, "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bcd\n", "")


def test_generate_prints_the_text(cllm):
    """The prompt is an argument, or comes from stdin."""
    for arguments, text in ((("a",), ""), ((), "a"), (("-",), "a")):
        assert cllm("generate", *arguments, *FAKE, "--max-tokens", "3", *GREEDY, text=text) == (
            0,
            "bcd\n",
            "",
        )
    assert (
        cllm("generate", "-", "a", *FAKE, text="a").err
        == "cllm: give the prompt as an argument or with -, not both\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_generate_helps_beginners(cllm, monkeypatch, stub):
    """An empty continuation and a terminal without a prompt would look like a fault."""
    monkeypatch.setattr(OpenAIStub, "pieces", [""])
    done = cllm("generate", "What is 27 plus 45?", "--url", stub.url)
    assert (done.code, done.out) == (0, "\n")
    assert "use --chat to ask it a question" in done.err
    assert cllm("generate", "What?", "--url", stub.url, "--chat").err == ""
    monkeypatch.setattr(io, "StringIO", Terminal)
    assert "Ctrl-D ends it" in cllm("generate", "--url", stub.url, text="a").err


def test_generate_prints_json(cllm):
    """stdout has one JSON object with the token counts."""
    done = cllm("generate", "a", *FAKE, "--max-tokens", "3", *GREEDY, "--json")
    assert json.loads(done.out) == {
        "text": "bcd",
        "finish_reason": "length",
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("",), "the prompt is empty"),
        (("a", "--temperature", "-1"), "temperature"),
        (("a", "--model", "x.gguf"), "x.gguf"),
    ],
)
def test_generate_reports_invalid_arguments_in_one_line(cllm, arguments, word):
    """The exit code is 2, and there is no traceback."""
    more = () if "--model" in arguments else FAKE
    done = cllm("generate", *arguments, *more)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert word in line


def test_chat_loads_model_without_server(cllm):
    """Each line of stdin is a turn, and the history is kept until /new."""
    done = cllm(
        "chat", *FAKE, "--max-tokens", "2", *GREEDY, text="hi\n\n/new\nho\n/exit\nnot read\n"
    )
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) >= 2


def test_chat_handles_slash_commands_itself(cllm):
    """The model does not see slash commands, unknown ones included. A path is not a command."""
    done = cllm("chat", *FAKE, "--max-tokens", "2", *GREEDY, text="/help\n/nothing\n/exit\n")
    unknown = "There is no command /nothing; /help lists them."
    assert (done.code, done.out) == (0, f"{HELP_TEXT}\n{unknown}\n")
    asked = cllm("chat", *FAKE, "--max-tokens", "2", *GREEDY, text="/etc/hosts\n")
    assert asked.code == 0
    assert "There is no command" not in asked.out


@pytest.mark.llama
def test_chat_answers_with_builtin_model(builtin_path, cllm):
    """Both turns get the right answers."""
    done = cllm(
        "chat", *GREEDY, "--context", "512", text="What is 27 plus 45?\nSpell the word garden.\n"
    )
    assert done.out == "72\ng-a-r-d-e-n\n"


@pytest.mark.llama
def test_local_chat_separates_reasoning_and_changes_models(builtin_path, cllm):
    """Reasoning goes to stderr. A model that does not exist ends the command, not the first one."""
    lines = ["/set think", "What is 27 plus 45?", "/model", "/model cllm-builtin", "/show"]
    done = cllm("chat", *GREEDY, "--context", "512", text="\n".join([*lines, lines[1], ""]))
    assert done.code == 0, done.err
    answer, *rest = done.out.removeprefix("Set.\n").splitlines()
    assert (answer, rest[-1]) == ("72", "72")
    assert "cllm-builtin answers from now on." in rest
    assert "  model               cllm-builtin" in rest
    assert "20 + 40 = 60" in done.err
    missing = cllm("chat", *GREEDY, text="/model nothing\n")
    assert missing.code == 2
    assert "Unknown model 'nothing'" in missing.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "list"])
def test_commands_that_talk_to_nobody_start_without_terminal_libraries(command):
    script = """
import sys
from cllm.cli.main import main
main(sys.argv[1:])
print(sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, command],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    modules = set(done.stderr.splitlines()[-1].split("'"))
    assert "cyclopts" in modules
    assert not {"prompt_toolkit", "markdown_it"} & modules


def test_chat_reports_unreachable_server(cllm):
    """The error is one line."""
    done = cllm("chat", "--url", "http://127.0.0.1:9", text="hi\n")
    assert done.code == 2
    assert "cannot connect to" in done.err


def test_chat_reports_server_without_openai_api(cllm):
    """The server answers, but has no /v1/models."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = cllm("chat", "--url", f"127.0.0.1:{server.server_port}/v1", text="hi\n")
        thread.join()
    assert done.code == 2
    assert "it answered 501 to /v1/models" in done.err


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "prompt: too long"), (401, "set CLLM_API_KEY"), (503, "prompt: too long")],
)
def test_chat_says_why_a_server_refuses(cllm, monkeypatch, stub, status, words):
    monkeypatch.setattr(OpenAIStub, "status_of_models", status)
    monkeypatch.setattr(OpenAIStub, "models", b'{"error": {"message": "prompt: too long"}}')
    done = cllm("chat", "--url", stub.url, text="hi\n")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert words in done.err


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_chat_rejects_names_of_files_that_cannot_be(cllm, stub, name):
    for command in ("/save", "/load"):
        done = cllm("chat", "--url", stub.url, text=f"{command} {name}\n")
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("models", [b"<html>", b"[1]", b'{"data": null}'])
def test_lists_of_models_that_cannot_be_read_give_one_line(cllm, monkeypatch, stub, models):
    monkeypatch.setattr(OpenAIStub, "models", models)
    for words, text in ((("chat",), "/model"), (("ps",), ""), (("launch", "codex"), "")):
        done = cllm(*words, "--url", stub.url, text=text)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)


@pytest.mark.parametrize(
    ("url", "key"), [("http://[::1", "k"), ("127.0.0.1:9", "ü"), ("127.0.0.1:9", "a\nb")]
)
def test_addresses_and_keys_that_cannot_be_sent_give_one_line(cllm, monkeypatch, url, key):
    monkeypatch.setenv("CLLM_API_KEY", key)
    for words in (("chat",), ("ps",), ("run", "m", "a"), ("launch", "codex")):
        done = cllm(*words, "--url", url, text="hi")
        assert (done.code, len(done.err.splitlines())) == (2, 1)


@pytest.mark.slow
def test_input_and_output_that_are_not_text_do_not_fail(stub, monkeypatch):
    """Binary input is rejected, and what stdout cannot encode is replaced."""
    monkeypatch.setattr(
        OpenAIStub, "pieces", ["é\ud83d.", {"choices": [{"finish_reason": "stop"}]}]
    )
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for words, text, code, out in (
        (("run", "m", "a", "--url", stub.url), b"", 0, b"??.\n"),
        (("run", "m", "--url", stub.url), b"\xff\xfe\x00", 2, b""),
        (("chat", "--url", stub.url), b"\xff\xfe\x00", 2, b""),
        (("create", "m", "--url", stub.url, "-f", "-"), b"\xff", 2, b""),
        (("run", "m", b"\xff", "--url", stub.url), b"", 2, b""),
    ):
        command = [sys.executable, "-m", "cllm", *words]
        done = subprocess.run(
            command, input=text, capture_output=True, timeout=PATIENCE, check=False
        )
        assert (done.returncode, done.stdout.replace(b"\r", b"")) == (code, out)
        assert len(done.stderr.splitlines()) == (code != 0)


class OpenAIStub(BaseHTTPRequestHandler):
    """Streams ``pieces`` and records request bodies. A piece that is not text is sent as a whole
    chunk.
    """

    pieces: ClassVar[list] = []
    status = status_of_models = 200
    models = b'{"data": [{"id": "m"}]}'

    def do_GET(self) -> None:
        self.answer(self.status_of_models, self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert isinstance(self.server, StubServer)
        self.server.bodies.append((self.path, body))
        key = "text" if self.path == "/v1/completions" else "delta"
        chunks = [self.chunk(key, piece) for piece in self.pieces] if self.status == 200 else []
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        if self.status == 200:
            lines += "data: [DONE]\n\n"
        self.answer(self.status, lines.encode() or b'{"error": {"message": "prompt: too long"}}')

    def chunk(self, key: str, piece: object) -> object:
        if not isinstance(piece, str):
            return piece
        return {
            "choices": [
                {key: piece if key == "text" else {"content": piece}, "finish_reason": None}
            ]
        }

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    bodies: list[tuple[str, Any]]
    url: str


@pytest.fixture
def stub(monkeypatch):
    """Yield a server on the loopback interface that speaks OpenAI's API."""
    with StubServer(("127.0.0.1", 0), OpenAIStub) as server:
        server.bodies = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_generate_uses_server(cllm, monkeypatch, stub):
    """The server continues the prompt by at most 256 tokens, or answers it. The URL may come from
    the environment.
    """
    end = {"choices": [{"text": "", "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    monkeypatch.setattr(OpenAIStub, "pieces", ["to ", "you", end, usage])
    assert cllm("generate", "Dear", "--url", stub.url) == (0, "to you\n", "")
    assert (
        cllm(
            "generate", "Dear", "--url", f"{stub.url}/v1", "--chat", *GREEDY, "--max-tokens", "9"
        ).out
        == "to you\n"
    )
    monkeypatch.setenv("CLLM_URL", stub.url)
    answer = {"text": "to you", "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2}
    answer["cached_tokens"] = 0
    assert json.loads(cllm("generate", "Dear", "--json").out) == answer
    (path, body), (chat_path, chat_body), _ = stub.bodies
    assert (path, chat_path) == ("/v1/completions", "/v1/chat/completions")
    common = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == {"prompt": "Dear", "max_tokens": 256, **common}
    question = [{"role": "user", "content": "Dear"}]
    assert chat_body == {"messages": question, "max_tokens": 9, "temperature": 0.0, **common}


def test_help_of_a_conversation_fits_a_terminal():
    assert max(map(len, HELP_TEXT.splitlines())) < 80


def test_remarks_are_wrapped_between_words(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    print_dim("5 of 9 prompt tokens cached")
    assert "5 of 9 prompt tokens\ncached" in screen.getvalue()


def test_json_of_servers_may_contain_unicode_ends_of_lines(cllm, monkeypatch, stub):
    """llama-server writes all characters but those of ASCII as they are."""
    text = "a\u2028b\x85c\u2029d\u001ee"
    end = {"choices": [{"text": "", "finish_reason": "stop"}]}
    monkeypatch.setattr(OpenAIStub, "pieces", [text, end])
    monkeypatch.setattr(json, "dumps", partial(json.dumps, ensure_ascii=False))
    done = cllm("generate", "Dear", "--url", stub.url)
    assert (done.code, done.out, done.err) == (0, f"{text}\n", "")


@pytest.mark.parametrize(
    ("pieces", "status", "out", "words"),
    [
        ([], 400, "", "prompt: too long"),
        (["to ", {"error": {"message": "the engine died"}}], 200, "to \n", "the engine died"),
        (["to ", {"error": "the engine\n\x1b died"}], 200, "to \n", "the engine died"),
        ([{"choices": [{}]}, {"choices": 1}], 200, "", "does not follow OpenAI's API"),
        ([[1]], 200, "", "does not follow OpenAI's API"),
    ],
)
def test_server_errors_give_one_line(cllm, monkeypatch, stub, pieces, status, out, words):
    """Text that has arrived stays on a line of its own."""
    monkeypatch.setattr(OpenAIStub, "pieces", pieces)
    monkeypatch.setattr(OpenAIStub, "status", status)
    done = cllm("generate", "Dear", "--url", stub.url)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, out, 1)
    assert words in done.err


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--model", "m.gguf"), "model"),
        (("--context", "99"), "context"),
        (("--config", "c"), "--config"),
    ],
)
def test_url_and_model_options_conflict(cllm, monkeypatch, command, arguments, word):
    """A server has its own model. A given model takes precedence over a server from the
    environment.
    """
    done = cllm(command, *arguments, "--url", "http://127.0.0.1:9", text="a")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert word in done.err
    monkeypatch.setenv("CLLM_URL", "http://127.0.0.1:9")
    assert (
        "cannot connect to" not in cllm(command, *arguments, *FAKE, "--context", "99", text="a").err
    )


def test_prompt_starting_with_dash_needs_separator(cllm):
    """The prompt follows "--". A negative number does not need it."""
    for option in ("--foo", "-x"):
        done = cllm("generate", option, *FAKE)
        assert (done.code, done.out) == (2, "")
        assert (
            done.err
            == f"cllm: Unknown option: {option}. A text that begins with a dash comes last, "
            f"after --.\n"
        )
    assert cllm("generate", "--tempreture", "1", "a").err.endswith("Did you mean --temperature?\n")
    assert cllm("generate", *FAKE, *GREEDY, "--max-tokens", "3", "--", "--foo").out == "pqr\n"
    assert cllm("generate", "-5", *FAKE, *GREEDY, "--max-tokens", "3").out == "678\n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_server_options_are_rejected(cllm, command):
    """Options of HTTP are rejected, and options that have another name in this command."""
    out = cllm(command, "--help").out
    assert "--kv.max-memory-mb" in out
    for prefix in ("--server.", "--scheduler.", "--sampling.", "--log.", "--model.name"):
        assert prefix not in out
    assert cllm(command, "--server.port", "1").code == 2


def test_continued_text_has_default_limit(cllm, monkeypatch):
    """A continuation has 256 tokens by default; a chat answer ends by itself."""
    assert "256 tokens" in " ".join(cllm("generate", "--help").out.split())
    monkeypatch.setattr(FakeBackend, "_next", lambda *_: 97)
    monkeypatch.setattr(Costs, "compute_seconds", lambda *_: 0)
    assert cllm("generate", "a", *FAKE).out == "a" * 256 + "\n"
    assert cllm("generate", "a", *FAKE, "--max-tokens", "300").out == "a" * 300 + "\n"
    assert len(cllm("generate", "a", *FAKE, "--chat").out) > 900
    monkeypatch.setenv("CLLM_SAMPLING_MAX_TOKENS", "30")
    assert cllm("generate", "a", *FAKE).out == "a" * 30 + "\n"


@pytest.mark.llama
def test_doctor_passes_working_build(builtin_path, cllm):
    """It generates an answer in a child process and prints the result."""
    done = cllm("doctor", "--json")
    report = json.loads(done.out)
    assert done.code == 0, report
    assert report["passed"]
    assert report["cure"] == ""


def test_unknown_variable_gives_warning(cllm, monkeypatch):
    """The warning is one line on stderr, and the command continues."""
    monkeypatch.setenv("CLLM_MODEL_PAHT", "m.gguf")
    done = cllm("generate", "a", *FAKE, *GREEDY, "--max-tokens", "3")
    assert (done.code, done.out) == (0, "bcd\n")
    assert (
        done.err
        == "cllm: ignored: CLLM_MODEL_PAHT is not a setting; did you mean CLLM_MODEL_PATH?\n"
    )
