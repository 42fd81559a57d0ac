"""Model names, and the files they resolve to."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from cllm.errors import StartupError
from cllm.models import catalog, hub
from cllm.models.catalog import BUILTIN, check_sha256, derive_model_name, list_folder, resolve
from cllm.models.file_names import (
    Form,
    choose_files,
    choose_form,
    list_checkpoint,
    parse_quantization,
)
from cllm.models.hub import Progress

SITE = "https://huggingface.co"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The requests to the hub; nothing is downloaded."""
    calls: list[tuple[str, str | None]] = []

    def download(
        repo: str,
        quantization: str | None = None,
        progress: Progress | None = None,
        form: Form | None = None,
    ) -> Path:
        calls.append((repo, quantization))
        return Path("downloaded.gguf")

    monkeypatch.setattr(hub, "download", download)
    return calls


@pytest.mark.parametrize(
    ("name", "quantization", "wanted"),
    [
        ("hf:owner/repo", None, ("owner/repo", None)),
        ("hf:owner/repo", "q8_0", ("owner/repo", "q8_0")),
        ("hf:Owner/Re.po-GGUF:Q4_K_M", None, ("Owner/Re.po-GGUF", "Q4_K_M")),
        ("hf:owner/repo:q4_0", "Q4_0", ("owner/repo", "q4_0")),
        ("hf:owner/repo:latest", "Q4_0", ("owner/repo", "Q4_0")),
        ("hf.co/owner/repo:Q4_0", None, ("owner/repo", "Q4_0")),
        ("https://huggingface.co/owner/repo/", None, ("owner/repo", None)),
        ("hf:owner/repo:sub/file-Q4_0.gguf", None, ("owner/repo", "sub/file-Q4_0.gguf")),
        ("hf:owner/repo/blob/main/m-Q4_0.gguf", None, ("owner/repo", "m-Q4_0.gguf")),
        ("hf:owner/repo/m-Q4_0.gguf", None, ("owner/repo", "m-Q4_0.gguf")),
        ("hf://owner/repo/sub/m.gguf", None, ("owner/repo", "sub/m.gguf")),
        (f"{SITE}/owner/repo/blob/main/m-Q4_0.gguf", None, ("owner/repo", "m-Q4_0.gguf")),
        (f"{SITE}/owner/repo/resolve/main/m.gguf?download=true", None, ("owner/repo", "m.gguf")),
        (
            f"{SITE}/owner/repo/blob/main/sub/m%20(1).gguf#L3",
            None,
            ("owner/repo", "sub/m (1).gguf"),
        ),
        (f"{SITE}/owner/repo?show_file_info=m-Q4_0.gguf", None, ("owner/repo", "m-Q4_0.gguf")),
        (f"{SITE}/owner/repo?local-app=llama.cpp", None, ("owner/repo", None)),
        (f"{SITE}/owner/repo/tree/main", None, ("owner/repo", None)),
        (f"{SITE}/owner/repo/tree/main/Q8_0/", None, ("owner/repo", "Q8_0")),
        ("HTTPS://HF.co/owner/repo/blob/main/m.GGUF", None, ("owner/repo", "m.GGUF")),
        ("huggingface.co/owner/repo/resolve/main/m.gguf", None, ("owner/repo", "m.gguf")),
    ],
)
def test_hub_name_is_split_into_repository_and_quantization(
    asked: list[tuple[str, str | None]],
    name: str,
    quantization: str | None,
    wanted: tuple[str, str | None],
) -> None:
    assert resolve(name, quantization) == Path("downloaded.gguf")
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:owner", "write hf:owner/repo"),
        ("hf:a/b/c", "write hf:owner/repo"),
        ("hf:", "write hf:owner/repo"),
        ("hf:owner/repo:q4_0", "drop one"),
        (f"{SITE}/owner/repo/blob/v2/m.gguf", "only main can be downloaded"),
        (f"{SITE}/owner/repo/discussions/3", "write hf:owner/repo"),
        ("owner/repo", "did you mean hf:owner/repo?"),
        ("llama3", "a .gguf file, a checkpoint's folder, hf:owner/repo[:quantization]"),
        ("", "a .gguf file"),
        ("./none.gguf", "There is no file"),
        ("none.gguf", "There is no file"),
    ],
)
def test_unresolvable_name_is_rejected_with_a_hint(
    asked: list[tuple[str, str | None]], name: str, words: str
) -> None:
    with pytest.raises(StartupError) as caught:
        resolve(name, "q8_0" if "drop" in words else None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not asked


def test_path_of_an_existing_file_resolves_to_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "model.gguf").touch()
    (home / "no_suffix").touch()
    monkeypatch.chdir(home)
    assert resolve("~/model.gguf") == home / "model.gguf"
    assert resolve("no_suffix") == Path("no_suffix")


