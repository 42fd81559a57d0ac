"""The decoder computes what transformers computes, for each architecture, however its tokens come.

The weights are random and small; transformers computes them without batches, caches or shared
prefixes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
transformers = pytest.importorskip("transformers", reason="needs it as a reference")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SIZE = 300  # of the vocabulary
TOLERANCE = 1e-4  # of the largest logit
BASE = {
    "vocab_size": SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT = {"original_max_position_embeddings": 64}
SHORTER = {"original_max_position_embeddings": 32}  # all texts are longer
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [1 + 0.5 * i for i in range(8)],
}
THETA = {"rope_theta": 10_000.0}
EXPERTS = {"num_experts_per_tok": 2}
# the name of transformers' configuration, and what differs from BASE
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases and tied embeddings": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3 positions": ("Llama", {"rope_parameters": LLAMA3 | THETA | SHORT}),
    "yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0} | THETA | SHORT}),
    "linear positions": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0} | THETA},
    ),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 24}),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS
        | {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}
        | {"head_dim": 32, "mlp_only_layers": [0]},
    ),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": 16}
        | {"query_pre_attn_scalar": 24},
    ),
    "phi": ("Phi", {}),
    "phi with norms of heads": ("Phi", {"qk_layernorm": True}),
    "phi3": ("Phi3", {"sliding_window": 20}),
    "longrope": ("Phi3", {"rope_parameters": LONG | THETA | SHORTER} | SHORTER),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 4}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2}
        | {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    # computed by transformers
    "cohere2": ("Cohere2", {"sliding_window": 16, "logit_scale": 0.5}),
    "gpt2": ("GPT2", {}),
    "olmoe": ("Olmoe", EXPERTS | {"num_experts": 4}),
}


class Pair(NamedTuple):
    """Our decoder, and transformers' model: tokens to logits of each, float32."""

    decoder: Any
    reference: Callable[[list[int]], Any]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    config = getattr(transformers, f"{name}Config")(**BASE | options)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weights in model.parameters():  # otherwise biases and the offsets of norms are zero
        weights.data += torch.randn_like(weights) * 0.1
    model.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def reference(tokens: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]

    return Pair(read_decoder(folder), reference)


def read_decoder(folder: Path) -> Any:
    from cllm.backends.torch.architecture import needs_transformers, read_architecture
    from cllm.backends.torch.decoder import Decoder
    from cllm.backends.torch.library_decoder import LibraryDecoder
    from cllm.backends.torch.weights import Weights
    from cllm.models.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(folder)
    if needs_transformers(checkpoint.text_config):
        with torch.inference_mode():
            return LibraryDecoder(checkpoint, torch.float32, torch.device("cpu"))
    architecture = read_architecture(checkpoint.text_config, "config.json")
    return Decoder(Weights(checkpoint, torch.float32, torch.device("cpu")), architecture)


class Computer:
    """Computes tokens in steps, in cells of its own."""

    def __init__(self, decoder: Any, num_cells: int = 400, num_ids: int = 6) -> None:
        from cllm.backends.torch.cells import Cells

        a = decoder.architecture
        shape = (len(a.layers), a.num_kv_heads, a.head_size)
        self.decoder = decoder
        self.cells = Cells(shape, num_cells, num_ids, torch.float32, torch.device("cpu"))

    def compute(self, *rows: tuple[int, list[int]]) -> Any:
        """Compute the next tokens of sequences, and return the logits of all."""
        from cllm.backends.torch.step import make_step

        with torch.inference_mode():
            placed = [(seq_id, self.cells.length(seq_id), tokens) for seq_id, tokens in rows]
            step = make_step(self.decoder, self.cells, placed)
            logits = self.decoder.compute_logits(self.decoder.compute(step, self.cells))
        self.cells.check()
        return logits


def make_text(seed: int, length: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(SIZE) for _ in range(length)]


def assert_close(logits: Any, expected: Any) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_logits_equal_those_of_transformers(pair) -> None:
    """In one step, token by token, and in parts beside other sequences."""
    text, other = make_text(1, 90), make_text(2, 90)
    expected, of_other = pair.reference(text), pair.reference(other)
    assert_close(Computer(pair.decoder).compute((0, text)), expected)
    computer, at = Computer(pair.decoder), 0
    for size in (7, 1, 1, 20, 30, 1, 2, 28):
        part = slice(at, at := at + size)
        logits = computer.compute((2, other[part]), (0, text[part]), (1, other[part][:1]))
        assert_close(logits[:size], of_other[part])
        assert_close(logits[size : 2 * size], expected[part])


def test_sequences_continue_a_shared_prefix(pair) -> None:
    """It stays when the sequence that computed it goes."""
    texts = [[*make_text(3, 40), *make_text(seed, 20)] for seed in (4, 5, 6)]
    expected = [pair.reference(text) for text in texts]
    computer = Computer(pair.decoder)
    computer.compute((0, texts[0][:40]))
    for seq_id in (1, 2):
        computer.cells.copy(0, seq_id, 40)
    for at in range(40, 50):
        logits = computer.compute(*[(i, text[at : at + 1]) for i, text in enumerate(texts)])
        assert_close(logits, torch.stack([each[at] for each in expected]))
    computer.cells.trim(0, 0)
    logits = computer.compute(*[(i, texts[i][50:]) for i in (1, 2)])
    assert_close(logits, torch.cat([each[50:] for each in expected[1:]]))


def test_cells_in_pieces_are_read_in_order(pair) -> None:
    text = make_text(7, 60)
    computer = Computer(pair.decoder, num_cells=64)
    for at in range(0, 32, 4):
        computer.compute(*[(i, text[at : at + 4]) for i in (0, 1)])
    computer.cells.trim(0, 0)
    logits = computer.compute((1, text[32:]))
    assert len(computer.cells.runs(1, 0, 60)) > 1
    assert_close(logits, pair.reference(text)[32:])


def test_many_short_runs_are_read_in_few_parts(pair) -> None:
    """Sequences whose cells were left by many others, here and there."""
    from cllm.backends.torch.attention import make_plan

    texts = [make_text(seed, 70) for seed in (8, 9)]
    expected = [pair.reference(text) for text in texts]
    others = range(2, 152)
    computer = Computer(pair.decoder, num_cells=300, num_ids=len(others) + 2)
    for seq_id in others:
        computer.cells.grow(seq_id, 2)
    for seq_id in others[::2]:
        computer.cells.trim(seq_id, 0)
    for part in (slice(0, 40), slice(40, 41), slice(41, 42), slice(42, 70)):
        logits = computer.compute(*[(i, text[part]) for i, text in enumerate(texts)])
        assert_close(logits, torch.cat([each[part] for each in expected]))
    runs = computer.cells.runs(0, 0, 70)
    assert len(runs) > 10
    plan = make_plan([(69, 1, runs)], None, torch.device("cpu"))
    assert len(plan.singles.parts) < 5
