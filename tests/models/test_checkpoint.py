"""The reader of checkpoints: valid folders, and one-line errors for everything else."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    CONFIG,
    TENSORS,
    pack_header,
    pack_tensors,
    write_checkpoint,
    write_shards,
)

from cllm.errors import ModelFileError
from cllm.models.checkpoint import StoredTensor, is_checkpoint, read_checkpoint

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tuned")


def refusal(folder: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    assert str(folder) in message
    assert str(folder.parent) not in caught.value.for_clients
    return message


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_data(tensor: StoredTensor) -> bytes:
    return tensor.file.read_bytes()[tensor.begin : tensor.end]


@pytest.mark.parametrize("write", [write_checkpoint, write_shards])
def test_tensors_are_found(tmp_path: Path, write: Any) -> None:
    checkpoint = read_checkpoint(write(tmp_path))
    assert checkpoint.config == CONFIG
    assert checkpoint.generation == {}
    assert checkpoint.tensor_bytes == 22
    assert checkpoint.num_parameters == 9
    assert checkpoint.pooling is None
    found = {
        name: (tensor.dtype, [*tensor.shape], read_data(tensor))
        for name, tensor in checkpoint.tensors.items()
    }
    assert found == TENSORS


def test_shards_without_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    assert read_checkpoint(tmp_path).tensors.keys() == TENSORS.keys()
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "is not complete: it has parts [1, 3] of 3" in refusal(tmp_path)


def test_single_file_of_any_name(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    assert read_checkpoint(folder).num_parameters == 9
    (folder / "other.safetensors").write_bytes(pack_tensors(TENSORS))
    assert "has several safetensors files, but no model.safetensors.index" in refusal(folder)


def test_links_to_other_folders_are_followed(folder: Path, tmp_path: Path) -> None:
    """The cache of the hub consists of such links."""
    (folder / WEIGHTS).rename(tmp_path / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    assert read_checkpoint(folder).num_parameters == 9


def test_generation_and_text_config(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": {"hidden_size": 8}}
    write_checkpoint(tmp_path, config=nested, generation_config={"eos_token_id": [1, 106]})
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.generation == {"eos_token_id": [1, 106]}
    assert checkpoint.text_config == {"hidden_size": 8}


def test_infinity_in_config_is_read(tmp_path: Path) -> None:
    """Python writes it, and Mamba's checkpoints have it."""
    write_checkpoint(tmp_path, config=CONFIG | {"time_step_limit": [0.0, float("inf")]})
    assert read_checkpoint(tmp_path).config["time_step_limit"][1] == float("inf")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", WEIGHTS])
def test_fingerprint_follows_each_file(folder: Path, file: str) -> None:
    (folder / "tokenizer.json").write_text("{}")
    first = read_checkpoint(folder).fingerprint
    assert read_checkpoint(folder).fingerprint == first
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1] + b"}" + b" " * (file != WEIGHTS))
    assert read_checkpoint(folder).fingerprint != first


def pooling_files(**settings: Any) -> dict[str, Any]:
    return {
        "modules": [
            {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config": settings,
        "sentence_bert_config": {"max_seq_length": 256},
    }


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling(tmp_path: Path, settings: dict[str, Any], pooling: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, **pooling_files(**settings)))
    assert checkpoint.pooling == pooling
    assert checkpoint.max_embedding_tokens == 256


def test_model_whose_logits_are_taken_as_scores_is_one_that_generates(tmp_path: Path) -> None:
    """As Qwen3-Reranker is published."""
    files = pooling_files()
    files["modules"][1:] = [
        {"idx": 1, "path": "1_LogitScore", "type": "sentence_transformers.models.LogitScore"}
    ]
    del files["1_Pooling/config"]
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, **files))
    assert checkpoint.pooling is None


def test_pooling_that_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    files = pooling_files(pooling_mode_max_tokens=True)
    assert "pools by max_tokens, which is not" in refusal(write_checkpoint(tmp_path, **files))
    files["modules"][2]["type"] = "sentence_transformers.models.Dense"
    files["1_Pooling/config"] = {"pooling_mode_mean_tokens": True}
    assert "has the module Dense, which is not" in refusal(write_checkpoint(tmp_path, **files))
    files["modules"][1]["path"] = "../elsewhere"
    assert "outside of the model: '../elsewhere'" in refusal(write_checkpoint(tmp_path, **files))


