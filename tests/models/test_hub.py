"""Downloads from a fake hub on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from fake_hub import CHECKPOINT, LARGE, SMALL, TOKEN, FakeHub
from huggingface_hub import close_session, constants

from cllm.errors import StartupError
from cllm.models import hub
from cllm.models.catalog import derive_model_name
from cllm.models.checkpoint import read_checkpoint
from cllm.models.file_names import Form
from cllm.models.model_file import list_files


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub for huggingface_hub, with an empty cache. The library reads its constants at import, so
    they are patched.
    """
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def quiet(file: str, done: int, total: int) -> None:
    pass


def refusal(repo: str, quantization: str | None = None, form: Form | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        hub.download(repo, quantization, quiet, form)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_download_is_reused_from_the_cache(fake_hub: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.download("o/models", None, lambda *report: seen.append(report))
    assert path.read_bytes() == SMALL
    assert path.name == "m-Q4_0.gguf"
    assert derive_model_name(path) == "o/models"
    assert seen[-1] == ("m-Q4_0.gguf", len(SMALL), len(SMALL))
    downloads = len([request for request in fake_hub.requests if request[0] == "GET"])
    assert hub.download("o/models", "Q4_0", quiet) == path
    again = [request for request in fake_hub.requests if request[0] == "GET"][downloads:]
    assert all("/api/" in request[1] for request in again)


def test_checkpoint_is_downloaded_if_there_is_no_gguf_file(fake_hub: FakeHub) -> None:
    """Its configuration, tokenizer and safetensors, but no pickle."""
    seen: list[tuple[str, int, int]] = []
    folder = hub.download("o/tuned", None, lambda *report: seen.append(report))
    assert read_checkpoint(folder).num_parameters == 9
    assert {file.name for file in folder.iterdir()} == {
        *("config.json", "tokenizer_config.json", "model.safetensors"),
    }
    assert seen[-1] == ("model.safetensors", seen[-1][2], seen[-1][2])
    assert derive_model_name(folder) == "o/tuned"
    assert hub.list_cached() == {"o/tuned": folder}
    assert hub.download("o/both", None, quiet).name == "m-Q4_0.gguf"
    assert hub.download("o/both", None, quiet, "checkpoint").is_dir()
    assert "o/models has no checkpoint with config.json" in refusal("o/models", form="checkpoint")
    assert "o/tuned has no complete GGUF model" in refusal("o/tuned", "Q4_0")
    assert "o/tuned has no complete GGUF model" in refusal("o/tuned", form="gguf")


def test_cached_checkpoint_is_used_without_a_network(fake_hub: FakeHub) -> None:
    folder = hub.download("o/tuned", None, quiet)
    fake_hub.shutdown()
    fake_hub.server_close()
    assert hub.download("o/tuned", None, quiet) == folder
    (folder / "model.safetensors").unlink()  # an incomplete one is not listed
    assert hub.list_cached() == {}
    assert "Cannot reach http://127.0.0.1" in refusal("o/tuned")


def test_cached_checkpoint_is_removed(fake_hub: FakeHub) -> None:
    folder = hub.download("o/tuned", None, quiet)
    files = list_files(folder)
    hub.verify(files)
    assert hub.remove_cached(files) == sum(map(len, CHECKPOINT.values())) - len(LARGE) - 5
    assert hub.list_cached() == {}
    assert not folder.exists()


def test_all_parts_of_a_split_model_are_downloaded(fake_hub: FakeHub) -> None:
    path = hub.download("o/models", "f16", quiet)
    assert path.name == "m-F16-00001-of-00002.gguf"
    assert path.read_bytes() == SMALL
    assert path.with_name("m-F16-00002-of-00002.gguf").read_bytes() == SMALL[::-1]


def test_interrupted_download_is_resumed(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    fake_hub.break_off_at = 400_000
    assert hub.download("o/models", "Q8_0", quiet).read_bytes() == LARGE
    ranges = [
        request[2]
        for request in fake_hub.requests
        if request[0] == "GET" and "/resolve/" in request[1]
    ]
    assert ranges == [None, f"bytes={400_000 // (1 << 16) << 16}-"]


@pytest.mark.parametrize(
    ("repo", "quantization", "words"),
    [
        ("o/missing", None, "There is no model o/missing"),
        ("o/gated", None, "is gated: accept its terms"),
        ("o/empty", None, "has no complete GGUF model"),
        ("o/models", "Q6_K", "o/models has no Q6_K; it has F16, Q4_0, Q8_0"),
        ("o/broken", None, "answered 503"),
        ("o/--x..y", None, "not the name of a repository"),
    ],
)
def test_hub_errors_are_explained_in_one_line(
    fake_hub: FakeHub, repo: str, quantization: str | None, words: str
) -> None:
    assert words in refusal(repo, quantization)


def test_token_gives_access_to_a_gated_repository(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.download("o/gated", "Q4_0", quiet).read_bytes() == SMALL


def test_cached_files_are_used_without_a_network(fake_hub: FakeHub) -> None:
    path = hub.download("o/models", "Q4_0", quiet)
    fake_hub.shutdown()
    fake_hub.server_close()
    assert hub.download("o/models", "q4_0", quiet) == path
    assert hub.download("o/models", None, quiet) == path
    assert "The cached part of o/models has no Q8_0; it has Q4_0" in refusal("o/models", "Q8_0")
    assert "Cannot reach http://127.0.0.1" in refusal("o/other")


def test_offline_mode_uses_only_the_cache(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hub.download("o/models", "Q4_0", quiet)
    fake_hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.download("o/models", None, quiet) == path
    assert "HF_HUB_OFFLINE is set" in refusal("o/other")
    assert not fake_hub.requests


def test_download_is_rejected_if_the_disk_is_too_small(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "needs 1.0 MB" in refusal("o/models", "Q8_0")


@pytest.mark.slow
def test_hub_variables_are_read_from_the_environment(fake_hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN, in a process of its own. Without a terminal, progress is
    written in lines.
    """
    code = "from cllm.models.catalog import resolve; print(resolve('hf:o/gated:q8_0'))"
    hidden = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "HF_ENDPOINT": fake_hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": TOKEN,
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "home" / "hub")
    assert path.read_bytes() == LARGE
    assert "Downloading m-Q8_0.gguf: 1.0 MB of 1.0 MB" in done.stderr


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "http://127.0.0.1:9", "nonsense://x"])
def test_hub_on_this_machine_is_reached_without_proxy(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    close_session()  # it would go on as it began
    monkeypatch.setenv("all_proxy", proxy)
    assert hub.download("o/models", "latest").is_file()