def test_checkpoint_resolves_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "my.tune")
    monkeypatch.chdir(tmp_path)
    assert resolve("my.tune") == Path("my.tune")
    assert resolve("./my.tune/", form="checkpoint") == Path("my.tune")
    assert (
        resolve(str(folder / "config.json")) == resolve(str(folder / "model.safetensors")) == folder
    )
    assert derive_model_name(folder) == "my.tune"
    monkeypatch.chdir(folder)
    assert derive_model_name(resolve(".")) == "my.tune"
    with pytest.raises(
        StartupError, match=r"which llama\.cpp cannot read: use backend\.name torch"
    ):
        resolve(str(folder), form="gguf")
    (folder / "config.json").unlink()
    with pytest.raises(StartupError, match=r"is a directory without config\.json; give the path"):
        resolve(str(folder))


def test_checkpoints_in_a_folder_of_models(tmp_path: Path) -> None:
    """Those of two runs have the same names, so they get those of their folders too. Folders
    without weights, such as those with the settings of a pooling, are no models.
    """
    for name in ("one", "run/checkpoint-5", "other/checkpoint-5"):
        write_checkpoint(tmp_path / name)
    (tmp_path / "one/1_Pooling").mkdir()
    (tmp_path / "one/1_Pooling/config.json").write_text("{}")
    (tmp_path / "some.gguf").touch()
    assert list_folder(tmp_path) == {
        "one": tmp_path / "one",
        "checkpoint-5": tmp_path / "other/checkpoint-5",
        str(Path("run/checkpoint-5")): tmp_path / "run/checkpoint-5",
        "some": tmp_path / "some.gguf",
    }


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["config.json"], []),
        (["model.safetensors"], []),
        (["config.json", "pytorch_model.bin"], []),
        (["config.json", "onnx/model.safetensors"], []),
        (["config.json", "model.safetensors", "other.safetensors"], [0, 1]),
        (
            ["config.json", "a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"],
            [0, 1, 2],
        ),
        (
            [
                "config.json",
                "model.safetensors.index.json",
                "model-00001-of-00001.safetensors",
                "consolidated-00001-of-00001.safetensors",
                "model.safetensors",
            ],
            [0, 1, 2],
        ),
        (
            [
                *("1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"),
                *("chat_template.jinja", "config.json", "generation_config.json"),
                *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
                "model.safetensors",
                *("README.md", "training_args.bin", "optimizer.pt", "vocab.txt", "sub/a.jinja"),
            ],
            range(9),
        ),
    ],
)
def test_files_of_a_checkpoint(files: list[str], chosen: list[int]) -> None:
    assert list_checkpoint(files) == [files[number] for number in chosen]


@pytest.mark.parametrize(
    ("files", "quantization", "form"),
    [
        (["config.json", "model.safetensors"], None, "checkpoint"),
        (["config.json", "model.safetensors"], "latest", "checkpoint"),
        (["config.json", "model.safetensors"], "Q4_0", "gguf"),
        (["config.json", "model.safetensors", "m-F16.gguf"], None, "gguf"),
        (["config.json"], None, "gguf"),
    ],
)
def test_form_of_a_download(files: list[str], quantization: str | None, form: str) -> None:
    assert choose_form(files, quantization) == form


def test_part_of_a_split_model_resolves_to_the_first_part(tmp_path: Path) -> None:
    first, second = (tmp_path / f"big-{part:05}-of-00002.gguf" for part in (1, 2))
    second.touch()
    with pytest.raises(StartupError, match=r"has 2 files; .*00001-of-00002\.gguf is missing"):
        resolve(str(second))
    first.touch()
    assert resolve(str(second)) == first
    assert derive_model_name(first) == "big"


