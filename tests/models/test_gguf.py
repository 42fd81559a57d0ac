"""The header reader: valid files, and one-line errors for everything else."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from cllm.errors import StartupError
from cllm.models.gguf import TENSOR_TYPES, GgufHeader, read_header
from cllm.models.sequence_memory import check_kv_type, compute_kv_bytes_per_token

TOKENS = ["a", "b", "é", "x" * 40]


def write(path: Path, tokens: Sequence[str] = TOKENS, **numbers: int | list[int]) -> Path:
    """Write a file with one tensor of each common kind, and ``qwen3.{name}`` for each of
    ``numbers``.
    """
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("a test")
    for name, value in numbers.items():
        key = f"qwen3.{name.replace('__', '.')}"
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 5000)
    writer.add_tensor("norm", np.ones(8, np.float32))
    writer.add_tensor("half", np.ones((3, 5), np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(
        "matrix", gguf.quants.quantize(np.ones((4, 64), np.float32), kind), raw_dtype=kind
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "sound.gguf", block_count=2, attention__head_count_kv=[1, 2])


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def with_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def crafted(
    path: Path, *, num_tensors: int = 0, num_keys: int = 0, body: bytes = b"", version: int = 3
) -> Path:
    return with_bytes(path, b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body)


def text(content: str | bytes) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(content)) + content


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_header_of_a_valid_file(file: Path) -> None:
    header = read_header(file)
    assert header.architecture == "qwen3"
    assert header.metadata["general.name"] == "a test"
    assert header.get_number("block_count") == 2
    assert header.get_number("attention.head_count_kv") == (1, 2)
    assert header.array_lengths["tokenizer.ggml.tokens"] == 4
    assert header.array_lengths["tokenizer.ggml.scores"] == 5000
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert [(t.name, t.shape, t.type, t.num_bytes) for t in header.tensors] == [
        ("norm", (8,), "F32", 32),
        ("half", (5, 3), "F16", 30),
        ("matrix", (64, 4), "Q8_0", 4 * 2 * 34),
    ]
    assert header.file_bytes == file.stat().st_size
    assert header.split_count == 1
    assert header.data_offset % 32 == 0


def test_string_arrays_are_kept_on_request(file: Path) -> None:
    assert read_header(file, keep_strings=["tokenizer.ggml.tokens"]).metadata[
        "tokenizer.ggml.tokens"
    ] == tuple(TOKENS)


def test_tensor_types_match_the_gguf_package() -> None:
    for kind, (block, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # an activation type; the reference has the size it once had
            assert TENSOR_TYPES[kind.value] == (kind.name, block, num_bytes)


@pytest.mark.slow
def test_large_vocabulary_is_skipped_without_decoding(tmp_path: Path) -> None:
    """Skipping 152,000 strings takes an eighth of the CPU time of reading them. The minimum of
    three runs counts.
    """
    file = write(tmp_path / "large.gguf", [f"token {i}" for i in range(152_000)])

    def seconds(*keep_strings: str) -> float:
        begun = time.process_time()
        read_header(file, keep_strings=keep_strings)
        return time.process_time() - begun

    skipping, reading = zip(
        *((seconds(), seconds("tokenizer.ggml.tokens")) for _ in range(3)), strict=True
    )
    assert min(skipping) < min(reading) / 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GGU", "not a GGUF file"),
        (b"\x00" * 4096, "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "a web page"),
        (b"tjgg" + b"\x00" * 100, "GGML"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_file_of_another_kind_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(with_bytes(tmp_path / "f.gguf", content))


def test_missing_file_and_directory_are_rejected(tmp_path: Path) -> None:
    assert "no file" in refusal(tmp_path / "none.gguf")
    assert "is a directory" in refusal(tmp_path)
    assert "no file" in refusal(with_bytes(tmp_path / "f", b"x") / "below")
    assert "not a regular file" in refusal(Path("/dev/null"))


def test_truncated_data_error_states_the_missing_bytes(file: Path) -> None:
    whole = file.stat().st_size
    end = read_header(file)
    last = end.tensors[-1]
    missing = 100
    with_bytes(file, file.read_bytes()[: end.data_offset + last.offset + last.num_bytes - missing])
    message = refusal(file)
    assert "expected" in message
    assert f"{missing} bytes are missing: the download is incomplete" in message
    assert file.stat().st_size < whole


def test_file_truncated_anywhere_is_rejected(file: Path) -> None:
    content, header = file.read_bytes(), read_header(file)
    needed = header.data_offset + header.tensors[-1].offset + header.tensors[-1].num_bytes
    for length in [*range(200), *range(200, needed, 97)]:
        message = refusal(with_bytes(file, content[:length]))
        assert length < 24 or "incomplete" in message


@pytest.mark.slow
def test_flipped_bits_raise_only_startup_errors(file: Path) -> None:
    content, end = file.read_bytes(), read_header(file).data_offset
    rng = random.Random(5)
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(4, end)] ^= 1 << rng.randrange(8)
        try:
            header = read_header(with_bytes(file, bytes(damaged)))
        except StartupError as error:
            assert "\n" not in str(error)
        else:
            compute_kv_bytes_per_token(header)


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"num_keys": HUGE}, "damaged"),
        ({"num_tensors": HUGE}, "damaged"),
        ({"num_keys": 0}, "general.architecture is missing"),
        ({"num_keys": 1, "body": struct.pack("<Q", HUGE) + b"x" * 99}, "claims"),
        ({"num_keys": 1, "body": text("") + struct.pack("<IB", 0, 0)}, "empty"),
        ({"num_keys": 2, "body": ARCHITECTURE * 2}, "not unique"),
        ({"num_keys": 1, "body": text("k") + struct.pack("<I", 99)}, "unknown type"),
        ({"num_keys": 1, "body": text("k") + struct.pack("<IIQ", 9, 9, 1)}, "claims"),
        ({"num_keys": 1, "body": text("k") + struct.pack("<IIQ", 9, 4, HUGE)}, "claims"),
        ({"num_keys": 1, "body": text("k") + struct.pack("<IIQ", 9, 8, HUGE)}, "claims"),
        (
            {"num_keys": 1, "body": text("k") + struct.pack("<IIQ", 9, 8, 1 << 27) + b"\0" * 4096},
            "claims",
        ),
        (
            {"num_keys": 1, "body": text("k") + struct.pack("<IIQQ", 9, 8, 2, HUGE) + b"\0" * 99},
            "damaged",
        ),
        ({"num_keys": 1, "body": text("general.alignment") + struct.pack("<IQ", 10, 32)}, "uint32"),
        (
            {"num_keys": 1, "body": text("general.alignment") + struct.pack("<II", 4, 0)},
            "power of two",
        ),
        (
            {"num_keys": 1, "body": text("general.alignment") + struct.pack("<II", 4, 48)},
            "power of two",
        ),
        ({"tensors": [tensor("a" * 64, [1])]}, "claims 64 bytes"),
        ({"tensors": [tensor("t", [1] * 5)]}, "5 dimensions"),
        ({"tensors": [tensor("t", [1 << 32, 1 << 32])]}, "impossible shape"),
        ({"tensors": [tensor("t", [0, HUGE])]}, "impossible shape"),
        ({"tensors": [tensor("t", [33], kind=8)]}, "impossible shape"),
        ({"tensors": [tensor("t", [32], kind=4)]}, "not supported"),
        ({"tensors": [tensor("t", [8], offset=8)]}, "expected at 0"),
        ({"tensors": [tensor("t", [8]), tensor("t", [8], offset=32)]}, "same name"),
        ({"tensors": [tensor("t", [8]), tensor("u", [8], offset=0)]}, "expected at 32"),
        ({"tensors": [tensor("t", [1 << 40])]}, "incomplete"),
    ],
)
def test_crafted_header_is_rejected(tmp_path: Path, parts: dict[str, object], words: str) -> None:
    tensors = parts.pop("tensors", None)
    if isinstance(tensors, list):
        parts = {
            "num_keys": 1,
            "num_tensors": len(tensors),
            "body": ARCHITECTURE + b"".join(tensors) + b"\0" * 64,
        }
    assert words in refusal(crafted(tmp_path / "f.gguf", **parts))


def test_string_over_the_limit_is_not_read(tmp_path: Path) -> None:
    body = text("k") + struct.pack("<IQ", 8, 1 << 30)
    file = crafted(tmp_path / "f.gguf", num_keys=1, body=body)
    with file.open("r+b") as sparse:
        sparse.truncate(1 << 31)
    assert "claims" in refusal(file)


def test_long_key_is_shortened_in_the_error(tmp_path: Path) -> None:
    file = crafted(tmp_path / "f.gguf", num_keys=1, body=text("k" * 5000) + struct.pack("<I", 99))
    assert len(refusal(file)) < 400 + len(str(file))


def test_head_must_be_a_multiple_of_the_kv_block(tmp_path: Path) -> None:
    lengths = {"attention__key_length": 64, "attention__value_length": 48}
    header = read_header(
        write(tmp_path / "f.gguf", TOKENS, block_count=1, attention__head_count=1, **lengths)
    )
    check_kv_type(header, "f16")
    with pytest.raises(
        StartupError, match=r"q8_0 stores numbers in blocks of 32, but a value of this model has 48"
    ):
        check_kv_type(header, "q8_0")


class TestKvBytesPerToken:
    """Two bytes per number, for keys and values in all layers."""

    def header(self, tmp_path: Path, **numbers: int | list[int]) -> GgufHeader:
        return read_header(write(tmp_path / "f.gguf", TOKENS, **numbers))

    def test_computed_from_key_and_value_lengths(self, tmp_path: Path) -> None:
        numbers = {
            "attention__head_count": 16,
            "attention__head_count_kv": 8,
            "embedding_length": 1024,
        }
        lengths = {"attention__key_length": 128, "attention__value_length": 64}
        header = self.header(tmp_path, block_count=28, **numbers, **lengths)
        assert compute_kv_bytes_per_token(header) == 2 * 28 * 8 * (128 + 64)
        assert compute_kv_bytes_per_token(header, "q8_0") == 34 * 28 * 8 * (4 + 2)
        assert compute_kv_bytes_per_token(header, "q4_0") == 18 * 28 * 8 * (4 + 2)

    def test_computed_from_embedding_length(self, tmp_path: Path) -> None:
        header = self.header(tmp_path, block_count=4, attention__head_count=8, embedding_length=512)
        assert compute_kv_bytes_per_token(header) == 2 * 4 * 8 * (64 + 64)

    def test_heads_may_differ_by_layer(self, tmp_path: Path) -> None:
        heads: list[int] = [0, 4, 0, 2]
        header = self.header(
            tmp_path,
            block_count=4,
            embedding_length=512,
            attention__head_count=8,
            attention__head_count_kv=heads,
        )
        assert compute_kv_bytes_per_token(header) == 2 * 6 * (64 + 64)

    @pytest.mark.parametrize(
        "change",
        [
            {"attention__head_count": 0},
            {"attention__kv_lora_rank": 512},
            {"ssm__state_size": 16},
            {"attention__head_count_kv": [1, 2, 3]},
        ],
    )
    def test_unsupported_metadata_gives_none(
        self, tmp_path: Path, change: dict[str, int | list[int]]
    ) -> None:
        numbers: dict[str, int | list[int]] = {
            "block_count": 2,
            "attention__head_count": 8,
            "embedding_length": 512,
        }
        assert compute_kv_bytes_per_token(self.header(tmp_path, **(numbers | change))) is None


def test_duplicate_token_is_rejected_on_request(tmp_path: Path) -> None:
    """llama.cpp aborts the process that reads such a vocabulary. The check takes time, so it is
    optional.
    """
    file = write(tmp_path / "twice.gguf", ["a", "b", "", "é", "", "b"])
    assert read_header(file).array_lengths["tokenizer.ggml.tokens"] == 6
    with pytest.raises(StartupError, match=r"is damaged: its vocabulary has the token 'b' twice"):
        read_header(file, check_tokens=True)
    read_header(write(tmp_path / "once.gguf", ["a", "b", "", "é", ""]), check_tokens=True)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"block_count": 0}, "qwen3.block_count is 0"),
        ({"block_count": 1 << 30}, "qwen3.block_count is 1073741824"),
        ({"expert_count": 2000}, "qwen3.expert_count is 2000"),
        ({"expert_count": 4, "expert_used_count": 5}, "uses 5 of 4 experts"),
        ({"expert_count": 4}, "uses 0 of 4 experts"),
        ({"expert_used_count": 2}, "uses 2 of 0 experts"),
    ],
)
def test_values_that_abort_llama_cpp_are_rejected(
    tmp_path: Path, numbers: dict[str, int], words: str
) -> None:
    assert words in refusal(write(tmp_path / "f.gguf", **numbers))


def test_layer_and_expert_counts_of_large_models_are_accepted(tmp_path: Path) -> None:
    for numbers in (
        {"block_count": 512},
        {"expert_count": 1024, "expert_used_count": 8},
        {"block_count": 1},
    ):
        read_header(write(tmp_path / "f.gguf", **numbers))
    read_header(write(tmp_path / "f.gguf", expert_count=8, expert_used_count=[2, 4]))
