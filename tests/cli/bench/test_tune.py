"""``cllm tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cllm.bench.tune.report import TuningReport, describe_tiles, format_yaml, verdict
from cllm.bench.tune.search import (
    BATCH_THREADS,
    KV_TYPE,
    LAYOUT,
    THREADS,
    Choice,
    Trial,
    Tuned,
)
from cllm.bench.tune.tiles import Tiles
from cllm.cli.settings_flags import settings_from_flags
from cllm.config.sources import load_settings

BEFORE = Trial({"prompt": [100.0, 110.0, 90.0], "decode 1": [9.0, 10.0, 11.0]})


def report(chosen: Choice, gain: float = 0.2) -> TuningReport:
    after = Trial({"prompt": [120.0], "decode 1": [12.34]}, gain, 0.05)
    tuned = Tuned([], [], chosen, BEFORE, after) if chosen else Tuned([], [], {})
    return TuningReport(
        "a model\u2028x", "a CPU", 8, 61.0, tuned, tuned.recommended, {}, None, [], None
    )


def test_yaml_is_a_valid_settings_file(tmp_path: Path) -> None:
    """It contains the given settings with the chosen ones in their place; the comment reports the
    gain.
    """
    given = {
        "scheduler.max_num_seqs": 16,
        "backend.llama_cpp.n_threads": 7,
        "scheduler.weights": {"user-a": 2.0},
    }
    loaded = settings_from_flags(None, given, "some model: #1.gguf")
    chosen: Choice = {BATCH_THREADS: 8, THREADS: 4, LAYOUT: "unified", KV_TYPE: "q8_0"}
    text = format_yaml(loaded, report(chosen))
    assert "prompt 100 -> 120, decode 1 10.0 -> 12.3; +20.0% on average, noise 5.0%" in text
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    read = load_settings(tmp_path / "c.yaml", {}, {})
    tuned = {**given, "model.path": "some model: #1.gguf", **chosen}
    assert read.settings == load_settings(None, {}, tuned).settings
    assert {key for key, origin in read.origins.items() if origin != "default"} == set(tuned)


@pytest.mark.parametrize("gain", [None, 0.04, -0.1])
def test_yaml_without_gain_has_only_comments(tmp_path: Path, gain: float | None) -> None:
    """If no candidate was chosen or its gain did not repeat, the file contains only comments and
    loads as default settings.
    """
    found = report({} if gain is None else {THREADS: 4}, gain or 0.0)
    text = format_yaml(settings_from_flags(None, {}), found)
    assert all(line.startswith("#") for line in text.splitlines())
    assert "current" in verdict(found.settings)[0]
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert (
        load_settings(tmp_path / "c.yaml", {}, {}).settings == load_settings(None, {}, {}).settings
    )


def test_tiles_are_described_in_a_line() -> None:
    assert describe_tiles(Tiles("Q6_K", 13, 7, 14, 8)) == (
        "Q6_K weights: tiles of 16 rows from 13 rows on (faster here from 14); after full tiles "
        "from 7 more rows on (here 8)"
    )


def test_help_describes_tune(cllm) -> None:
    _, out, _ = cllm("tune", "--help")
    for option in (
        "--workloads",
        "long-beside-short",
        "--minutes",
        "--out",
        "--requantize",
        "--text",
        "--write",
        "--write-as",
        "--json",
        "--config",
    ):
        assert option in out
    assert "--kv.type" in out
    assert "tune" in cllm("--help").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.gguf",), "There is no file none.gguf"),
        (("--backend.name", "fake"), "only llama_cpp can be tuned"),
        (("--minutes", "0"), "minutes"),
        (("--workloads", "words"), "workloads"),
        (("--out", "."), ". is a folder"),
        (("--out", "none/c.yaml"), "the folder none does not exist"),
        (("--write", "m.gguf"), "--write needs --requantize"),
        (("--requantize", "--write-as", "Q4_0+Q4_0"), "--write-as needs --write"),
        (("--requantize", "--write", "there.gguf"), "there.gguf already exists"),
        (("--requantize", "--text", "none.txt"), "cannot read --text none.txt"),
        (("--requantize", "--text", "there.gguf"), "--text there.gguf is not UTF-8"),
    ],
)
def test_invalid_options_give_one_line_before_measuring(
    cllm, tmp_path: Path, monkeypatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").write_bytes(b"\xff\xfe")
    code, out, err = cllm("tune", *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


@pytest.mark.llama
def test_invalid_options_for_the_model_give_one_line(
    cllm, builtin_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("")
    options = ("tune", builtin_path, "--requantize")
    for arguments, words in (
        (("--text", tmp_path / "short.txt"), "too short to measure quality"),
        (("--write", tmp_path / "m.gguf", "--write-as", "Q4"), "Q4 is not a quantization"),
    ):
        code, out, err = cllm(*options, *arguments)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert words in err


@pytest.mark.llama
@pytest.mark.slow
def test_tune_measures_and_writes_copy(
    cllm, builtin_path: Path, tmp_path: Path, monkeypatch
) -> None:
    """It prints a report, a YAML that loads, and the requested copy; no temporary file remains."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yaml, copy = tmp_path / "c.yaml", tmp_path / "copy.gguf"
    options = ("--minutes", "0.05", "--out", yaml, "--json", "--threads", "1")
    code, out, err = cllm(
        "tune", builtin_path, *options, "--requantize", "--write", copy, "--write-as", "Q4_0+Q4_0"
    )
    assert code == 0
    found = json.loads(out)
    assert {tried["key"] for tried in found["settings"]["tried"]} | set(
        found["settings"]["skipped"]
    ) == {
        "backend.llama_cpp.n_threads_batch",
        "backend.llama_cpp.n_threads",
        "backend.llama_cpp.n_ubatch",
        "kv.layout",
        "kv.type",
    }
    assert found["tiles"] == []  # its weights are Q8_0
    (form,) = found["forms"]
    assert form["form"] == "Q4_0+Q4_0"
    assert 0 < form["quality"]["kl"] < 5
    assert all(word in err for word in ("tokens/s", "n_threads_batch", "Q4_0+Q4_0", "KL"))
    assert load_settings(yaml, {}, {}).settings.model.path == str(builtin_path)
    assert copy.stat().st_size < 0.7 * builtin_path.stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "copy.gguf", "temporary"]
    assert not list((tmp_path / "temporary").iterdir())
    assert (
        cllm("generate", "--model", copy, "--chat", "What is 2 plus 3?", "--max-tokens", "8").code
        == 0
    )


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.full
def test_tune_measures_workloads(cllm, builtin_path: Path, tmp_path: Path) -> None:
    """Each candidate serves the workload; the given settings reach the servers."""
    options = ("--minutes", "0.1", "--out", tmp_path / "c.yaml", "--json", "--threads", "1")
    code, out, err = cllm("tune", builtin_path, *options, "--workloads", "edit")
    assert code == 0
    tried = json.loads(out)["settings"]["tried"]
    assert all([*one["outcome"]["speeds"]] in ([], ["edit"]) for one in tried)
    assert "edit" in err or not tried
