"""``cllm pull``, ``list``, ``show``, ``rm`` and ``cp``, as a shell calls them."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
from checkpoints import write_checkpoint
from fake_hub import LARGE, FakeHub

from cllm.models.catalog import BUILTIN

pytestmark = pytest.mark.slow  # each starts processes


@pytest.fixture
def hub():
    server = FakeHub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cllm(tmp_path, hub):
    """A function that runs a command with a hub's cache and a state of its own."""
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "CLLM_STORAGE_FOLDER": str(tmp_path / "state"),
        "HOME": str(tmp_path),
        "PATH": "",
    }

    def run(*arguments, code=0, stdin=""):
        result = subprocess.run(
            [sys.executable, "-m", "cllm", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            input=stdin,
            check=False,
        )
        assert result.returncode == code, result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout if code == 0 else result.stderr

    return run


def names(cllm):
    return [model["name"] for model in json.loads(cllm("list", "--json"))]


def test_checkpoint_is_pulled_shown_and_removed(cllm, tmp_path):
    printed = cllm("pull", "hf:o/tuned")
    assert printed.startswith("o/tuned: 0.0 MB, ")
    assert "o/tuned" in names(cllm)
    shown = json.loads(cllm("show", "o/tuned", "--json"))
    assert shown["format"] == "safetensors"
    assert shown["architecture"] == "llama"
    assert shown["chat template"] == "no"
    folder = write_checkpoint(tmp_path / "models" / "mine")
    assert json.loads(cllm("show", folder, "--json"))["path"] == str(folder)
    listed = json.loads(cllm("list", "--models.folder", folder.parent, "--json"))
    assert ("mine", "folder") in [(model["name"], model["from"]) for model in listed]
    (folder / "model.safetensors").write_bytes(b"x")
    assert "is not a safetensors file" in cllm("show", folder, code=2)
    assert cllm("rm", "o/tuned").startswith("removed o/tuned")
    assert "o/tuned" not in names(cllm)


def test_pulled_models_are_listed_and_removed(cllm, tmp_path):
    printed = cllm("pull", "hf:o/models:Q8_0")
    assert printed.startswith(f"o/models: {len(LARGE) / 1e6:.1f} MB, ")
    cllm("pull", "hf:o/models:F16")
    assert names(cllm) == ["cllm-builtin", "o/models:F16", "o/models:Q8_0"]
    assert "o/models:Q8_0" in cllm("list")
    assert "name one: o/models:F16, o/models:Q8_0" in cllm("rm", "o/models", code=2)
    assert json.loads(cllm("pull", "hf:o/models:Q8_0", "--json"))["size"] == len(LARGE)
    assert cllm("rm", "hf:o/models:q8_0") == "removed o/models:Q8_0, 1.0 MB\n"
    assert names(cllm) == ["cllm-builtin", "o/models:F16"]
    assert not list((tmp_path / "hf").rglob("*Q8_0*"))
    cllm("rm", "o/models")
    assert names(cllm) == ["cllm-builtin"]


PAGE = "https://huggingface.co/o/models/blob/main"


def test_what_pull_understands_is_understood_by_show_and_rm(cllm):
    """Also if the cache has other files of the repository."""
    cllm("pull", f"{PAGE}/big/m-F16-00002-of-00002.gguf")
    cllm("pull", "hf:o/models/resolve/main/m-Q8_0.gguf?download=true")
    cllm("pull", "hf.co/o/models:latest")
    assert names(cllm) == ["cllm-builtin", "o/models:F16", "o/models:Q4_0", "o/models:Q8_0"]
    assert "m-Q8_0.gguf is not a GGUF file" in cllm("show", f"{PAGE}/m-Q8_0.gguf", code=2)
    assert "there is no model" in cllm("rm", f"{PAGE}/other-Q8_0.gguf", code=2)
    assert cllm("rm", "hf:o/models:fp16").startswith("removed o/models:F16, ")
    assert cllm("rm", "o/models:latest").startswith("removed o/models:Q4_0, ")
    assert cllm("rm", f"{PAGE}/m-Q8_0.gguf").startswith("removed o/models:Q8_0, ")


def test_damaged_download_is_noticed_and_removed(cllm, tmp_path):
    """The cache names the files by their SHA-256 where the hub tells it."""
    cllm("pull", "hf:o/models:Q8_0")
    (link,) = (tmp_path / "hf").rglob("snapshots/*/m-Q8_0.gguf")
    stored = link.resolve()
    right = stored.with_name(hashlib.sha256(LARGE).hexdigest())
    stored.rename(right)
    link.unlink()
    link.symlink_to(right)
    cllm("pull", "hf:o/models:Q8_0")
    data = bytearray(LARGE)
    data[1000] ^= 1
    right.write_bytes(data)
    assert "m-Q8_0.gguf is damaged" in cllm("pull", "hf:o/models:Q8_0", code=2)
    assert not right.exists()


@pytest.mark.parametrize(("kind", "has_cache"), [("BertModel", False), ("LlamaForCausalLM", True)])
def test_model_that_only_embeds_is_shown_without_kv_cache(cllm, tmp_path, kind, has_cache):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    write_checkpoint(tmp_path, config={"architectures": [kind], "model_type": "x", **sizes})
    shown = json.loads(cllm("show", tmp_path, "--json"))
    assert shown["layers"] == 2
    assert shown.get("KV cache per token") == ("0.5 kB" if has_cache else None)


def test_show_reads_the_file(cllm, tmp_path):
    shutil.copy(BUILTIN, tmp_path / "mine.gguf")
    shown = json.loads(cllm("show", tmp_path / "mine.gguf", "--json"))
    assert (shown["architecture"], shown["context length"]) == ("qwen3", 4096)
    assert "context length      4096" in cllm("show", "cllm-builtin")
    assert "nothing" in cllm("show", "nothing", code=2)


def test_copies_are_listed_and_removed(cllm):
    assert cllm("cp", "cllm-builtin", "mine") == "mine is cllm-builtin\n"
    assert cllm("cp", "mine", "again") == "again is cllm-builtin\n"
    assert names(cllm) == ["cllm-builtin", "mine", "again"]
    assert "architecture" in cllm("show", "mine")
    assert cllm("ls") == cllm("list")
    cllm("rm", "mine", "again")
    assert names(cllm) == ["cllm-builtin"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rm", "nothing"), "there is no model nothing; see cllm list"),
        (("rm", "cllm-builtin"), "cllm-builtin is not in the Hugging Face cache"),
        (("cp", "nothing", "x"), "there is no model nothing"),
        (("cp", "cllm-builtin", "cllm-builtin"), "cllm-builtin is the name of another model"),
        (("pull", "llama"), "llama is not on the hub; write hf:owner/repo"),
        (("pull", "hf:o/missing"), "There is no model o/missing"),
        (("ps", "--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
        (("stop", "x", "--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
        (("run", "x", "--url", "http://127.0.0.1:1"), "cannot connect to http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_done_is_one_line(cllm, words, message):
    error = cllm(*words, code=2)
    assert message in error
    assert len(error.splitlines()) == 1


def test_models_of_a_folder_are_listed_and_shown(cllm, tmp_path, builtin_path):
    """As ``cllm serve --models.folder`` serves them."""
    (tmp_path / "mine.gguf").write_bytes(builtin_path.read_bytes())
    assert "mine" not in cllm("list")
    assert "mine" in cllm("list", "--models.folder", tmp_path)
    assert str(tmp_path) in cllm("show", "mine", "--models-dir", tmp_path)


def test_simulate_help_names_its_steps(cllm):
    found = cllm("simulate", "--help")
    assert "cllm simulate synth trace.jsonl" in found
    assert "cllm simulate trace.jsonl" in found
