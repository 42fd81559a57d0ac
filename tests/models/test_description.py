"""What models of both forms say about themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import CONFIG, write_checkpoint

from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN
from cllm.models.description import describe_model
from cllm.models.model_file import list_files
from cllm.models.task import find_task

LLAMA = CONFIG | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}


def test_gguf_file() -> None:
    model = describe_model(BUILTIN)
    assert (model.form, model.architecture) == ("gguf", "qwen3")
    assert model.num_bytes == BUILTIN.stat().st_size
    assert model.template
    assert "tokenizer.chat_template" not in model.metadata
    assert model.context_length
    assert model.kv_bytes_per_token
    assert len(model.digest) == 64


def test_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config=LLAMA, tokenizer_config={"chat_template": "{{ a }}"})
    model = describe_model(tmp_path)
    assert (model.form, model.architecture, model.quantization) == ("safetensors", "llama", "BF16")
    assert (model.context_length, model.num_layers, model.embedding_length) == (512, 3, 64)
    assert model.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert model.num_parameters == 9
    assert model.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert model.template == "{{ a }}"
    assert model.metadata["config.hidden_size"] == 64
    assert {file.name for file in list_files(tmp_path)} == {
        *("config.json", "tokenizer_config.json", "model.safetensors"),
    }


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "x"}, {"num_hidden_layers": -1}, {"num_attention_heads": 1 << 60}],
)
def test_configuration_that_does_not_say_sizes(tmp_path: Path, change: dict[str, object]) -> None:
    write_checkpoint(tmp_path, config=LLAMA | {"num_key_value_heads": None} | change)
    assert describe_model(tmp_path).kv_bytes_per_token is None


def test_damaged_models(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(StartupError, match="is not a safetensors file"):
        describe_model(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"x")
    with pytest.raises(StartupError, match="is not a GGUF file"):
        describe_model(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("architecture", "template", "task"),
    [
        ("LlamaForCausalLM", True, "chat"),
        ("LlamaForCausalLM", False, "completion"),
        ("Gemma3ForConditionalGeneration", True, "chat"),
        ("BertModel", False, "embedding"),
        ("BertForSequenceClassification", False, "embedding"),
    ],
)
def test_task_of_a_checkpoint(tmp_path: Path, architecture: str, template: bool, task: str) -> None:
    write_checkpoint(tmp_path, config={"architectures": [architecture]})
    if template:
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert find_task(tmp_path) == task


def test_task_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert find_task(tmp_path) == "chat"
