"""A replica that shuts down hands its saved prefixes over to another one."""

import os
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from cllm.backends.llama_cpp.state_format import CELL, WORD
from cllm.engine.snapshot_files import (
    LENGTH,
    MAGIC,
    Head,
    checksums,
    name_file,
    read_tokens,
)
from cllm.server.cluster import hand_over
from cllm.server.cluster.hand_over import STATE_PATH, HandOverFailed, Leaving, StoredPrefixes
from cllm.server.cluster.key import KEY_HEADER
from cllm.server.cluster.lease import LEASE_PATH

KEY = "a-key-of-a-cluster"
HEADERS = {KEY_HEADER: KEY}
MODEL = "cllm-builtin"
FACTS = " ".join(f"Item {i} costs {3 * i + 7} coins." for i in range(30))
QUESTION = [{"role": "user", "content": f"{FACTS} What is 27 plus 45?"}]
OPTIONS = ["--context", "1024", "--max-num-seqs", "4", "--log.level", "info"]

llama = pytest.mark.llama


@pytest.fixture
def replica(start_server, tmp_path):
    """Return a function that starts a replica with a disk cache of its own."""

    def start(name: str, *arguments: str):
        options = ["--kv.disk-cache", str(tmp_path / name), "--cluster.hand-over", "60"]
        return start_server(*OPTIONS, *options, *arguments, CLLM_CLUSTER_KEY=KEY)

    return start


def ask(server, salt: str = ""):
    """Return the text of the answer, how many tokens of the prompt were cached, and how many it
    has.
    """
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 20}
    body |= {"cache_salt": salt} if salt else {}
    answer = server.client.post("/v1/chat/completions", json=body).json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], cached, usage["prompt_tokens"]


def name_heir(server, heir: str) -> None:
    answer = server.client.get(LEASE_PATH, params={"heir": heir}, headers=HEADERS)
    assert answer.status_code == 200


def save_one(server, folder):
    """Let a server end with one prefix in its folder, and return the content of the file."""
    ask(server)
    assert server.stop() == 0
    (file,) = folder.glob("*.kv")
    return file.read_bytes()


def put(server, content: bytes, **options):
    return server.client.put(
        STATE_PATH, params={"model": MODEL}, content=content, headers=HEADERS, **options
    )


def split(content: bytes) -> tuple[Head, bytes]:
    (length,) = LENGTH.unpack_from(content, len(MAGIC))
    begin = len(MAGIC) + LENGTH.size
    head = msgspec.msgpack.decode(content[begin : begin + length], type=Head)
    return head, content[begin + length :]


def join(head: Head, data: bytes) -> bytes:
    """Return a file whose size and checksums are right."""
    head.size, head.checksums = len(data), checksums(memoryview(data))
    encoded = msgspec.msgpack.encode(head)
    return MAGIC + LENGTH.pack(len(encoded)) + encoded + data


@llama
def test_next_request_of_a_prefix_is_cached_on_the_heir(replica):
    first, second = replica("first"), replica("second")
    text, _, num_tokens = ask(first)
    name_heir(first, second.url)
    assert first.stop() == 0
    first.wait_for_log(f"handed 1 prefixes over to {second.url}")
    before = second.engine_pid()
    again, cached, _ = ask(second)
    assert (again, cached) == (text, num_tokens - 1)
    assert second.engine_pid() == before


@llama
def test_heir_with_other_cells_gets_nothing(replica):
    first, second = replica("first"), replica("second", "--kv.type", "q8_0")
    ask(first)
    name_heir(first, second.url)
    assert first.stop() == 0
    first.wait_for_log(f"handed 0 prefixes over to {second.url}")
    first.wait_for_log("the heir has another file or other settings")
    assert ask(second)[1] < 50  # what all prompts share is saved at the start at most


@llama
def test_heir_that_is_gone_costs_no_more_than_a_line(replica):
    first, second = replica("first"), replica("second")
    ask(first)
    name_heir(first, second.url)
    second.stop()
    assert first.stop() == 0
    first.wait_for_log("prefixes are no longer handed over")


