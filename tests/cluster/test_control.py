"""The commands that place replicas, as far as they need no Ray."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE
from tiny_models import write_tiny_model

from cllm.backends.llama_cpp.rpc import resolve
from cllm.cli import replicas
from cllm.cli.settings_flags import settings_from_flags
from cllm.cluster.control import Starting, ask, check_private, make_environment
from cllm.errors import StartupError


@pytest.mark.parametrize(("text", "numbers"), [("2", (2, 2)), ("1..8", (1, 8)), ("1..1", (1, 1))])
def test_number_of_replicas_may_be_a_range(text, numbers):
    assert replicas.read_range(text) == numbers


@pytest.mark.parametrize("text", ["0", "8..1", "0..2", "many", "1..", "-1", "1...2"])
def test_wrong_number_of_replicas_is_refused(text):
    with pytest.raises(StartupError, match=r"must be like 2 or 1\.\.8"):
        replicas.read_range(text)


@pytest.mark.parametrize("address", ["10.0.0.4", "127.0.0.1", "100.64.0.7"])
def test_ray_may_use_the_private_networks_that_workers_may_use(address):
    check_private(address)
    assert resolve(f"{address}:1").parts == (address, 1)


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "8.8.8.8", "192.0.2.1", "240.0.0.1", "example.com", "::1", ""]
)
def test_ray_is_started_on_private_addresses_only(address):
    with pytest.raises(StartupError):
        check_private(address)


def test_ray_always_gets_a_token_that_is_not_the_cluster_key():
    key = "the-key-of-the-test-cluster"
    alone, shared = make_environment(key, "127.0.0.1"), make_environment(key, "10.0.0.4")
    assert alone["RAY_AUTH_MODE"] == shared["RAY_AUTH_MODE"] == "token"
    assert alone["RAY_AUTH_TOKEN"] == shared["RAY_AUTH_TOKEN"] != key
    other = make_environment(f"{key}2", "10.0.0.4")
    assert other["RAY_AUTH_TOKEN"] != shared["RAY_AUTH_TOKEN"]
    assert alone.keys() - shared.keys() == {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}


def test_missing_extra_is_explained(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"pip install 'cllm\[cluster\]'"):
        replicas.serve()


def test_cluster_that_is_starting_is_not_taken_for_one_that_is_gone(tmp_path):
    with pytest.raises(Starting):
        ask(tmp_path, "status")
    with pytest.raises(StartupError, match="no cluster runs here"):
        ask(tmp_path / "gone", "status")


def test_no_machine_joins_a_cluster_on_loopback(monkeypatch):
    monkeypatch.setattr(replicas, "check_ray", lambda: None)
    with pytest.raises(StartupError, match="started without --address"):
        replicas.join("127.0.0.1:6380", address="127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
def test_no_process_is_left_of_a_ray_that_ends(monkeypatch, tmp_path):
    """Not even one that ignores SIGTERM, in a process group of its own."""
    script = f"set -m; trap '' TERM; sleep 600 & echo $! > {tmp_path}/pid; exit 3"
    monkeypatch.setenv("CLLM_CLUSTER_KEY", "the-key-of-the-test-cluster")
    monkeypatch.setattr(replicas, "check_ray", lambda: None)
    monkeypatch.setattr(replicas, "write_join", lambda *_: ["bash", "-c", script])
    with pytest.raises(StartupError, match="exit code 3"):
        replicas.join("10.0.0.4:6380", address="10.0.0.5")
    command = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    end = time.monotonic() + PATIENCE
    while command.exists() and command.read_bytes():  # a zombie has no command
        assert time.monotonic() < end
        time.sleep(0.05)


def test_upgrade_names_only_the_settings_that_are_given(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(replicas, "find_folder", lambda settings: tmp_path)
    monkeypatch.setattr(replicas, "ask", lambda *_, settings: sent.append(settings))
    monkeypatch.delenv("CLLM_SERVER_KEYS_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_tiny_model("llama", tmp_path / "m.gguf")
    replicas.upgrade()
    replicas.upgrade(settings={"scheduler.max_num_seqs": 3, "server.port": 9000})
    replicas.upgrade("m.gguf")
    path = str(tmp_path / "m.gguf")  # replicas run in other folders
    assert sent == [{}, {"scheduler.max_num_seqs": 3}, {"model.path": path}]


def test_replicas_get_the_settings_of_requests_and_the_front_those_of_connections(monkeypatch):
    monkeypatch.delenv("CLLM_SERVER_KEYS_FILE", raising=False)
    of_replicas = {"server.strict": True, "server.allow_model_changes": True}
    of_front = {"server.port": 9000, "server.allowed_hosts": ["a"], "log.level": "debug"}
    loaded = settings_from_flags(None, of_replicas | of_front)
    assert replicas.collect_settings(loaded) == of_replicas | {"log.level": "debug"}


@pytest.mark.parametrize(
    ("size", "words"),
    [(None, "There is no file"), (0, "is empty"), (100, "m.gguf"), (-9, "m.gguf")],
)
def test_model_that_is_missing_or_damaged_is_refused_before_ray_starts(tmp_path, size, words):
    path = tmp_path / "m.gguf"
    if size is not None:
        write_tiny_model("llama", path)
        path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StartupError, match=words) as error:
        replicas.collect_settings(settings_from_flags(None, None, str(path)))
    assert "\n" not in str(error.value)
