"""Files that are not a whole model: what is said about them, and what folders list."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from cllm.errors import ModelFileError
from cllm.models.catalog import list_folder, resolve
from cllm.models.model_file import read_parts


def write(path: Path, kind: str = "model", architecture: str = "qwen3", **options) -> Path:
    """Write a small file; split_max_tensors=1 gives it three parts."""
    tensors = options.pop("tensors", ("a", "b", "c"))
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_type(kind)
    if kind == "adapter":
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_token_list([f"token{number}" for number in range(200)])
    for name in tensors:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path, name: str = "m", **options) -> list[Path]:
    folder.mkdir(exist_ok=True)
    write(folder / f"{name}.gguf", split_max_tensors=1, **options)
    return sorted(folder.glob(f"{name}-*"))


def refusal(path: Path) -> str:
    """Return why a file is not loaded, and check that clients would not see its folder."""
    with pytest.raises(ModelFileError) as caught:
        read_parts(resolve(str(path)))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path.parent) in message
    assert str(path.parent) not in caught.value.for_clients
    return message


def test_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    first, *_ = write_parts(tmp_path)
    parts = read_parts(first)
    assert [[tensor.name for tensor in part.tensors] for part in parts] == [["a"], ["b"], ["c"]]
    assert len(read_parts(write(tmp_path / "whole.gguf"))) == 1


def test_joined_parts_are_explained(tmp_path: Path) -> None:
    """As cat joins them, under any name."""
    parts = write_parts(tmp_path)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert "llama-gguf-split --merge" in refusal(joined)
    for part in parts[1:]:
        part.unlink()
    joined = joined.rename(tmp_path / "m-00001-of-00001.gguf")
    assert "llama-gguf-split --merge" in refusal(joined)


@pytest.mark.parametrize("number", [0, 1])
def test_renamed_part_is_explained(tmp_path: Path, number: int) -> None:
    renamed = write_parts(tmp_path)[number].rename(tmp_path / "renamed.gguf")
    message = refusal(renamed)
    assert f"part {number + 1} of 3" in message
    assert f"ends in -{number + 1:05}-of-00003.gguf" in message


def test_missing_part_is_named(tmp_path: Path) -> None:
    first, second, _ = write_parts(tmp_path)
    second.unlink()
    assert f"{second} is missing" in refusal(first)
    with pytest.raises(ModelFileError, match="no file"):
        read_parts(first)  # as for a model of a folder


def test_truncated_last_part_is_named(tmp_path: Path) -> None:
    first, *_, last = write_parts(tmp_path)
    last.write_bytes(last.read_bytes()[:-20])
    message = refusal(first)
    assert last.name in message
    assert "incomplete" in message


def test_part_of_another_model_is_noticed(tmp_path: Path) -> None:
    first, second, third = write_parts(tmp_path / "one")
    *_, other = write_parts(tmp_path / "two", tensors=("a", "b"))
    own = second.read_bytes()
    second.write_bytes(other.read_bytes())
    assert f"{second.name} is not part 2 of 3" in refusal(first)
    second.write_bytes(third.read_bytes())
    assert f"{second.name} is not part 2 of 3" in refusal(first)
    *_, other = write_parts(tmp_path / "three", tensors=("a", "b", "b2"))
    second.write_bytes(own)
    third.write_bytes(write_parts(tmp_path / "four", tensors=("x", "y", "a"))[2].read_bytes())
    assert "2 tensors, not 3" in refusal(first)


@pytest.mark.parametrize(
    ("kind", "architecture", "tensors", "words"),
    [
        ("adapter", "qwen3", ("a",), "a LoRA adapter"),
        ("mmproj", "clip", ("a",), "a projector"),
        ("model", "clip", ("a",), "a projector"),
        ("imatrix", "imatrix", ("a",), "an importance matrix"),
        ("model", "controlvector", ("a",), "a control vector"),
        ("model", "qwen3", (), "a vocabulary without weights"),
    ],
)
def test_other_kinds_of_files_are_named_and_not_listed(
    tmp_path: Path, kind: str, architecture: str, tensors: tuple[str, ...], words: str
) -> None:
    write(tmp_path / "m.gguf")
    other = write(tmp_path / "other.gguf", kind, architecture, tensors=tensors)
    assert f"{other} is {words}" in refusal(other)
    assert list_folder(tmp_path) == {"m": tmp_path / "m.gguf"}


def test_folder_lists_a_split_model_once(tmp_path: Path) -> None:
    """Also if a later part was renamed."""
    first, second, _ = write_parts(tmp_path)
    second.rename(tmp_path / "second.gguf")
    assert list_folder(tmp_path) == {"m": first}


def test_hidden_files_and_folders_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    for name in ("m.gguf", "._m.gguf", ".n.gguf", ".cache/o.gguf"):
        write(tmp_path / name)
    assert list_folder(tmp_path) == {"m": tmp_path / "m.gguf"}


def test_linked_folders_are_listed_once(tmp_path: Path) -> None:
    """Their own place counts before a link; circles end."""
    folder, away = tmp_path / "models", tmp_path / "away"
    (folder / "own").mkdir(parents=True)
    away.mkdir()
    write(folder / "own" / "a.gguf")
    write(away / "b.gguf")
    for link, target in (
        (folder / "away", away),
        (folder / "also", away),
        (folder / "link to own", folder / "own"),
        (folder / "own" / "up", folder),
        (away / "back", folder),
    ):
        link.symlink_to(target, target_is_directory=True)
    found = list_folder(folder)
    assert sorted(found) == ["a", "b"]
    assert found["a"] == folder / "own" / "a.gguf"


def test_what_cannot_be_read_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "m.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "broken.gguf").symlink_to("nowhere")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    locked = write(tmp_path / "locked.gguf")
    plain = os.stat
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != locked and bool(plain(path).st_mode)
    )
    far = tmp_path / "far.gguf"
    far.symlink_to("hidden")

    def deny(path, *arguments, **options):
        if Path(path) == far:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", deny)
    with caplog.at_level(logging.WARNING):
        assert list_folder(tmp_path) == {"m": tmp_path / "m.gguf"}
        first = [record.getMessage() for record in caplog.records]
        assert list_folder(tmp_path) == {"m": tmp_path / "m.gguf"}
    assert [record.getMessage() for record in caplog.records] == first  # once
    for name in ("loop", "broken", "locked", "far"):
        assert any(f"{name}.gguf' is skipped" in line for line in first), (name, first)


@pytest.mark.skipif(os.name == "nt", reason="names are UTF-16 there")
def test_name_that_is_not_unicode_does_not_stop_a_scan(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    strange = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    os.link(tmp_path / "m.gguf", strange)
    assert "m" in list_folder(tmp_path)