@llama
def test_damaged_and_foreign_files_are_refused(replica, tmp_path):
    """With a line in the log, and nothing is left in the folder."""
    content = save_one(replica("first"), tmp_path / "first")
    second = replica("second")
    head, data = split(content)
    with_other = {
        "it is of another file": {"fingerprint": head.fingerprint + " "},
        "it has tokens that are not in the vocabulary": {
            "tokens": (read_tokens(head) - 1000).astype("<i4").tobytes()
        },
        "it has more tokens than the context": {"tokens": 5 * head.tokens},
        "its tokens are damaged": {"tokens": head.tokens[:-1]},
        "its salt is too long": {"salt": "x" * 2000},
    }
    wrong = {
        reason: join(msgspec.structs.replace(head, **fields), data)
        for reason, fields in with_other.items()
    }
    wrong["it is damaged or incomplete"] = content[:-1]
    wrong["not a snapshot of this version"] = b"cLLM KV 1\n" + content[10:]
    wrong["the head is too long"] = MAGIC + b"\xff" * 100
    wrong["the head is damaged"] = content[:200]
    flipped = bytearray(content)
    flipped[-100] ^= 1
    for reason, sent in [*wrong.items(), ("it is damaged or incomplete", bytes(flipped))]:
        answer = put(second, sent)
        assert (answer.status_code, reason in answer.text) == (400, True), (reason, answer.text)
        second.wait_for_log(f"is not used: {reason}")
    assert not [*(tmp_path / "second").iterdir()]
    assert put(second, content).status_code == 204
    assert [file.name for file in (tmp_path / "second").iterdir()] == [name_file(head)]
    for result, count in (("refused", len(wrong) + 1), ("stored", 1)):
        line = f'cllm:prefixes_received_total{{result="{result}"}} {float(count)}'
        assert line in second.client.get("/metrics").text


@llama
@pytest.mark.parametrize("layout", ["paged", "unified", "partitioned"])
def test_state_that_lies_is_not_loaded(replica, tmp_path, layout):
    """Its file is intact, but the state in it is not one of these tokens. The engine computes
    the prompt, and goes on.
    """
    content = save_one(replica("first"), tmp_path / "first")
    second = replica("second", "--kv.layout", layout)
    pid = second.engine_pid()
    head, data = split(content)
    num_tokens = len(read_tokens(head))
    layers = WORD + num_tokens * CELL + 4
    lies = [
        b"",
        data[:-1],
        b"\xff" * len(data),
        np.uint32(num_tokens - 1).tobytes() + data[WORD:],
        data[:WORD] + b"\xff\xff\xff\x7f" + data[2 * WORD :],  # a position
        data[:layers] + b"\xff\xff\xff\xff" + data[layers + 4 :],
        data[: layers + 8] + bytes(8) + data[layers + 16 :],  # bytes in a row
    ]
    text = ask(second)[0]
    for number, lie in enumerate(lies):
        head.salt = f"lie {number}"  # as the request has it, so that nothing else is shared
        assert put(second, join(head, lie)).status_code == 204
        assert ask(second, salt=head.salt)[:2] == (text, 0)
        wait_for(second, "cannot use a prefix that was read from disk", number + 1)
    assert second.engine_pid() == pid
    head.salt = "truth"
    assert put(second, join(head, data)).status_code == 204
    again, cached, num_prompt_tokens = ask(second, salt="truth")
    assert (again, cached) == (text, num_prompt_tokens - 1)


def wait_for(server, text: str, count: int) -> None:
    end = time.monotonic() + 60
    while server.log.count(text) < count:
        assert time.monotonic() < end, server.log
        time.sleep(0.05)


@llama
def test_other_servers_accept_no_prefixes(replica, start_server, tmp_path):
    """Without the key, the option, a disk cache, or the model."""
    server = replica("first")
    query = {"params": {"model": MODEL}}
    assert server.client.put(STATE_PATH, content=b"x", **query).status_code == 404
    wrong = {KEY_HEADER: KEY + "x"}
    assert server.client.put(STATE_PATH, content=b"x", headers=wrong, **query).status_code == 404
    other = {"params": {"model": "other"}, "headers": HEADERS}
    assert server.client.put(STATE_PATH, content=b"x", **other).status_code == 404
    assert server.client.get(STATE_PATH, headers=HEADERS, **query).json()["names"] == []
    folder = ("--kv.disk-cache", str(tmp_path / "second"))
    for options in (folder, ("--cluster.hand-over", "5")):
        assert put(start_server(*OPTIONS, *options, CLLM_CLUSTER_KEY=KEY), b"x").status_code == 404


