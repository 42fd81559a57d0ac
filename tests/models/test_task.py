"""What a model is for, by its file."""

from __future__ import annotations

import os

import pytest
from tiny_models import write_tiny_model

from cllm.models.catalog import BUILTIN
from cllm.models.task import find_task


@pytest.mark.parametrize(
    ("kind", "templates", "task"),
    [
        ("gemma3", None, "completion"),
        ("gemma3", {"rag": "a"}, "completion"),
        ("gemma3", {"default": "a"}, "chat"),
        ("gemma3", {"tool_use": "a"}, "chat"),
        ("bert", None, "embedding"),
    ],
)
def test_base_model_is_known_by_its_file(tmp_path, kind, templates, task):
    path = tmp_path / "a.gguf"
    write_tiny_model(kind, path, templates)
    assert find_task(path) == task


def test_file_that_cannot_be_read_is_not_a_base_model(tmp_path):
    assert find_task(tmp_path / "missing.gguf") == "chat"
    (tmp_path / "empty.gguf").touch()
    assert find_task(tmp_path / "empty.gguf") == "chat"
    assert find_task(BUILTIN) == "chat"


def test_other_files_and_pipes_are_not_base_models(tmp_path):
    """Opening a pipe would wait for a process that writes to it."""
    (tmp_path / "text.gguf").write_text("tokenizer")
    os.mkfifo(tmp_path / "pipe.gguf")
    assert find_task(tmp_path / "text.gguf") == "chat"
    assert find_task(tmp_path / "pipe.gguf") == "chat"
