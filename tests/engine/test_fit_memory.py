"""The memory that an engine takes, by the kind of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from tiny_models import write_tiny_model

from cllm.config.settings import KVSettings, Settings
from cllm.engine.build import build_backend, build_engine, fit_memory
from cllm.engine.params import EngineParams
from cllm.engine.settings import make_engine_params
from cllm.models import memory

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write_encoder(folder: Path, form: str) -> Path:
    if form == "checkpoint":
        return write_checkpoint(folder / "bert", config=BERT)
    write_tiny_model("bert", folder / "bert.gguf")
    return folder / "bert.gguf"


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("checkpoint", marks=pytest.mark.torch),
        pytest.param("gguf", marks=pytest.mark.llama),
    ],
)
@pytest.mark.parametrize("ram_cache_mb", [None, 100])
def test_encoder_takes_no_memory_for_keys_and_values(tmp_path, form, ram_cache_mb) -> None:
    """So it leaves room for other models."""
    settings = Settings(kv=KVSettings(ram_cache_mb=ram_cache_mb))
    fitted = fit_memory(make_engine_params(settings, write_encoder(tmp_path, form)))
    assert fitted.ram_cache_bytes == 0
    assert memory.COMPUTE_BYTES < fitted.max_bytes < memory.COMPUTE_BYTES + 20_000_000


@pytest.mark.llama
def test_cells_states_and_checkpoints_of_a_hybrid_take_the_given_memory(tmp_path) -> None:
    write_tiny_model("lfm2", tmp_path / "model.gguf")
    params = EngineParams(
        path=str(tmp_path / "model.gguf"), kv_memory=500_000, speculation="off", max_num_seqs=50
    )
    backend = build_backend(params)
    engine = build_engine(backend, params)
    info, checkpoints = backend.info, engine.scheduler.sequences.kv_cache.checkpoints
    backend.close()
    num_states = info.max_num_seqs + checkpoints._max_num
    taken = info.num_cells * info.kv_bytes_per_token + num_states * info.checkpoint_bytes
    assert checkpoints._max_num > 20
    assert 480_000 < taken <= 500_000
