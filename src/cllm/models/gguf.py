"""Read the header of a GGUF file quickly, without trusting it.

llama.cpp's own reader is C++ code that reads files from the network, and has most CVEs about model
files. Files that this module rejects never reach it. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from cllm.errors import ModelFileError, StartupError
from cllm.models.file_start import explain_format, measure_regular_file

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

# ggml's types: name, elements per block, bytes per block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}

# GGUF's value types, with their format letters in ``struct``.
SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY, UINT32 = 8, 9, 4
TOKENS = "tokenizer.ggml.tokens"

# Limits far above every known model, and far below harmful sizes.
MAX_KEYS, MAX_TENSORS, MAX_NAME, MAX_DIMS = 1 << 16, 1 << 17, 63, 4
MAX_TEXT, MAX_KEY, MAX_HEADS = 1 << 26, 1 << 16, 1 << 20
MAX_ARRAY, MAX_ARRAY_STRINGS = 1 << 28, 1 << 22
ASSERTED: dict[str, Collection[object]] = {
    "block_count": range(1, 513),
    "nextn_predict_layers": range(513),
    "expert_count": range(1025),
    "rope.scaling.type": ("none", "linear", "yarn", "longrope"),
}
"""The values of some keys that do not make llama.cpp abort the process."""
SHORT_LIST = 100
"""Strings in a list that is not a vocabulary, such as the licenses and languages of a model."""
MAX_ELEMENTS = (1 << 63) - 1
MAX_KEPT_ARRAY = 4096
"""Arrays of numbers up to this length keep their values: they have one number per layer."""


class TensorInfo(msgspec.Struct, frozen=True):
    """``shape`` is in GGUF's order: the first dimension is contiguous.

    ``offset`` counts from the data section.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """The header of a GGUF file. Sizes and offsets are in bytes.

    ``metadata`` has numbers, booleans, strings, and arrays of at most 4096 numbers as tuples.
    ``array_lengths`` has every array; longer arrays and arrays of strings are only there.
    """

    path: Path
    version: int
    architecture: str
    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: list[TensorInfo]
    file_bytes: int
    data_offset: int

    @property
    def split_count(self) -> int:
        """The number of files that the model is split into; this header describes one of them."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) and count > 0 else 1

    @property
    def split_number(self) -> int:
        """The number of this file among those of a split model, from 0."""
        number = self.metadata.get("split.no", 0)
        return number if isinstance(number, int) and number > 0 else 0

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def get_number(self, key: str) -> Value | None:
        """Return the value of ``{architecture}.{key}``."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(
    path: Path, *, keep_strings: Collection[str] = (), check_tokens: bool = False
) -> GgufHeader:
    """Read and check the header of ``path``. The tensors' data is not read.

    The arrays of strings under the keys ``keep_strings`` are kept in ``metadata``. With
    ``check_tokens``, the tokens of the vocabulary are compared, because llama.cpp aborts the
    process if two are equal; this takes 0.1 s for a large vocabulary.

    Raises StartupError, with a message of one line, for anything that is not a complete and valid
    GGUF file.
    """
    with _open_reader(path, keep_strings, check_tokens) as reader:
        return reader.read_header()


def read_start(path: Path) -> tuple[dict[str, Value], int]:
    """Return the metadata before the first long list of strings, which is the vocabulary, and the
    number of tensors: quickly, for all files of a folder. Raises StartupError as ``read_header``.
    """
    with _open_reader(path) as reader:
        return reader.read_start()


@contextmanager
def _open_reader(
    path: Path, keep_strings: Collection[str] = (), check_tokens: bool = False
) -> Iterator[_Reader]:
    try:
        size = measure_regular_file(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(path, data, size, keep_strings, check_tokens)
    except StartupError as error:
        raise ModelFileError(str(error), path) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"Cannot read {path}: {reason}", path) from None


