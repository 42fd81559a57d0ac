"""Finds the task of a model by a quick look at its file."""

from __future__ import annotations

import mmap
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cllm.errors import StartupError
from cllm.models.checkpoint import read_config, read_templates
from cllm.models.file_start import measure_regular_file

Task = Literal["chat", "completion", "embedding"]

MAX_BYTES = 1 << 25  # of a file; no known header is longer
KEY = b"tokenizer.chat_template"
LENGTHS = (len(KEY), len(KEY + b".tool_use"))  # of the keys of templates for chats
POOLING = b".pooling_type"
GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Parts of the names of architectures that generate texts."""


def find_task(path: Path) -> Task:
    """Return "completion" for a base model, which has no chat template and only continues texts,
    and "chat" if the file cannot be read or is no model.
    """
    try:
        if path.is_dir():
            return _find_task_of_checkpoint(path)
        size = measure_regular_file(path)
        return _find_task(path, size, path.stat().st_mtime_ns)
    except (StartupError, OSError, ValueError):
        return "chat"


def _find_task_of_checkpoint(folder: Path) -> Task:
    architectures = str(read_config(folder).get("architectures"))
    if not any(kind in architectures for kind in GENERATING):
        return "embedding"
    return "chat" if read_templates(folder) else "completion"


@lru_cache(maxsize=1000)
def _find_task(path: Path, _size: int, _changed: int) -> Task:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            return "chat"
        at = data.find(KEY, 0, MAX_BYTES)
        while at >= 0:
            if int.from_bytes(data[at - 8 : at], "little") in LENGTHS:
                return "chat"
            at = data.find(KEY, at + 1, MAX_BYTES)
        return "completion" if data.find(POOLING, 0, MAX_BYTES) < 0 else "embedding"
