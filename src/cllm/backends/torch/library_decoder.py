"""Decoders of further architectures: transformers computes, with attention over our cells.

The models of transformers call an attention function that can be registered under a name. Ours
writes keys and values to cells and attends as ``decoder.py`` does. A model that keeps anything else
of earlier tokens cannot be computed like this, so each one is compared with itself at its load.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cllm.backends.torch.architecture import Config, Layer, Shape, read_ranks, refuse_unknown
from cllm.backends.torch.attention import attend
from cllm.backends.torch.cells import Cells
from cllm.backends.torch.decoder import Linear, Step
from cllm.backends.torch.step import make_step
from cllm.errors import StartupError
from cllm.models.checkpoint import Checkpoint
from cllm.models.peft_adapter import ADAPTER_CONFIG

NAME = "cllm"
UNKNOWN = ("softcap", "s_aux", "position_bias")  # arguments that our attention does not know
TEXT, OTHER = [(7 * i) % 19 + 1 for i in range(24)], [3] * 24
TOLERANCE, LOW_TOLERANCE = 1e-3, 0.05  # of the largest logit, in float32 and in fewer bits


class Call(NamedTuple):
    """What attention was called with in a layer."""

    window: int | None
    num_kv_heads: int
    key_size: int
    value_size: int


class LibraryDecoder:
    """A model of transformers with the interface of ``decoder.Decoder``."""

    score: Linear | None = None

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Raises StartupError if transformers does not know the model, or if attention to cells
        changes what it computes.
        """
        self.device = device
        self.layers: list[Any] = []  # none that adapters can change
        self.generates = checkpoint.pooling is None
        config = Config(checkpoint.text_config, str(checkpoint.config_path))
        where, kind = config.where, config.values["model_type"]
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or read_ranks(config.values, where):
            raise refuse_unknown(kind, where)
        config.check_quantization()
        transformers.AttentionInterface.register(NAME, attend_to_cells)
        try:
            self._model = load(checkpoint, dtype).to(device)
            self.embeddings: Tensor = self._model.get_input_embeddings().weight
            self._head = make_head(self._model)
            self.architecture = self._find_shape(kind)
            difference = self._compare()
        except Exception as error:  # noqa: BLE001  # hundreds of models have errors of their own
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise StartupError(f"{where}: transformers cannot compute {kind}: {reason}") from None
        if not difference <= (TOLERANCE if dtype == torch.float32 else LOW_TOLERANCE):
            raise StartupError(
                f"{where}: the torch backend cannot serve {kind}, which computes something else in "
                "parts than as a whole: convert the model to GGUF for llama.cpp"
            )

    @property
    def windows(self) -> set[int | None]:
        return {layer.window for layer in self.architecture.layers}

    def compute(self, step: Step, cells: Cells) -> Tensor:
        """Return the hidden states of the tokens after the last norm, and fill their cells."""
        turn.step, turn.cells = step, cells
        tokens, positions = step.tokens.unsqueeze(0), step.positions.unsqueeze(0)
        computed = self._model.base_model(tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = computed.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, shape (tokens, vocabulary_size), float32."""
        logits: Tensor = self._head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def _find_shape(self, kind: str) -> Shape:
        """Compute a text to see what attention is called with."""
        calls: dict[int, Call] = {}
        turn.calls = calls
        try:
            self._compute_whole()
        finally:
            turn.calls = None
        sizes = {call[1:] for call in calls.values()}
        config = self._model.config.get_text_config()
        if sorted(calls) != [*range(config.num_hidden_layers)]:
            raise ValueError("not every layer has attention")
        windows = [calls[i].window for i in sorted(calls)]
        check_windows(config, windows)
        (num_kv_heads, size, value_size), *others = sizes
        if others or size != value_size:
            raise ValueError("keys and values, or layers, have different sizes")
        return Shape(
            model_type=kind,
            vocabulary_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_kv_heads=num_kv_heads,
            head_size=size,
            max_positions=getattr(config, "max_position_embeddings", None) or 2048,
            layers=tuple(Layer(window, None) for window in windows),
        )

    def _compute_whole(self) -> Tensor:
        tokens = torch.tensor([TEXT], device=self.device)
        logits: Tensor = self._model(tokens, use_cache=False).logits[0]
        return logits.float()

    def _compare(self) -> float:
        """Return by how much logits differ between transformers' attention and ours, for a text in
        parts beside another one, as a share of the largest logit.
        """
        self._model.set_attn_implementation("eager")
        expected = self._compute_whole()
        self._model.set_attn_implementation(NAME)
        a = self.architecture
        shape = len(a.layers), a.num_kv_heads, a.head_size
        cells = Cells(shape, 2 * len(TEXT), 2, self.embeddings.dtype, self.device)
        parts, at = [], 0
        for size in (9, 1, 1, 13):
            part = slice(at, at + size)
            step = make_step(self, cells, [(1, at, OTHER[part]), (0, at, TEXT[part])])
            parts.append(self.compute_logits(self.compute(step, cells)[size:]))
            at += size
        return float((torch.cat(parts) - expected).abs().max() / expected.abs().max())


def check_windows(config: Any, windows: list[int | None]) -> None:
    """Raise ValueError if attention is not called with the windows of its layers, which may be
    longer than any text that is computed at the load.
    """
    own, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    known = {"full_attention": None, "sliding_attention": own}
    for kind, window in zip(kinds or (), windows, strict=False):
        if kind not in known or known[kind] != window:
            raise ValueError(f"a layer has {str(kind)[:50]}")
    is_felt = own is not None and own < (
        getattr(config, "max_position_embeddings", None) or own + 1
    )
    if is_felt and not kinds and own not in windows:
        raise ValueError("its attention has a window of its own")
    if getattr(config, "attention_chunk_size", None):
        raise ValueError("its attention is divided into chunks")


class Turn:
    """What attention computes for. While ``calls`` is set, it notes them by layer, and computes as
    transformers does.
    """

    step: Step
    cells: Cells
    calls: dict[int, Call] | None = None


turn = Turn()


def attend_to_cells(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention; tensors have the shape (1, heads, tokens, head_size)."""
    unknown = [name for name in UNKNOWN if others.get(name) is not None]
    if unknown:
        raise ValueError(f"its attention needs {unknown[0]}")
    layer: int = module.layer_idx
    if turn.calls is not None:
        turn.calls[layer] = Call(sliding_window, key.shape[1], key.shape[3], value.shape[3])
        whole, _ = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return whole, None
    keys, values = turn.cells.keys[layer], turn.cells.values[layer]
    keys[:, turn.step.cells], values[:, turn.step.cells] = key[0], value[0]
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = turn.step.plans[sliding_window]
    return attend(plan, query, key, value, (keys, values), scale).unsqueeze(0), None


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Return the model of a checkpoint. It runs no code of the checkpoint."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if "longrope" in str(checkpoint.text_config):
        raise ValueError("its positions depend on the other texts of a batch")
    if (checkpoint.folder / ADAPTER_CONFIG).exists():
        raise ValueError(f"{ADAPTER_CONFIG} would change it")
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        dtype=dtype,
        attn_implementation=NAME,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    for name in found["missing_keys"]:
        raise ValueError(f"the checkpoint has no tensor {name}")
    return model.eval()


class Output:
    """What the body of a model returns to its head."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


def make_head(model: Any) -> Any:
    """Return ``model`` without its body: from hidden states to logits, with all scales and caps."""

    def body(*_: Any, inputs_embeds: Tensor, **__: Any) -> Output:
        return Output(inputs_embeds)

    head = copy.copy(model)
    head.__dict__["_modules"] = head.__dict__["_modules"] | {model.base_model_prefix: body}
    return head