def format_size(num_bytes: int) -> str:
    """Return a size for people to read: ``12.3 MB``, ``4.6 GB``."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


class _EnoughError(Exception):
    """The start of the metadata has been read."""


class _Reader:
    """Reads the header from beginning to end; ``at`` never passes the end of the file."""

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        size: int,
        keep_strings: Collection[str],
        check_tokens: bool,
    ) -> None:
        self.path, self.data, self.size, self.at = path, data, min(size, len(data)), 0
        self.keep_strings, self.check_tokens = keep_strings, check_tokens
        self.metadata: dict[str, Value] = {}
        self.array_lengths: dict[str, int] = {}
        self.strings_left, self.text_left = MAX_ARRAY_STRINGS, MAX_TEXT
        self.longest_list = MAX_ARRAY  # more than a file may have
        self.alignment = 32

    def read_start(self) -> tuple[dict[str, Value], int]:
        self.longest_list = SHORT_LIST
        self._read_version()
        num_tensors, num_keys = self._read_counts()
        with suppress(_EnoughError):
            for _ in range(num_keys):
                self._read_key()
        return self.metadata, num_tensors

    def _read_counts(self) -> tuple[int, int]:
        num_tensors, num_keys = self._unpack("<QQ")
        if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
            self._raise_damaged(f"it claims {num_keys} keys and {num_tensors} tensors")
        return num_tensors, num_keys

    def read_header(self) -> GgufHeader:
        version = self._read_version()
        num_tensors, num_keys = self._read_counts()
        for _ in range(num_keys):
            self._read_key()
        self._read_alignment()
        infos = [self._read_tensor() for _ in range(num_tensors)]
        data_offset = self._align(self.at)
        architecture = self._get_architecture()
        self._check_metadata(architecture)
        return GgufHeader(
            path=self.path,
            version=version,
            architecture=architecture,
            metadata=self.metadata,
            array_lengths=self.array_lengths,
            tensors=self._check_tensors(infos, data_offset),
            file_bytes=self.size,
            data_offset=data_offset,
        )

    def _read_version(self) -> int:
        start = bytes(self.data[:64])
        if start[:4] != b"GGUF":
            raise StartupError(f"{self.path} is not a GGUF file{explain_format(start)}")
        self.at = 4
        version: int = self._unpack("<I")[0]
        if version not in (2, 3):
            reason = (
                "is big-endian"
                if version and version & 0xFFFF == 0
                else f"has GGUF version {version}"
            )
            raise StartupError(
                f"{self.path} {reason}; versions 2 and 3, little-endian, are supported"
            )
        return version

    def _get_architecture(self) -> str:
        architecture = self.metadata.get("general.architecture", "")
        if "split.no" in self.metadata or self.metadata.get("general.type", "model") != "model":
            return str(architecture)  # only models, and first parts of them, need one
        if not isinstance(architecture, str) or not architecture:
            self._raise_damaged("general.architecture is missing")
        return architecture

    def _check_metadata(self, architecture: str) -> None:
        """Check values that make llama.cpp abort the process instead of rejecting the file."""
        for key, possible in ASSERTED.items():
            value = self.metadata.get(f"{architecture}.{key}")
            if value is not None and value not in possible:
                self._raise_damaged(f"{architecture}.{key} is {str(value)[:40]}")
        count, used = (
            self.metadata.get(f"{architecture}.expert{part}_count", 0) for part in ("", "_used")
        )
        if isinstance(count, int) and isinstance(used, int) and not min(count, 1) <= used <= count:
            self._raise_damaged(f"it uses {used} of {count} experts")

    def _read_key(self) -> None:
        key = self._read_string(MAX_KEY)
        if not key or key in self.metadata or key in self.array_lengths:
            self._raise_damaged(f"the key {key!r} is {'not unique' if key else 'empty'}")
        kind = self._unpack("<I")[0]
        if kind == ARRAY:
            self._read_array(key)
        elif kind == STRING:
            self.metadata[key] = self._read_string(MAX_TEXT)
        elif kind in SCALARS:
            if key == "general.alignment" and kind != UINT32:
                self._raise_damaged("general.alignment is not a uint32")
            self.metadata[key] = self._read_scalars(kind, 1)[0]
        else:
            self._raise_damaged(f"the key {key!r} has the unknown type {kind}")

    def _read_array(self, key: str) -> None:
        kind, length = self._unpack("<IQ")
        if length > MAX_ARRAY or not (kind in SCALARS or kind == STRING):
            self._raise_damaged(f"the array {key!r} claims {length} values of type {kind}")
        if kind == STRING and length > self.longest_list:
            raise _EnoughError
        self.array_lengths[key] = length
        if kind == STRING and key in self.keep_strings:
            self._count_strings(key, length)
            self.metadata[key] = tuple(self._read_string(MAX_TEXT) for _ in range(length))
        elif kind == STRING:
            begin = self.at
            self._skip_strings(key, length)
            if self.check_tokens and key == TOKENS:
                self._check_distinct(begin, length)
        elif length <= MAX_KEPT_ARRAY:
            self.metadata[key] = self._read_scalars(kind, length)
        else:
            self._skip(length * struct.calcsize(SCALARS[kind]))

    def _count_strings(self, key: str, length: int) -> None:
        self.strings_left -= length
        if self.strings_left < 0:
            self._raise_damaged(f"the array {key!r} claims {length} strings")

    def _skip_strings(self, key: str, length: int) -> None:
        self._count_strings(key, length)
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(length):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            self._raise_truncated(at)
        if at > self.size:
            self._raise_truncated(at)
        self.at = at

    def _check_distinct(self, at: int, length: int) -> None:
        """Check the skipped strings that begin at ``at``. Only the empty string may occur twice."""
        seen: set[bytes] = set()
        for _ in range(length):
            begin = at + 8
            at = begin + struct.unpack_from("<Q", self.data, at)[0]
            text = self.data[begin:at]
            if text in seen and text:
                self._raise_damaged(
                    f"its vocabulary has the token {text.decode('utf-8', 'replace')[:40]!r} twice"
                )
            seen.add(text)

    def _read_alignment(self) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._raise_damaged(f"the alignment is {alignment}, not a power of two")
        self.alignment = alignment

    def _read_tensor(self) -> TensorInfo:
        name = self._read_string(MAX_NAME)
        num_dims = self._unpack("<I")[0]
        if num_dims > MAX_DIMS:
            self._raise_damaged(f"the tensor {name!r} has {num_dims} dimensions")
        shape = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        if kind not in TENSOR_TYPES:
            raise StartupError(
                f"{self.path}: the tensor {name!r} has type {kind}, which is not supported"
            )
        type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
        elements = math.prod(shape)
        if (
            max(shape, default=1) > MAX_ELEMENTS
            or elements > MAX_ELEMENTS
            or (shape or (1,))[0] % block_elements
        ):
            self._raise_damaged(
                f"the tensor {name!r} has the impossible shape {list(shape)} for {type_name}"
            )
        return TensorInfo(name, shape, type_name, offset, elements // block_elements * block_bytes)

    def _check_tensors(self, tensors: list[TensorInfo], data_offset: int) -> list[TensorInfo]:
        """Check that tensors are in the file's order without gaps, as llama.cpp requires; then none
        can overlap.
        """
        if len({tensor.name for tensor in tensors}) < len(tensors):
            self._raise_damaged("two tensors have the same name")
        offset, end = 0, 0
        for tensor in tensors:
            if tensor.offset != offset:
                self._raise_damaged(
                    f"the tensor {tensor.name!r} is at {tensor.offset}, expected at {offset}"
                )
            end = offset + tensor.num_bytes
            offset = self._align(end)
        if tensors and data_offset + end > self.size:
            self._raise_incomplete(data_offset + end)
        return tensors

    def _align(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment

    def _unpack(self, form: str) -> tuple[int, ...]:
        at = self.at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self.data, at)

    def _read_scalars(self, kind: int, count: int) -> tuple[Scalar, ...]:
        values: tuple[Scalar, ...] = self._unpack(f"<{count}{SCALARS[kind]}")
        return values

    def _read_string(self, limit: int) -> str:
        length = self._unpack("<Q")[0]
        self.text_left -= length
        if length > limit or self.text_left < 0:
            self._raise_damaged(f"a string at byte {self.at} claims {length} bytes")
        at = self.at
        self._skip(length)
        return self.data[at : self.at].decode("utf-8", "replace")

    def _skip(self, num_bytes: int) -> None:
        if self.at + num_bytes > self.size:
            self._raise_truncated(self.at + num_bytes)
        self.at += num_bytes

    def _raise_truncated(self, wanted: int) -> NoReturn:
        if wanted - self.size > MAX_ARRAY * 8:
            self._raise_damaged(
                f"a length near byte {self.at} points far beyond the end of the file"
            )
        raise StartupError(
            f"{self.path} ends within its header, after {format_size(self.size)}: the download is "
            f"incomplete"
        )

    def _raise_incomplete(self, expected: int) -> NoReturn:
        raise StartupError(
            f"{self.path}: expected {format_size(expected)}, found {format_size(self.size)}; "
            f"{expected - self.size} bytes are missing: the download is incomplete"
        )

    def _raise_damaged(self, reason: str) -> NoReturn:
        raise StartupError(
            f"{self.path} is damaged: {reason if len(reason) <= 300 else f'{reason[:300]}...'}"
        )
