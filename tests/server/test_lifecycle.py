"""Start and end of the processes, and recovery when one of them dies."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import preloaded
import pytest
from conftest import PATIENCE

FAKE = ("--backend.name", "fake", "--context", "32768")
LONG = {"prompt": "a", "max_tokens": 32_000, "stream": True, "ignore_eos": True}  # minutes


def serve(*arguments):
    """Run a ``cllm serve`` that is expected to end by itself."""
    return preloaded.run("serve", *arguments)


def one_line(result):
    """Check that a start failed with exit code 2, and return its one-line error."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    *loading, line = result.stderr.splitlines()
    assert all(line.startswith("cllm: loading ") for line in loading)
    assert line.startswith("cllm: ")
    return line


def events(server, body, into):
    """Read a stream in the background into the list ``into``; its last item is how the stream
    ended.
    """

    def read():
        try:
            with server.client.stream("POST", "/v1/completions", json=body) as answer:
                into.extend(line for line in answer.iter_lines() if line)
            into.append("end")
        except Exception as error:  # noqa: BLE001
            into.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def wait_for(condition, timeout=PATIENCE):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def alive(pid):
    """Return whether the process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.llama
def test_unknown_architecture_fails_with_one_line(builtin_path, tmp_path):
    """The line names the architecture."""
    path = tmp_path / "model.gguf"
    path.write_bytes(builtin_path.read_bytes().replace(b"qwen3", b"qwenX"))
    assert "qwenX" in one_line(serve(path))


@pytest.mark.llama
@pytest.mark.slow
def test_file_that_aborts_llama_cpp_fails_with_one_line(builtin_path, tmp_path):
    """Its vocabulary has a token twice. Only the engine process dies."""
    path = tmp_path / "model.gguf"
    path.write_bytes(
        builtin_path.read_bytes().replace(b"\x01\0\0\0\0\0\0\x005", b"\x01\0\0\0\0\0\0\x006", 1)
    )
    line = one_line(serve(path))
    assert f"{path} is damaged, or llama.cpp does not support it: llama-vocab.cpp" in line
    in_process = preloaded.run("generate", "--model", path, "a")
    assert (
        one_line(in_process) == f"cllm: {path} is damaged: its vocabulary has the token '6' twice"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--scheduler.policy", "nobody:Nothing"), "scheduler.policy must be fair"),
        (("--scheduler.speculation", "draft_model"), "model.draft_path"),
        (("--scheduler.trace-file", "/proc/nowhere"), "the trace /proc/nowhere"),
    ],
)
def test_invalid_scheduler_option_fails_with_one_line(arguments, word):
    """A policy, a draft model, a folder, a file."""
    assert word in one_line(serve(*FAKE, *arguments))


@pytest.mark.llama
def test_unusable_disk_cache_fails_with_one_line(builtin_path):
    assert "kv.disk_cache" in one_line(serve("--kv.disk-cache", "/proc/nowhere"))


@pytest.mark.llama
@pytest.mark.parametrize(
    "arguments",
    [("--context", "4096", "--kv.max-memory-mb", "2"), ("--kv.max-memory-mb", "900000")],
)
def test_too_little_memory_fails_with_one_line(builtin_path, arguments):
    """The line has the sizes."""
    assert " MB" in one_line(serve(*arguments)).replace(" GB", " MB").replace(" TB", " MB")


def test_server_is_alive_while_loading_and_then_ready(fake_server):
    """Liveness and readiness have separate routes."""
    assert fake_server.client.get("/health").json() == {"status": "healthy", "model_loaded": True}
    assert fake_server.client.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("when", ["cllm: loading", "at once"])
def test_ctrl_c_while_loading_exits_with_130(when):
    """Like every interrupted command. A server that was ready exits with 0."""
    command = [sys.executable, "-m", "cllm", "serve", *FAKE, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        if when == "at once":
            # it imports
            wait_for(lambda: "_pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
        else:
            assert process.stderr.readline().startswith(when)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_sigterm_lets_running_streams_finish(start_server):
    """New requests are rejected, the stream ends normally, the child processes end, and the exit
    code is 0.
    """
    server = start_server(*FAKE)
    engine, lines = server.engine_pid(), []
    thread = events(server, {**LONG, "max_tokens": 60}, lines)
    wait_for(lambda: len(lines) > 5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    thread.join()
    assert lines[-2:] == ["data: [DONE]", "end"]
    assert json.loads(lines[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert not alive(engine)


@pytest.mark.slow
def test_end_of_stdin_lets_running_streams_finish(start_server):
    """With --until-stdin-ends, the end of the parent process does what SIGTERM does."""
    server = start_server(*FAKE, "--until-stdin-ends", stdin=subprocess.PIPE)
    engine, lines = server.engine_pid(), []
    thread = events(server, {**LONG, "max_tokens": 60}, lines)
    wait_for(lambda: len(lines) > 5)
    server.process.stdin.close()
    assert server.process.wait(60) == 0
    thread.join()
    assert lines[-2:] == ["data: [DONE]", "end"]
    assert json.loads(lines[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert not alive(engine)


@pytest.mark.slow
def test_end_of_stdin_ends_a_server_that_is_starting():
    """The server ends although its model has not been loaded yet."""
    command = [sys.executable, "-m", "cllm", "serve", *FAKE, "--port", "0", "--until-stdin-ends"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode in (0, 128 + signal.SIGTERM), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_streams_get_an_error_at_the_drain_timeout(start_server):
    """They end with an error event and [DONE], and the server exits normally."""
    server = start_server(*FAKE, "--server.drain-timeout", "0.3")
    lines = []
    thread = events(server, LONG, lines)
    wait_for(lambda: len(lines) > 5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    thread.join()
    assert "shutting down" in json.loads(lines[-3].removeprefix("data: "))["error"]["message"]
    assert lines[-2:] == ["data: [DONE]", "end"]


@pytest.mark.slow
def test_second_signal_ends_without_draining(start_server):
    """Neither the stream nor the drain timeout delays the end."""
    server = start_server(*FAKE, "--server.drain-timeout", "600")
    lines = []
    thread = events(server, LONG, lines)
    wait_for(lambda: len(lines) > 5)
    server.process.send_signal(signal.SIGINT)
    wait_for(
        lambda: "shuts down with 1 request; it waits up to 600 s, Ctrl-C again ends" in server.log
    )
    server.process.send_signal(signal.SIGINT)
    server.process.wait(60)
    thread.join()
    assert lines[-2:] == ["data: [DONE]", "end"]
    assert "shutting down" in lines[-3]


@pytest.mark.slow
def test_streams_survive_the_death_of_the_engine(start_server):
    """However it dies, each stream continues with the text that it has without that. The server
    says that it is degraded until the next engine is ready.
    """
    server = start_server(*FAKE)

    def ask(seed, lines):
        body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": seed}
        return events(server, body, lines)

    def text_of(lines):
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])

    for seed, how in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)):
        lines, calm = [], []
        ask(seed, calm).join(PATIENCE)
        thread = ask(seed, lines)
        wait_for(lambda lines=lines: len(lines) > 5)
        os.kill(server.engine_pid(), how)
        wait_for(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/health").json() == {"status": "degraded", "model_loaded": False}
        answer = server.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 3})
        assert answer.status_code == 200, "it waits for the next engine"
        thread.join(PATIENCE)
        assert text_of(lines) == text_of(calm)
        assert lines[-2:] == ["data: [DONE]", "end"]
        assert server.wait_until_idle()["num_seq_ids_in_use"] == 0
    assert server.metric("engine_restarts_total") == 3
    assert server.stop() == 0


@pytest.mark.slow
def test_hung_engine_times_out_and_the_server_still_ends(start_server):
    """504, or an error event in a stream. Shutdown kills the engine, which no longer reads its
    messages.
    """
    server = start_server(
        *FAKE, "--scheduler.request-timeout", "1", "--server.drain-timeout", "0.1"
    )
    engine, lines = server.engine_pid(), []
    thread = events(server, LONG, lines)
    wait_for(lambda: len(lines) > 5)
    os.kill(engine, signal.SIGSTOP)
    answer = server.client.post("/v1/completions", json={"prompt": "b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    thread.join(PATIENCE)
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert server.stop() == 0
    wait_for(lambda: not alive(engine))


@pytest.mark.slow
def test_request_to_an_idle_engine_that_was_stopped_is_answered_by_the_next_one(start_server):
    """Without a time limit for the request."""
    server = start_server(*FAKE)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    answer = server.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert not alive(engine)
    server.wait_for_log("has read no message for")


@pytest.mark.slow
def test_engine_ends_when_the_api_process_dies(start_server):
    """No orphan keeps the model's memory or the port."""
    server = start_server(*FAKE)
    engine = server.engine_pid()
    thread = events(server, LONG, [])
    server.stop(signal.SIGKILL)
    thread.join()
    wait_for(lambda: not alive(engine))
    with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        pass


