"""LoRA adapters as PEFT writes them: they compute what PEFT computes, and leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import pack_tensors, write_adapter

from cllm.backends.base import Backend
from cllm.backends.params import BackendParams
from cllm.backends.torch.options import Options
from cllm.core.batch import Batch, Chunk, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Adapters, Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

TOKENS = [5, 9, 33, 7, 20, 21, 40, 3]
ONE, TWO = (("one", 1.0),), (("two", 1.0),)


def load(path: Path, **adapters: Path) -> Backend:
    from cllm.backends.torch.loader import load

    options = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    files = {name: str(folder) for name, folder in adapters.items()}
    return load(
        BackendParams(
            path=str(path), context_length=256, max_num_seqs=2, options=options, adapters=files
        )
    )


@pytest.fixture(scope="module")
def folders(builtin_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, builtin_checkpoint, seed)
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def backend(builtin_checkpoint: Path, folders: dict[str, Path]):
    made = load(builtin_checkpoint, **folders)
    yield made
    made.close()


def logits(backend: Backend, adapters: Adapters = ()) -> np.ndarray:
    seq = Sequence(Request("A", TOKENS, SamplingParams(), adapters=adapters), 0, 0, 256)
    seq.seq_id = 0
    batch = Batch([Row(seq, 0, len(TOKENS), 1)], [Trim(0, 0)], adapters)
    return np.array(backend.forward(batch)[0])


def test_adapters_change_what_is_computed_and_leave_no_trace(backend) -> None:
    """Changing back gives the same bits as before."""
    plain, one, two = logits(backend), logits(backend, ONE), logits(backend, TWO)
    for first, second in ((plain, one), (plain, two), (one, two)):
        assert np.abs(first - second).max() > 0.1 * plain.std()
    assert np.array_equal(logits(backend), plain)
    assert np.array_equal(logits(backend, ONE), one)


def test_scale_and_combination(backend) -> None:
    plain, one = logits(backend), logits(backend, ONE)
    assert np.allclose(logits(backend, (("one", 0.0),)), plain, atol=1e-4)
    half, both = logits(backend, (("one", 0.5),)), logits(backend, (*ONE, *TWO))
    assert not np.allclose(half, one)
    assert not np.allclose(both, one)
    assert np.allclose(logits(backend, (*TWO, *ONE)), both, atol=1e-3)


def test_embeddings_are_computed_without_adapters(backend) -> None:
    chunk = [Chunk(TOKENS, 0, len(TOKENS))]
    plain = backend.embed(chunk)
    logits(backend, ONE)
    assert np.array_equal(backend.embed(chunk), plain)


def test_adapter_is_loaded_and_replaced_while_the_model_runs(
    builtin_checkpoint, folders, tmp_path
) -> None:
    """What an adapter has computed does not change when its folder is overwritten."""
    backend = load(builtin_checkpoint)
    plain = logits(backend)
    folder = write_adapter(tmp_path, builtin_checkpoint, 7)
    backend.load_adapter("new", str(folder))
    changed = logits(backend, (("new", 1.0),))
    assert not np.allclose(changed, plain)
    write_adapter(folder, builtin_checkpoint, 8)
    assert np.array_equal(logits(backend, (("new", 1.0),)), changed)
    backend.load_adapter("new", str(folder))
    assert not np.allclose(logits(backend, (("new", 1.0),)), changed)
    with pytest.raises(StartupError, match="the adapter new"):
        backend.load_adapter("new", str(tmp_path / "nowhere"))
    assert np.array_equal(logits(backend), plain)
    backend.close()


def test_unknown_adapter_is_an_error(backend) -> None:
    plain = logits(backend)
    with pytest.raises(EngineError, match="there is no adapter three"):
        logits(backend, (("three", 1.0),))
    assert np.array_equal(logits(backend), plain)


Damage = Callable[[Path, dict[str, Any], dict[str, Any]], None]


def change(**settings: Any) -> Damage:
    return lambda folder, config, tensors: config.update(settings)


def set_number(value: float) -> Damage:
    def damage(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        name, (dtype, shape, data) = next(iter(tensors.items()))
        tensors[name] = dtype, shape, data[:-4] + np.float32(value).tobytes()

    return damage


def rename(old: str, new: str) -> Damage:
    def damage(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change(peft_type="IA3"), "peft_type is 'IA3'"),
        (change(use_dora=True), "use_dora is True"),
        (change(bias="all"), "bias is 'all'"),
        (change(modules_to_save=["lm_head"]), "modules_to_save is"),
        (change(r=0), "r is 0"),
        (change(r="8"), "r is '8'"),
        (change(r=3), "has the shape"),
        (change(lora_alpha=float("nan")), "lora_alpha is nan"),
        (change(lora_alpha=10**400), "lora_alpha is 1000"),
        (change(alpha_pattern={"(a+)+": 1}), "alpha_pattern is"),
        (change(rank_pattern=[1]), "rank_pattern is"),
        (set_number(np.nan), "numbers that are not finite"),
        (set_number(-np.inf), "numbers that are not finite"),
        (rename("q_proj", "z_proj"), "not a matrix product"),
        (rename("layers.1", "layers.99"), "not a matrix product"),
        (rename("lora_A", "lora_magnitude_vector"), "which is not of LoRA"),
        (rename("lora_A", "lora_C"), "which is not of LoRA"),
        (rename("model.layers.0", "model.layers.0.x"), "not a matrix product"),
        (lambda folder, config, tensors: tensors.popitem(), "only one of the matrices"),
        (lambda folder, config, tensors: tensors.clear(), "has no tensors"),
    ],
)
def test_damaged_adapters_are_refused_with_one_line(
    backend, builtin_checkpoint, tmp_path, damage: Damage, words: str
) -> None:
    tensors: dict[str, Any] = {}
    write_adapter(tmp_path, builtin_checkpoint, 0, tensors=tensors)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    damage(tmp_path, config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(pack_tensors(tensors))
    with pytest.raises(StartupError, match="the adapter x cannot be loaded: ") as caught:
        backend.load_adapter("x", str(tmp_path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_adapter_is_refused(builtin_checkpoint, builtin_path, tmp_path) -> None:
    """A GGUF file, a checkpoint, a folder with a pickle, and a file that ends too early."""
    cut = write_adapter(tmp_path / "cut", builtin_checkpoint, 0)
    content = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(content[:-100])
    pickled = write_adapter(tmp_path / "pickled", builtin_checkpoint, 0)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    for path, words in (
        (builtin_path, "is a file, and the torch backend reads folders"),
        (builtin_checkpoint, "adapter_config.json"),
        (cut, "the download is incomplete"),
        (pickled, "has no adapter_model.safetensors"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(StartupError, match=words):
            load(builtin_checkpoint, x=path)


PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 64}}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses deprecated parts of transformers
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, PATTERNS], ids=str)
def test_logits_equal_those_of_peft(builtin_checkpoint, tmp_path, options) -> None:
    peft = pytest.importorskip("peft", reason="needs it as a reference")
    transformers = pytest.importorskip("transformers", reason="needs it as a reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        builtin_checkpoint, dtype=torch.float32
    ).eval()
    matrices = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=matrices, init_lora_weights=False, **options
    )
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = adapted(torch.tensor([TOKENS])).logits[0, -1].numpy()
    backend = load(builtin_checkpoint, x=tmp_path)
    difference = np.abs(logits(backend, (("x", 1.0),)) - expected).max()
    assert difference < 1e-4 * np.abs(expected).max()
    backend.close()
