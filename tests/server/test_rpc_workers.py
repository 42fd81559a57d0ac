"""A model that is divided between two RPC workers, with a build of llama.cpp that has RPC.

``CLLM_RPC_LIBRARY`` names the folder with its libraries; docs/howto/large_models.md says how to make
one. Without it, these tests are skipped.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

FOLDER = os.environ.get("CLLM_RPC_LIBRARY", "")
pytestmark = [
    pytest.mark.llama,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="CLLM_RPC_LIBRARY names no build with RPC"),
]
LIBRARY = {"LLAMA_CPP_LIB_PATH": str(Path(FOLDER).resolve())}
QUESTION = {"messages": [{"role": "user", "content": "What is 27 plus 45?"}], "temperature": 0}
TENSOR = ("--backend.llama-cpp.split", "tensor")
# The prompt and the number of tokens of a stream that lasts long enough to be disturbed.
TEXT = {"prompt": "1 2 3", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Worker:
    """A process of ``cllm rpc-worker`` that can be started again at its address."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "cllm", "rpc-worker", "--address", self.address]
        self.process = subprocess.Popen(
            [*command, "--threads", "1"],
            env={**os.environ, **LIBRARY},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.warning = self.process.stderr.readline()
        assert self.process.stderr.readline().startswith("cllm: lending CPU at ")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


@pytest.fixture
def workers():
    both = [Worker(), Worker()]
    yield both
    for worker in both:
        worker.kill()


def options(workers, *more: str) -> list[str]:
    addresses = ",".join(worker.address for worker in workers)
    return ["--backend.llama-cpp.rpc", addresses, "--kv.max-memory-mb", "100", *more]


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cllm("generate", "What is 27 plus 45?", "--chat", "--temperature", "0", *arguments)


def cllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cllm", *arguments],
        env={**os.environ, **LIBRARY},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def read_stream(server, body=TEXT):
    """Yield the texts of a streamed completion."""
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event["choices"][0]["text"]


@pytest.mark.parametrize("split", ["layer", "tensor"])
def test_model_is_divided_between_two_workers(workers, split) -> None:
    """By whole layers, or every layer; the answer is right, and each start warns."""
    done = generate(*options(workers, "--backend.llama-cpp.split", split))
    assert (done.returncode, done.stdout.strip()) == (0, "72"), done.stderr
    for worker in workers:
        assert f"{worker.address}: RPC is neither encrypted nor authenticated" in done.stderr
        assert "RPC is neither encrypted nor authenticated" in worker.warning


@pytest.mark.parametrize("split", ["layer", "tensor"])
def test_saved_prefixes_are_loaded_from_disk(workers, start_server, tmp_path, split) -> None:
    """Their keys and values are on both workers."""
    facts = " ".join(f"Item {i} costs {3 * i + 7} coins." for i in range(20))
    body = {**QUESTION, "messages": [{"role": "user", "content": f"{facts} What is 27 plus 45?"}]}
    folder = ("--kv.disk-cache", str(tmp_path), "--backend.llama-cpp.split", split)

    def ask():
        server = start_server(*options(workers, *folder), **LIBRARY)
        answer = server.client.post("/v1/chat/completions", json=body).json()
        assert server.stop(signal.SIGTERM) == 0
        usage = answer["usage"]
        num_missing = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], num_missing

    text, _ = ask()
    assert ask() == (text, 1)


def test_model_that_tensors_cannot_be_split_of_is_one_line(workers, real_model) -> None:
    """llama.cpp aborts the engine process."""
    model = str(real_model("gemma3-270m.gguf"))
    done = cllm("serve", model, "--port", "0", *options(workers, *TENSOR))
    assert done.returncode == 2
    assert "many models need backend.llama_cpp.split layer" in done.stderr


def test_shares_and_devices_can_be_chosen(workers) -> None:
    for more in (
        ("--backend.llama-cpp.tensor-split", "3,1"),
        ("--backend.llama-cpp.devices", "RPC1"),
        ("--backend.llama-cpp.split", "none", "--backend.llama-cpp.main-gpu", "1"),
    ):
        done = generate(*options(workers, *more))
        assert (done.returncode, done.stdout.strip()) == (0, "72"), done.stderr


def test_build_with_rpc_computes_on_the_cpu_without_workers() -> None:
    """llama.cpp says that it could use a GPU."""
    done = generate("--kv.layout", "paged")
    assert (done.returncode, done.stdout.strip()) == (0, "72"), done.stderr


def test_missing_worker_is_one_line(workers) -> None:
    workers[1].kill()
    done = generate(*options(workers))
    assert done.returncode == 2
    assert f"cllm: backend.llama_cpp.rpc: {workers[1].address} cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    workers[1].start()


def test_worker_serves_one_engine_at_a_time(workers, start_server) -> None:
    start_server(*options(workers), **LIBRARY)
    done = generate(*options(workers))
    assert done.returncode == 2
    assert "a worker serves only one engine at a time" in done.stderr


def test_stream_continues_after_a_worker_has_died(workers, start_server) -> None:
    """The engine ends with the worker. Once the worker is back, the next engine continues the
    stream, and no request is suspected.
    """
    server = start_server(*options(workers), **LIBRARY)
    whole = "".join(read_stream(server))
    stream = read_stream(server, {**TEXT, "prompt": "1 2 3"})
    begin = next(stream)
    workers[0].kill()
    wait_for(server, "the engine died (an RPC worker was lost)")
    wait_for(server, "the engine failed to start: backend.llama_cpp.rpc: ")
    server.wait_for_log("cannot be reached")
    workers[0].start()
    assert begin + "".join(stream) == whole
    assert server.client.post("/v1/chat/completions", json=QUESTION).status_code == 200
    assert server.stop(signal.SIGTERM) == 0


def wait_for(server, text: str) -> None:
    end = time.monotonic() + PATIENCE
    while text not in server.log:
        assert time.monotonic() < end, server.log
        time.sleep(0.05)