def test_no_name_resolves_to_the_builtin_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalog, "BUILTIN", tmp_path / "builtin.gguf")
    with pytest.raises(StartupError, match="missing from this installation"):
        resolve(None)
    (tmp_path / "builtin.gguf").touch()
    assert resolve(None) == resolve("cllm-builtin") == tmp_path / "builtin.gguf"


def test_model_name_is_derived_from_the_path() -> None:
    assert derive_model_name(BUILTIN) == "cllm-builtin"
    assert derive_model_name(Path("/models/Qwen3-0.6B-Q8_0.gguf")) == "Qwen3-0.6B-Q8_0"
    assert (
        derive_model_name(Path("/c/hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots/abc/f.gguf"))
        == "Qwen/Qwen3-0.6B-GGUF"
    )


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("model.IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/m-00001-of-00002.gguf", "BF16"),
        ("m-q8_0-00001-of-00003.gguf", "Q8_0"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("Qwen3.gguf", None),
    ],
)
def test_quantization_is_read_from_the_file_name(file: str, quantization: str | None) -> None:
    assert parse_quantization(file) == quantization


FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-F16.gguf",
    "m-F16.gguf",
    "m-Q4_0.gguf",
    "m-Q4_K_M-00002-of-00002.gguf",
    "m-Q4_K_M-00001-of-00002.gguf",
    "m-UD-Q2_K_XL.gguf",
    "half-Q6_K-00001-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]),
        ("q4_0", ["m-Q4_0.gguf"]),
        ("F16", ["m-F16.gguf"]),
        ("Q2_K_XL", ["m-UD-Q2_K_XL.gguf"]),
        ("m-q4_0.gguf", ["m-Q4_0.gguf"]),
        ("fp16", ["m-F16.gguf"]),
        ("FP16", ["m-F16.gguf"]),
        ("Q4_0.gguf", ["m-Q4_0.gguf"]),
        ("latest", ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]),
        ("Default", ["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]),
    ],
)
def test_choose_files_returns_all_parts_of_the_wanted_model(
    wanted: str | None, chosen: list[str]
) -> None:
    assert choose_files("o/r", FILES, wanted) == chosen


@pytest.mark.parametrize(
    ("files", "wanted", "words"),
    [
        (FILES, "q6_k", "o/r has no q6_k; it has F16, Q4_0, Q4_K_M, UD-Q2_K_XL"),
        (["model.safetensors", "mmproj-F16.gguf"], None, "no complete GGUF model"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "name one: a-Q4_0.gguf, b-Q4_0.gguf"),
    ],
)
def test_choose_files_names_the_alternatives(
    files: list[str], wanted: str | None, words: str
) -> None:
    with pytest.raises(StartupError) as caught:
        choose_files("o/r", files, wanted)
    assert words in str(caught.value)


def test_file_with_another_sha256_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    right = hashlib.sha256(b"GGUF").hexdigest()
    check_sha256(path, right)
    path.write_bytes(b"GGUG")  # one bit has flipped
    with pytest.raises(StartupError, match="it is damaged or another file"):
        check_sha256(path, right)
    with pytest.raises(StartupError, match="There is no file"):
        check_sha256(tmp_path / "none", right)
    with pytest.raises(StartupError, match="a model in one file"):
        check_sha256(tmp_path / "m-00001-of-00002.gguf", right)


@pytest.mark.parametrize("wanted", ["fp16", "F16", "f16", "FP16.gguf"])
@pytest.mark.parametrize("file", ["m-fp16.gguf", "m.FP16.gguf", "m-fp16-00001-of-00001.gguf"])
def test_fp16_and_f16_are_the_same(wanted: str, file: str) -> None:
    assert choose_files("o/r", ["m-bf16.gguf", "m-q8_0.gguf", file], wanted) == [file]


def test_any_part_of_a_split_model_names_it() -> None:
    files = [f"big/m-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert choose_files("o/r", files, "big/m-00002-of-00002.gguf") == files
