"""Read a checkpoint: a folder with ``config.json`` and safetensors files, as Hugging Face's tools
write it.

Only the files' headers are read, and nothing in them is trusted. Pickles are never opened, because
that would execute what is in them. Format of the files:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cllm.errors import ModelFileError, StartupError
from cllm.models.file_start import compute_fingerprint, explain_format, measure_regular_file
from cllm.models.gguf import format_size

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"-(?P<part>\d{5})-of-(?P<parts>\d{5})\.safetensors$")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_SETTINGS, "special_tokens_map.json", "chat_template.jinja")

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""The bits of an element, by the names of safetensors' types."""

# Limits far above every known model.
MAX_JSON, MAX_INDEX, MAX_HEADER, MAX_TEMPLATE = 1 << 22, 1 << 26, 100_000_000, 1 << 20
MAX_TENSORS, MAX_DIMS, MAX_SIZE = 1 << 20, 8, 1 << 20

POOLINGS = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
"""The names of sentence-transformers' poolings, after ``pooling_mode_``, and cLLM's."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place: the bytes from ``begin`` to ``end`` of ``file``, in the order of C.

    ``dtype`` is one of BITS.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose files are complete.

    ``config`` is ``config.json``, and ``generation`` is ``generation_config.json``, or empty.
    ``pooling`` (mean, cls or last) and ``max_embedding_tokens`` are what sentence-transformers
    stored with a model for embeddings; otherwise None.
    """

    folder: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: dict[str, StoredTensor]
    pooling: str | None = None
    max_embedding_tokens: int | None = None

    @property
    def config_path(self) -> Path:
        """The file that ``config`` is from."""
        return self.folder / CONFIG

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of ``config`` about the language model; models that also see or hear nest it."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.end - tensor.begin for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def count_kv_numbers(self) -> int | None:
        """Return how many numbers the keys and values of one token have, over all layers; None if
        the configuration does not say it in the usual words.
        """
        config = self.text_config
        names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
        layers, heads, width = (config.get(name) for name in names)
        kv_heads = config.get("num_key_value_heads") or heads
        length = config.get("head_dim")
        if length is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
            length = width // heads
        numbers = [one for one in (layers, kv_heads, length) if isinstance(one, int)]
        if len(numbers) < 3 or not all(0 < one < MAX_SIZE for one in numbers):
            return None
        return 2 * math.prod(numbers)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the configuration, of the tokenizer, and of samples of the weights."""
        digest = hashlib.blake2b(digest_size=16)
        files = {tensor.file for tensor in self.tensors.values()}
        files |= {self.folder / name for name in (CONFIG, *TOKENIZER_FILES)}
        for file in sorted(files):
            if file.is_file():
                digest.update(f"{file.name} {compute_fingerprint(file)}\n".encode())
        return digest.hexdigest()


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a folder with a ``config.json``."""
    return (path / CONFIG).is_file()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check all that is in a checkpoint but the tensors' data.

    Raises ModelFileError, with a message of one line, unless the folder has a configuration and
    complete safetensors files.
    """
    config = read_config(folder)
    return Checkpoint(
        folder=folder,
        config=config,
        generation=read_optional(folder / "generation_config.json"),
        tensors=_read_tensors(folder),
        pooling=_read_pooling(folder),
        max_embedding_tokens=_read_max_tokens(folder),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint. Raises ModelFileError as ``read_checkpoint``."""
    if not folder.is_dir():
        _fail(folder, "is not a folder" if folder.exists() else "does not exist")
    if not is_checkpoint(folder):
        is_adapter = (folder / "adapter_config.json").exists()
        hint = ": it is a LoRA adapter (see adapters in the settings)" if is_adapter else ""
        _fail(folder, f"is not a model: it has no {CONFIG}{hint}")
    return read_json(folder / CONFIG)


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Return the object in a JSON file of at most ``limit`` bytes.

    Raises ModelFileError if there is no such file or object.
    """
    value = read_json_value(path, limit)
    if not isinstance(value, dict):
        _fail(path, "is damaged: it is not a JSON object")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_json_value(path: Path, limit: int = MAX_JSON) -> Any:
    """Return the value in a JSON file of at most ``limit`` bytes. Raises ModelFileError."""
    content = read_bytes(path, limit)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError also if it is not UTF-8
        _fail(path, explain_json(content[:64], error))


def explain_json(start: bytes, error: Exception) -> str:
    """Return what is wrong with a file that begins with ``start`` and could not be decoded."""
    if isinstance(error, RecursionError):
        return "is damaged: its JSON is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        return f"is damaged: {str(error)[:200]}"
    explained = explain_format(start)
    return f"is not JSON{explained}" if explained else f"is not valid JSON: {str(error)[:200]}"


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes. Raises ModelFileError."""
    size = _measure(path)
    if size > limit:
        _fail(path, f"has {format_size(size)}; at most {format_size(limit)} are read")
    return _read_part(path, 0, size)


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a checkpoint by their names; the usual one is "default".

    Files of their own take precedence over ``tokenizer_config.json``. Raises ModelFileError.
    """
    stored = read_optional(folder / TOKENIZER_SETTINGS).get("chat_template")
    templates = {"default": stored} if isinstance(stored, str) else {}
    for template in stored if isinstance(stored, list) else []:
        match template:
            case {"name": str(name), "template": str(text)}:
                templates[name] = text
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    for name, file in files.items():
        if file.exists():
            try:
                templates[name] = read_bytes(file, MAX_TEMPLATE).decode()
            except UnicodeDecodeError:
                _fail(file, "is not UTF-8 text")
    return templates


def _read_tensors(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    if not index.exists():
        tensors: dict[str, StoredTensor] = {}
        for file in _list_weights(folder):
            for name, tensor in read_tensors(file).items():
                if name in tensors:
                    _fail(file, f"has the tensor {name[:100]!r}, as {tensors[name].file.name} has")
                tensors[name] = tensor
        return tensors
    places = read_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        _fail(index, "is damaged: it has no weight_map")
    files: dict[str, dict[str, StoredTensor]] = {}
    for name in places.values():
        if not isinstance(name, str) or not _is_plain_name(name):
            _fail(index, f"names a file outside of the folder: {str(name)[:100]!r}")
        if name in files:
            continue
        if not name.endswith(".safetensors"):
            _fail(index, f"names {name[:100]!r}, but only safetensors are read")
        if not (folder / name).exists():
            _fail(folder, f"is not complete: {name} is missing, which {INDEX} names")
        files[name] = read_tensors(folder / name)
    for name, file in places.items():
        if name not in files[file]:
            _fail(folder / file, f"does not have the tensor {name[:100]!r}, which {INDEX} names")
    return {name: files[file][name] for name, file in places.items()}


def _is_plain_name(name: str) -> bool:
    return not any(character in name for character in "/\\:\0") and name not in ("", ".", "..")


def _list_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder without an index."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        has_pickles = any(next(folder.glob(kind), None) for kind in PICKLES)
        reason = ": only safetensors are read, because pickles execute code" if has_pickles else ""
        _fail(folder, f"has no *.safetensors{reason}")
    shards = {file: match for file in files if (match := SHARD.search(file.name))}
    if not shards:
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:5])
            _fail(folder, f"has several safetensors files, but no {INDEX}: {names}")
        return files
    beginnings = {file.name[: match.start()] for file, match in shards.items()}
    counts = {int(match["parts"]) for match in shards.values()}
    there = [int(match["part"]) for match in shards.values()]
    if len(beginnings) > 1 or len(counts) > 1 or there != list(range(1, max(counts) + 1)):
        _fail(
            folder, f"is not complete: it has parts {there[:20]} of {max(counts)}, and no {INDEX}"
        )
    return list(shards)


class _Entry(msgspec.Struct, frozen=True):
    """What the header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the places of the tensors in a safetensors file, by their names.

    Raises ModelFileError unless the tensors fill the file without gaps, as the format requires.
    """
    size = _measure(path)
    start = _read_part(path, 0, 64)
    if explained := explain_format(start):
        _fail(path, f"is not a safetensors file{explained}")
    length = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{" or not 2 <= length <= MAX_HEADER:
        _fail(path, "is not a safetensors file")
    if 8 + length > size:
        _fail(
            path, f"ends within its header, after {format_size(size)}: the download is incomplete"
        )
    tensors = {}
    for name, entry in _parse_header(path, _read_part(path, 8, length)).items():
        begin, end = (8 + length + offset for offset in entry.data_offsets)
        _check_entry(path, name, entry)
        tensors[name] = StoredTensor(path, entry.dtype, tuple(entry.shape), begin, end)
    _check_places(path, tensors, 8 + length, size)
    return tensors


def _parse_header(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        if len(entries) > MAX_TENSORS:
            _fail(path, f"is damaged: it has {len(entries)} tensors")
        return {name: msgspec.json.decode(entry, type=_Entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        _fail(path, f"is damaged: its header is not valid: {reason[:200]}")


def _check_entry(path: Path, name: str, entry: _Entry) -> None:
    bits = BITS.get(entry.dtype)
    if bits is None:
        _fail(path, f"has the tensor {name[:100]!r} of the unknown type {entry.dtype[:20]!r}")
    begin, end = entry.data_offsets
    if len(entry.shape) > MAX_DIMS or min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        _fail(path, f"is damaged: the tensor {name[:100]!r} has an impossible shape or place")
    if math.prod(entry.shape) * bits != (end - begin) * 8:
        _fail(
            path,
            f"is damaged: the tensor {name[:100]!r} has {end - begin} bytes, which do not fit "
            f"{entry.dtype} and the shape {entry.shape}",
        )


def _check_places(path: Path, tensors: dict[str, StoredTensor], data_begin: int, size: int) -> None:
    """Check that each tensor begins where the one before it ends, and the last ends the file."""
    at = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            problem = "overlaps another one" if tensor.begin < at else "leaves a gap before it"
            _fail(path, f"is damaged: the tensor {name[:100]!r} {problem}")
        at = tensor.end
    if at > size:
        _fail(
            path,
            f"should have {format_size(at)}, but has {format_size(size)}; {at - size} bytes are "
            "missing: the download is incomplete",
        )
    if at < size:
        _fail(path, f"is damaged: {size - at} bytes follow its last tensor")


def _read_pooling(folder: Path) -> str | None:
    """Return how sentence-transformers pools token vectors, or None if the folder is not its own.

    Raises ModelFileError if its modules compute anything else than pooling and normalizing. With
    LogitScore, the model generates, and sentence-transformers takes a score from its logits.
    """
    modules = folder / "modules.json"
    if not modules.exists():
        return None
    pooling = None
    for module in _as_list(read_json_value(modules)):
        kind, place = str(module.get("type")).rsplit(".", 1)[-1], module.get("path")
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            _fail(modules, f"has the module {kind[:50]}, which is not supported")
        if kind == "Pooling":
            if not isinstance(place, str) or not _is_plain_name(place):
                _fail(modules, f"names a folder outside of the model: {str(place)[:100]!r}")
            pooling = _parse_pooling(folder / place / CONFIG)
    return pooling


def _as_list(value: Any) -> list[dict[str, Any]]:
    values = value if isinstance(value, list) else []
    return [one for one in values if isinstance(one, dict)]


def _parse_pooling(path: Path) -> str:
    settings = read_json(path)
    chosen = [
        name.removeprefix("pooling_mode_")
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    if isinstance(name := settings.get("pooling_mode"), str):
        chosen.append({"mean": "mean_tokens", "cls": "cls_token"}.get(name, name))
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        _fail(path, f"pools by {' and '.join(chosen)[:100] or 'nothing'}, which is not supported")
    return POOLINGS[chosen[0]]


def _read_max_tokens(folder: Path) -> int | None:
    length = read_optional(folder / "sentence_bert_config.json").get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _measure(path: Path) -> int:
    try:
        return measure_regular_file(path)
    except StartupError as error:
        raise ModelFileError(str(error), path) from None


def _read_part(path: Path, begin: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(length)
    except OSError as error:
        _fail(path, f"cannot be read: {error.strerror or error}")


def _fail(path: Path, problem: str) -> NoReturn:
    raise ModelFileError(f"{path} {problem}", path)