def test_folder_without_config(folder: Path) -> None:
    assert is_checkpoint(folder)
    (folder / "config.json").unlink()
    assert not is_checkpoint(folder)
    assert refusal(folder).endswith("is not a model: it has no config.json")
    (folder / "adapter_config.json").write_text("{}")
    assert "it is a LoRA adapter" in refusal(folder)
    assert refusal(folder / WEIGHTS).endswith("is not a folder")
    assert refusal(folder / "other").endswith("does not exist")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b" " * (1 << 23), "at most 4.2 MB are read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "a web page"),
    ],
)
def test_damaged_config(folder: Path, content: bytes, reason: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert reason in refusal(folder)
    assert "config.json" in refusal(folder)


def test_folder_without_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refusal(folder).endswith("has no *.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert refusal(folder).endswith("only safetensors are read, because pickles execute code")


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        (
            {"a": "../tuned/model.safetensors"},
            "outside of the folder: '../tuned/model.safetensors'",
        ),
        ({"a": "/etc/passwd"}, "outside of the folder"),
        ({"a": "C:evil.safetensors"}, "outside of the folder"),
        ({"a": ".."}, "outside of the folder"),
        ({"a": 5}, "outside of the folder: '5'"),
        ({"a": ["x"]}, "outside of the folder"),
        ({"a": "pytorch_model.bin"}, "only safetensors are read"),
        ({"a": "model-00001-of-00002.safetensors"}, "model-00001-of-00002.safetensors is missing"),
        ({"a": WEIGHTS}, "does not have the tensor 'a'"),
    ],
)
def test_damaged_index(folder: Path, places: Any, reason: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("header", "num_bytes", "reason"),
    [
        ({"a": entry()}, 7, "1 bytes are missing: the download is incomplete"),
        ({"a": entry()}, 9, "1 bytes follow its last tensor"),
        ({"a": entry("F31")}, 8, "of the unknown type 'F31'"),
        ({"a": entry(shape=[3])}, 8, "8 bytes, which do not fit F32 and the shape [3]"),
        ({"a": entry(shape=[1 << 62] * 8)}, 8, "do not fit"),
        ({"a": entry(shape=[1] * 9)}, 8, "an impossible shape or place"),
        ({"a": entry(shape=[-1, -2])}, 8, "an impossible shape or place"),
        ({"a": entry(offsets=[8, 0])}, 8, "an impossible shape or place"),
        ({"a": entry(offsets=[-8, 0])}, 8, "an impossible shape or place"),
        ({"a": entry(offsets=[1 << 62, (1 << 62) + 8])}, 8, "leaves a gap before it"),
        ({"a": entry(), "b": entry()}, 8, "overlaps another one"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "overlaps another one"),
        ({"a": entry(offsets=[4, 12])}, 12, "leaves a gap before it"),
        ({"a": {"dtype": "F32"}}, 8, "its header is not valid"),
        ({"a": entry(shape="x")}, 8, "its header is not valid"),
        ({"a": entry(offsets=[0])}, 8, "its header is not valid"),
        ({"a": entry(offsets=[0.0, 8.5])}, 8, "its header is not valid"),
        ({"a": 5}, 8, "its header is not valid"),
    ],
)
def test_damaged_header(folder: Path, header: dict[str, Any], num_bytes: int, reason: str) -> None:
    (folder / WEIGHTS).write_bytes(pack_header(header) + bytes(num_bytes))
    assert reason in refusal(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"x", "is not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "is not a safetensors file"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        ((1000).to_bytes(8, "little") + b'{"a"', "ends within its header"),
        ((8).to_bytes(8, "little") + b"{{{{{{{{", "its header is not valid"),
        ((8).to_bytes(8, "little") + b'{"\xff": 5}', "its header is not valid"),
        (pack_header({}) + b"x", "1 bytes follow its last tensor"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"<html>not found", "a web page"),
    ],
)
def test_damaged_weights(folder: Path, content: bytes, reason: str) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert reason in refusal(folder)


def test_deep_header(folder: Path) -> None:
    deep = b'{"a":' * 200_000
    (folder / WEIGHTS).write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert "nested too deeply" in refusal(folder)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    first = (tmp_path / "model-00001-of-00003.safetensors").read_bytes()
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(first)
    assert "has the tensor 'model.norm.weight', as model-00001" in refusal(tmp_path)


def test_every_cut_and_random_damage_is_one_line(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    choose = random.Random(0)
    for length in range(len(whole)):
        (folder / WEIGHTS).write_bytes(whole[:length])
        refusal(folder)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(choose.choice((1, 4))):
            damaged[choose.randrange(len(damaged))] = choose.randrange(256)
        (folder / WEIGHTS).write_bytes(damaged)
        try:
            read_checkpoint(folder)  # damage of names and data cannot be seen
        except ModelFileError as error:
            assert "\n" not in str(error)
