"""Models of a server's settings and folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from cllm.config.settings import ModelsSettings, Settings
from cllm.models import hub
from cllm.serving.sources import list_found, stamp


def test_stamp_changes_with_each_file_of_a_checkpoint(tmp_path: Path) -> None:
    """So a reload notices new weights. Other files in the folder do not count."""
    folder = write_checkpoint(tmp_path / "tuned", tokenizer={})
    seen = {stamp(folder)}
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        path = folder / name
        path.rename(tmp_path / "old")
        path.write_bytes((tmp_path / "old").read_bytes())
        seen.add(stamp(folder))
    assert len(seen) == 4
    (folder / "optimizer.pt").write_bytes(b"x")
    assert stamp(folder) in seen
    assert stamp(tmp_path / "missing") == ()


def test_checkpoint_in_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is the repository's, and it has no quantization."""
    folder = write_checkpoint(tmp_path / "models--o--r" / "snapshots" / "abc")
    monkeypatch.setattr(hub, "list_cached", lambda: {"o/r": folder})
    (source,) = list_found(Settings(models=ModelsSettings(hub_cache=True)), [])
    assert (source.name, source.path) == ("o/r", folder)
    assert {"o/r:latest", "hf:o/r", "hf.co/o/r:latest"} <= {*source.settings.model.aliases}
    assert source.task == "completion"