@llama
def test_prefix_larger_than_the_disk_cache_is_refused(replica, tmp_path):
    server = replica("first", "--kv.disk-cache-mb", "1")
    assert put(server, b"x" * 1_000_001).status_code == 413
    assert not [*(tmp_path / "first").iterdir()]


def test_heir_must_be_the_address_of_a_server(start_server):
    server = start_server("--backend.name", "fake", CLLM_CLUSTER_KEY=KEY)
    for heir in ("ftp://x", "http://x/path", "http://x y", "http://x?a", "http://u#b", "x:1"):
        answer = server.client.get(LEASE_PATH, params={"heir": heir}, headers=HEADERS)
        assert answer.status_code == 400, heir


class Heir:
    """A client whose server answers puts with ``status``."""

    def __init__(
        self, fingerprint: str, names: list[str], status: int = 204, get_status: int = 200
    ) -> None:
        self.stored = StoredPrefixes(fingerprint, names)
        self.status = status
        self.get_status = get_status
        self.sent: list[bytes] = []

    def get(self, path, params):
        return SimpleNamespace(
            status_code=self.get_status, content=msgspec.json.encode(self.stored)
        )

    def put(self, path, params, content, headers):
        self.sent.append(b"".join(content))
        assert int(headers["content-length"]) == len(self.sent[-1])
        return SimpleNamespace(status_code=self.status)


@pytest.fixture
def leaving(tmp_path):
    """Three files of a model, and one of another model that was used last."""
    for number in range(4):
        tokens = np.full(70, number, "<i4").tobytes()
        head = Head("model" if number < 3 else "other", tokens, 0, [])
        path = tmp_path / name_file(head)
        path.write_bytes(join(head, b"state %d" % number))
        os.utime(path, ns=(number, number))
    return Leaving("m", tmp_path, "model", 0.0)


def list_numbers(heir: Heir) -> list[int]:
    return [int(data[-1:]) for data in heir.sent]


def send(heir: Heir, leaving: Leaving, seconds: float = 60) -> int:
    """Return how many files the heir has taken."""
    return len([*hand_over.send_files(heir, leaving, time.monotonic() + seconds)])


def test_prefixes_used_last_are_sent_first(leaving):
    heir = Heir("model", [])
    assert send(heir, leaving) == 3
    assert list_numbers(heir) == [2, 1, 0]
    assert heir.sent[0] == hand_over.list_by_time(leaving.folder)[2].read_bytes()


def test_files_that_the_heir_has_or_refuses_are_skipped(leaving):
    paths = hand_over.list_by_time(leaving.folder)
    heir = Heir("model", [paths[1].name])
    assert send(heir, leaving) == 2
    assert list_numbers(heir) == [2, 0]
    assert send(Heir("model", [], 400), leaving) == 0
    with pytest.raises(HandOverFailed, match="status 503"):
        send(Heir("model", [], 503), leaving)
    assert send(heir := Heir("other", []), leaving) == 0
    assert not heir.sent


def test_heir_without_the_model_gets_nothing(leaving):
    heir = Heir("model", [], get_status=404)
    assert send(heir, leaving) == 0
    assert not heir.sent
    with pytest.raises(HandOverFailed, match="status 500"):
        send(Heir("model", [], get_status=500), leaving)


def test_network_that_is_slower_than_computing_ends_the_hand_over(leaving, caplog):
    caplog.set_level("INFO")
    slow = Heir("model", [])
    assert send(slow, leaving._replace(prompt_token_seconds=1e-12)) == 1
    assert list_numbers(slow) == [2]
    assert "no more prefixes of m are handed over" in caplog.text
    assert send(Heir("model", []), leaving._replace(prompt_token_seconds=10.0)) == 3


def test_hand_over_ends_in_time(leaving):
    heir = Heir("model", [])
    with pytest.raises(HandOverFailed, match="no time left"):
        send(heir, leaving, -1)
    assert not heir.sent
