"""Other types for the weights: which are tried, what is written, and how it is judged."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cllm.backends.llama_cpp.options import Options
from cllm.backends.llama_cpp.quantize import quantize
from cllm.bench.make_model import make_model
from cllm.bench.tune.measure import Bench, SpeedWork
from cllm.bench.tune.quality import Quality
from cllm.bench.tune.requantize import (
    KL_LIMIT,
    Quantization,
    Requantized,
    Trial,
    bodies_to_try,
    estimated_bytes,
    find_best,
    heads_to_try,
    original_quantization,
    read_quantization,
    try_quantizations,
    workplace,
    write_quantization,
)
from cllm.bench.tune.search import SpeedFigure
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.gguf import GgufHeader, read_header

FIGURES = [SpeedFigure("prompt", SpeedWork(2, 16, 2)), SpeedFigure("decode", SpeedWork(2, 16, 2))]


def header_of(tmp_path: Path, quant: str) -> GgufHeader:
    file = tmp_path / f"{quant}.gguf"
    make_model("tiny", quant, file, progress=lambda stage, share: None)
    return read_header(file)


def contents(header: GgufHeader) -> dict[str, bytes]:
    data = header.path.read_bytes()
    starts = {tensor.name: header.data_offset + tensor.offset for tensor in header.tensors}
    return {
        tensor.name: data[starts[tensor.name] :][: tensor.num_bytes] for tensor in header.tensors
    }


@pytest.mark.llama
@pytest.mark.slow
def test_requantized_head_leaves_body_unchanged(tmp_path: Path) -> None:
    """All other tensors are equal byte for byte, and the file is valid and has the estimated size."""
    header = header_of(tmp_path, "q4_k_m")
    assert str(original_quantization(header)) == "Q4_K+Q6_K"
    for head in ("Q4_0", "Q8_0"):
        form = Quantization("Q4_K", head)
        write_quantization(header.path, tmp_path / "other.gguf", form, lambda share: None)
        other = read_header(tmp_path / "other.gguf")
        assert original_quantization(other) == form
        before, after = contents(header), contents(other)
        assert {name for name in before if before[name] != after[name]} == {"token_embd.weight"}
        assert estimated_bytes(form, header) == other.tensor_bytes


@pytest.mark.llama
def test_requantized_body_leaves_head_unchanged(tmp_path: Path) -> None:
    """The source is quantized already, and the head can keep its type."""
    header = header_of(tmp_path, "q4_k_m")
    form = Quantization("Q4_0", "Q6_K")
    write_quantization(header.path, tmp_path / "other.gguf", form, lambda share: None)
    other = read_header(tmp_path / "other.gguf")
    assert original_quantization(other) == form
    assert Counter(tensor.type for tensor in other.tensors) == {"Q4_0": 14, "F32": 9, "Q6_K": 1}
    assert contents(other)["token_embd.weight"] == contents(header)["token_embd.weight"]
    assert estimated_bytes(form, header) == other.tensor_bytes


@pytest.mark.llama
def test_separate_head_is_requantized(tmp_path: Path, tiny_model) -> None:
    """The embedding keeps its type."""
    header = read_header(tiny_model("gemma3"))
    quantize(
        header.path,
        tmp_path / "other.gguf",
        None,
        head="Q8_0",
        threads=1,
        progress=lambda share: None,
    )
    types = {tensor.name: tensor.type for tensor in read_header(tmp_path / "other.gguf").tensors}
    assert types["output.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"
    with pytest.raises(StartupError, match=r"could not quantize to Q4_K_M with head Q5_K: "):
        quantize(
            tmp_path / "none.gguf",
            tmp_path / "x",
            "Q4_K_M",
            head="Q5_K",
            threads=1,
            progress=lambda share: None,
        )


@pytest.mark.llama
def test_large_quantizations_are_skipped(tmp_path: Path) -> None:
    small, large = header_of(tmp_path, "q4_k_m"), header_of(tmp_path, "q8_0")
    assert [str(form) for form in bodies_to_try(small, "Q6_K")] == ["Q4_0+Q6_K", "Q5_K_M+Q6_K"]
    assert [str(form) for form in bodies_to_try(small, "Q8_0")] == ["Q4_0+Q8_0"]
    assert [str(form) for form in bodies_to_try(large, "Q4_K")] == [
        "Q4_0+Q4_K",
        "Q4_K_M+Q4_K",
        "Q5_K_M+Q4_K",
        "Q6_K+Q4_K",
    ]
    assert [form.head for form in heads_to_try(large)] == ["Q4_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"]
    assert "Q6_K" not in [form.head for form in heads_to_try(small)]


@pytest.mark.llama
def test_quantizations_are_read_by_name(builtin_path: Path) -> None:
    header = read_header(builtin_path)
    assert read_quantization("Q8_0+Q4_K", header) == Quantization("Q8_0", "Q4_K")
    for wrong in ("Q4_0", "Q4_0+", "Q9+Q4_0", "Q4_0+F32", "Q4_0+Q4_0+Q4_0", ""):
        with pytest.raises(StartupError, match=r"is not a quantization: write BODY\+HEAD"):
            read_quantization(wrong, header)


@pytest.mark.parametrize(
    ("gain", "noise", "kl", "good"),
    [
        (0.2, 0.1, 0.001, True),
        (0.2, 0.3, 0.001, False),
        (0.01, 0.0, 0.001, False),
        (0.2, 0.1, 2 * KL_LIMIT, False),
    ],
)
def test_recommendation_needs_gain_and_quality(
    gain: float, noise: float, kl: float, *, good: bool
) -> None:
    """A type is recommended if it is faster by more than the noise and loses little quality."""
    speeds = {"prompt": [1.0]}
    one = Requantized(
        "Q4_0+Q4_0", 1, Trial(speeds), Trial(speeds, gain, noise), Quality(kl, 1.0, 9)
    )
    slower = Requantized(
        "Q6_K+Q4_0", 1, Trial(speeds), Trial(speeds, 0.05, 0.0), Quality(0.0, 1.0, 9)
    )
    assert find_best([slower, one]) is (one if good else slower)
    assert find_best([one]) is (one if good else None)


def test_missing_disk_space_raises() -> None:
    with (
        pytest.raises(StartupError, match=r"needs 1200000000\.0 GB in .*TMPDIR"),
        workplace(10**18),
    ):
        pass


@pytest.mark.llama
@pytest.mark.slow
def test_each_quantization_is_measured(builtin_path: Path, tmp_path: Path) -> None:
    """Larger types lose less quality, and no candidate file remains."""
    params = EngineParams(path=str(builtin_path), options=Options(n_threads=1).model_dump())
    forms = [Quantization("Q8_0", "Q6_K"), Quantization("Q4_0", "Q4_0")]
    tokens = [40 + i % 97 for i in range(600)]
    told = []
    with Bench() as bench:
        found = try_quantizations(
            bench, params, FIGURES, tokens, forms, tmp_path, lambda *progress: told.append(progress)
        )
    assert [one.form for one in found] == ["Q8_0+Q6_K", "Q4_0+Q4_0"]
    assert found[1].num_bytes < found[0].num_bytes < builtin_path.stat().st_size
    good, bad = (one.quality for one in found)
    assert 0 < good.kl < bad.kl
    assert good.top1 > bad.top1
    assert good.num_tokens == 600
    assert all(
        speed > 0 for one in found for rounds in one.outcome.speeds.values() for speed in rounds
    )
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
    assert ("measuring Q4_0+Q4_0", 1.0) in told


@pytest.mark.llama
def test_interrupt_leaves_no_files(builtin_path: Path, tmp_path: Path) -> None:
    def interrupt(text: str, share: float) -> None:
        raise KeyboardInterrupt

    params = EngineParams(path=str(builtin_path), options=Options(n_threads=1).model_dump())
    with pytest.raises(KeyboardInterrupt), Bench() as bench:
        try_quantizations(
            bench, params, FIGURES, [1, 2, 3], [Quantization("Q4_0", "Q4_0")], tmp_path, interrupt
        )
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