@pytest.mark.slow
def test_renderer_process_is_replaced_and_ends_with_the_server(start_server):
    """It runs before the first chat, and is replaced when it has died or was stopped."""
    server = start_server(*FAKE)

    def renderers():
        return server.children("cllm.text.templates.chat_template")

    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    wait_for(renderers)
    first = renderers()
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert renderers() == first
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{first[0]}").exists())  # the server has been told
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    (stopped,) = renderers()
    os.kill(stopped, signal.SIGSTOP)
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    (second,) = renderers()
    assert second != stopped
    server.stop(signal.SIGKILL)
    wait_for(lambda: not alive(second))


@pytest.mark.llama
def test_idle_server_hardly_wakes(builtin_server):
    """
    After having served, both processes together wake 10 times a second, for uvicorn's clock, and so use
    almost no CPU.

    What one of these moments costs depends on the machine (0.2 to 2 ms), so they are counted.
    """
    builtin_server.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 20})
    builtin_server.wait_until_idle()
    pids = builtin_server.process.pid, builtin_server.engine_pid()

    def idles():
        wakings, seconds = count_wakings(*pids), builtin_server.cpu_seconds(*pids)
        time.sleep(4)
        return (
            count_wakings(*pids) - wakings <= 60
            and builtin_server.cpu_seconds(*pids) - seconds <= 0.2
        )

    assert any(idles() for _ in range(3)), "at least the third time nothing is left to be tidied up"


def count_wakings(*pids):
    """Return how often the threads of the processes have waited for something so far."""
    states = [
        path.read_text() for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/status")
    ]
    return sum(
        int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", state, re.MULTILINE)[1])
        for state in states
    )
