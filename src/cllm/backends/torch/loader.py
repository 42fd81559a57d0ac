"""Loads checkpoints and GGUF files with PyTorch; see ``registry.Loader``."""
# ruff: noqa: ARG001  # the protocol has these arguments

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cllm.backends.params import BackendParams, ModelSize, SingleGpu
from cllm.errors import EngineError, StartupError

if TYPE_CHECKING:
    from cllm.backends.base import Backend, Vocabulary
    from cllm.models.hub import Progress

COPIED_SHARE = 0.0
INSTALL = (
    'install it with pip install "cllm[torch]"; without a GPU, add '
    "--extra-index-url https://download.pytorch.org/whl/cpu, which saves gigabytes of CUDA"
)


def resolve(
    name: str | None, quantization: str | None = None, progress: Progress | None = None
) -> Path:
    from cllm.models import catalog  # the engine process does not need it

    return catalog.resolve(name, quantization, progress, "checkpoint")


def measure(params: BackendParams, *, check_tokens: bool = False) -> ModelSize:
    from cllm.backends.torch.architecture import needs_transformers
    from cllm.backends.torch.encoder_config import is_encoder, read_encoder_config
    from cllm.backends.torch.gguf_checkpoint import describe_decoder, read_model

    checkpoint = read_model(Path(params.path), check_tokens=check_tokens)
    # "auto" is at most float32; only PyTorch, which takes a second to import, knows whether it is
    itemsize = 2 if params.options.get("dtype") in ("bfloat16", "float16") else 4
    num_kept = 0  # numbers of a token in the KV cache
    embeds_only = is_encoder(checkpoint.text_config)
    if embeds_only:
        read_encoder_config(checkpoint.text_config, str(checkpoint.config_path))
    elif needs_transformers(checkpoint.text_config):
        num_kept = checkpoint.count_kv_numbers() or 0  # importing transformers takes seconds
    else:
        architecture = describe_decoder(checkpoint, params.context_length)
        num_kept = 2 * len(architecture.layers) * architecture.kv_size
    return ModelSize(checkpoint.num_parameters * itemsize, num_kept * itemsize, not embeds_only)


def measure_gpus(params: BackendParams) -> int | None:
    with loadable():
        from cllm.backends.torch.backend import choose_device, measure_free, read_options

    device = choose_device(read_options(params))
    return None if device.type == "cpu" else measure_free(device)


def find_gpus(params: BackendParams) -> list[SingleGpu]:
    return []


def may_divide_cores(params: BackendParams) -> bool:
    return False


def load(
    params: BackendParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    from cllm.backends.torch.encoder_config import is_encoder
    from cllm.models.checkpoint import read_config

    path = Path(params.path)
    is_file = path.is_file()
    with loadable():
        from cllm.backends.torch.backend import TorchBackend
        from cllm.backends.torch.encoder_backend import EncoderBackend

        if is_file:
            import gguf  # noqa: F401  # dequantizes the weights

    embeds_only = not is_file and is_encoder(read_config(path))
    try:
        return (EncoderBackend if embeds_only else TorchBackend)(params, progress)
    except (RuntimeError, EngineError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"{params.path}: PyTorch cannot load the model: {reason}") from None


def load_vocabulary(params: BackendParams) -> Vocabulary:
    from cllm.backends.torch.gguf_checkpoint import read_model

    with loadable():
        from cllm.backends.torch.vocabulary import read_vocabulary

    from cllm.backends.torch.architecture import Config

    checkpoint = read_model(Path(params.path))
    config = Config(checkpoint.text_config, str(checkpoint.config_path))
    return read_vocabulary(checkpoint, config.integer("vocab_size"))


@contextmanager
def loadable() -> Iterator[None]:
    """Raise StartupError if PyTorch, or what comes with it, is missing or cannot be loaded."""
    try:
        yield
    except (ImportError, OSError) as error:
        reason = f"cannot be loaded ({error})"
        if isinstance(error, ModuleNotFoundError):
            reason = f"is not installed ({error.name} is missing)"
        raise StartupError(f"PyTorch {reason}: {INSTALL}") from None
