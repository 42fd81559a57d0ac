"""A model and its cells in PyTorch; implements the contract of backends/base.py."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor

from cllm.backends.base import Logits, StateBuffer, Vectors, Vocabulary
from cllm.backends.params import BackendParams
from cllm.backends.torch.adapters import LoadedAdapters
from cllm.backends.torch.architecture import Config, Shape, needs_transformers
from cllm.backends.torch.cells import Cells
from cllm.backends.torch.decoder import AnyDecoder, Decoder
from cllm.backends.torch.embedder import Embedder
from cllm.backends.torch.gguf_checkpoint import describe_decoder, read_model
from cllm.backends.torch.step import make_step
from cllm.backends.torch.threads import Threads
from cllm.backends.torch.vocabulary import read_vocabulary
from cllm.backends.torch.weights import DTYPES, open_weights
from cllm.core.batch import Batch, Chunk, Copy, Drop, Load, Operation, Save, Trim
from cllm.core.model_info import ModelInfo
from cllm.errors import EngineError, StartupError
from cllm.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from cllm.backends.torch.options import Options

MIN_CONTEXT = 256
MIN_SAMPLES = 16  # room for draft tokens when few sequences run
NUM_SPARE_IDS = 192  # idle prefixes that keep their cells
HEAD = struct.Struct("<4sIQ")  # before a saved state: a mark, the bytes of a token, the tokens
MARK = b"cllt"
PROBES = 3


def read_options(params: BackendParams) -> Options:
    """Return the options as attributes. They were checked when the settings were read."""
    if params.options:
        return cast("Options", SimpleNamespace(**params.options))
    from cllm.backends.torch.options import Options

    return Options()


def choose_device(options: Options) -> torch.device:
    """Raises StartupError if PyTorch does not find the device that was asked for."""
    there = {
        "cuda": torch.cuda.is_available,
        "xpu": torch.xpu.is_available,
        "mps": torch.backends.mps.is_available,
    }
    if options.device == "auto":
        return torch.device(next((name for name, is_there in there.items() if is_there()), "cpu"))
    if options.device in there and not there[options.device]():
        raise StartupError(
            f"backend.torch.device is {options.device}, but PyTorch {torch.__version__} finds none"
        )
    return torch.device(options.device)


def measure_free(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes; 0 if PyTorch does not tell."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).mem_get_info()[0])
    return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())


def choose_dtype(options: Options, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    if options.dtype != "auto":
        return cast(torch.dtype, getattr(torch, options.dtype))
    stored = {tensor.dtype for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}
    own = DTYPES[stored.pop()] if len(stored) == 1 and stored <= DTYPES.keys() else torch.float32
    if device.type == "cpu" and not (own == torch.bfloat16 and multiplies_bfloat16()):
        return torch.float32
    return own


def multiplies_bfloat16() -> bool:
    """Return whether the CPU has matrix instructions for bfloat16, with which it is faster than
    float32.
    """
    return bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001  # has no public name


def divide_memory(params: BackendParams, trained: int, per_token: int) -> tuple[int, int]:
    """Return the context length and the number of cells.

    Raises StartupError if the memory is too small for one sequence.
    """
    affordable = params.kv_memory // per_token
    context = params.context_length or max(MIN_CONTEXT, min(trained, affordable))
    if context > affordable:
        raise StartupError(
            f"one sequence of {context} tokens needs {context * per_token / 1e6:.0f} MB of KV "
            f"cache, but {params.kv_memory / 1e6:.0f} MB are allowed: lower "
            "model.max_context_length or raise kv.max_memory_mb"
        )
    return context, min(affordable, params.max_num_seqs * context)


def check_finite(computed: Tensor, dtype: torch.dtype) -> None:
    """Raise StartupError if the numbers that a model has computed are not finite."""
    if not bool(torch.isfinite(computed).all()):
        raise StartupError(
            "the model computes numbers that are not finite: its weights are damaged, or too large "
            f"for {str(dtype).removeprefix('torch.')} (see backend.torch.dtype)"
        )


def make_library_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> AnyDecoder:
    """Raises StartupError if transformers cannot be loaded, or cannot compute the model."""
    try:
        from cllm.backends.torch.library_decoder import LibraryDecoder
    except ImportError as error:
        raise StartupError(f"transformers cannot be loaded: {error}") from None
    return LibraryDecoder(checkpoint, dtype, device)


class TorchBackend:
    """Implements the contract of backends/base.py."""

    drafter = None

    def __init__(
        self, params: BackendParams, progress: Callable[[float], None] | None = None
    ) -> None:
        """Load the checkpoint or GGUF file ``params.path``. ``progress`` receives the loaded share,
        0 to 1.

        Raises StartupError if it cannot be loaded.
        """
        options = read_options(params)
        checkpoint = read_model(Path(params.path))
        self.device = choose_device(options)
        self._threads = Threads(options.n_threads, self.device)
        self.share_cores = self._threads.share
        self.dtype = choose_dtype(options, self.device, checkpoint)
        config = Config(checkpoint.text_config, str(checkpoint.config_path))
        architecture = None
        if not needs_transformers(config.values):
            architecture = describe_decoder(checkpoint, params.context_length)
        self.vocabulary: Vocabulary = read_vocabulary(checkpoint, config.integer("vocab_size"))
        with torch.inference_mode():
            self._decoder: AnyDecoder
            if architecture is None:
                self._decoder = make_library_decoder(checkpoint, self.dtype, self.device)
            else:
                weights = open_weights(checkpoint, self.dtype, self.device, progress)
                self._decoder = Decoder(weights, architecture)
            self._adapters = LoadedAdapters(self._decoder, params.adapters)
        self._snapshots: dict[int, Tensor] = {}
        self._open(params, checkpoint, self._decoder.architecture)
        if progress:
            progress(1.0)

    def _open(self, params: BackendParams, checkpoint: Checkpoint, a: Shape) -> None:
        per_token = 2 * len(a.layers) * a.kv_size * self.dtype.itemsize
        context, num_cells = divide_memory(params, a.max_positions, per_token)
        shape = (len(a.layers), a.num_kv_heads, a.head_size)
        num_ids = params.max_num_seqs + NUM_SPARE_IDS
        self._cells = Cells(shape, num_cells, num_ids, self.dtype, self.device)
        longest = min(context, checkpoint.max_embedding_tokens or context)
        self._embedder = Embedder(
            self._decoder, checkpoint.pooling or "mean", longest, self._threads
        )
        num_samples = min(params.max_num_batched_tokens, max(MIN_SAMPLES, params.max_num_seqs))
        self.info = ModelInfo(
            name=checkpoint.name,
            architecture=a.model_type,
            description=f"{a.model_type} {checkpoint.num_parameters / 1e9:.2g}B "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}",
            vocabulary_size=a.vocabulary_size,
            context_length=context,
            trained_context_length=a.max_positions,
            max_num_seqs=params.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            max_num_samples=num_samples,
            num_cells=num_cells,
            layout="unified",
            end_tokens=self.vocabulary.end_tokens,
            num_spare_ids=NUM_SPARE_IDS,
            model_bytes=checkpoint.num_parameters * self.dtype.itemsize,
            kv_bytes_per_token=per_token,
            state_bytes=HEAD.size,
            state_bytes_per_token=per_token,
            checks_states=True,
            fingerprint=f"{checkpoint.fingerprint} torch {self.dtype} {context}",
            system=f"PyTorch {torch.__version__}",
            on_gpu=self.device.type != "cpu",
            generates=self._decoder.generates,
            embedding_size=1 if a.ranks else a.hidden_size,
            pooling=self._embedder.pooling,
            max_embedding_tokens=self._embedder.max_tokens,
            max_embedding_batch_tokens=self._embedder.max_batch_tokens,
        )
        self.info = msgspec.structs.replace(self.info, row_seconds=self._probe())

    def _probe(self) -> float:
        """Return the time of a step with one row. This also warms up.

        Raises StartupError if the numbers that it computes are not finite.
        """
        times = []
        for at in range(PROBES + 1):
            begun = time.perf_counter()
            hidden = self._compute([(0, at, [0])], [0])
            times.append(time.perf_counter() - begun)
        with torch.inference_mode():
            check_finite(self._decoder.compute_logits(hidden), self.dtype)
        self._cells.trim(0, 0)
        return min(times[1:])

    def load_adapter(self, name: str, path: str) -> None:
        with torch.inference_mode():
            self._adapters.load(name, path)

    # --- a step ----------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Logits:
        """Raises EngineError for invalid batches, and if PyTorch fails."""
        if not self.info.generates:
            raise EngineError("this model does not generate")
        with torch.inference_mode():
            try:
                for operation in batch.operations:
                    self._operate(operation)
                if not batch.rows:
                    return []
                self._adapters.use(batch.adapters)
                return self._compute_rows(batch)
            except RuntimeError as error:  # out of memory, too
                raise EngineError(f"PyTorch failed: {str(error)[:500]}") from error

    def _compute_rows(self, batch: Batch) -> Logits:
        info, rows, at = self.info, [], 0
        samples: list[int] = []
        if not 0 < batch.num_tokens <= info.max_num_batched_tokens:
            raise EngineError(f"a batch of {batch.num_tokens} tokens")
        if batch.num_samples > info.max_num_samples:
            raise EngineError(f"a batch of {batch.num_samples} samples")
        for row in batch.rows:
            seq_id, tokens = row.seq.seq_id, row.tokens
            self._check_row(seq_id, row.start, tokens)
            rows.append((seq_id, row.start, tokens))
            at += len(tokens)
            samples += range(at - row.num_samples, at)
        hidden = self._compute(rows, samples)
        if not samples:
            return []
        logits = self._decoder.compute_logits(hidden)
        return list(logits.cpu().numpy())

    def _check_row(self, seq_id: int, start: int, tokens: list[int]) -> None:
        if not 0 <= seq_id < self.info.max_num_seqs:
            raise EngineError(f"sequence id {seq_id} is not below {self.info.max_num_seqs}")
        length = self._cells.length(seq_id)
        if start != length:
            raise EngineError(f"sequence {seq_id} has {length} tokens, and a row from {start} on")
        if start + len(tokens) > self.info.context_length:
            raise EngineError(f"sequence {seq_id} outgrows {self.info.context_length} tokens")
        if not tokens or min(tokens) < 0 or max(tokens) >= self.info.vocabulary_size:
            raise EngineError("a token outside the vocabulary, or no token")

    def _compute(self, rows: Sequence[tuple[int, int, list[int]]], samples: list[int]) -> Tensor:
        """Compute rows, each of a sequence, its number of tokens before, and the new ones. Return
        the hidden states of the tokens ``samples``.
        """
        step = make_step(self._decoder, self._cells, rows)
        hidden = self._threads.run(self._decoder.compute, step, self._cells)
        return hidden if len(samples) == len(hidden) else hidden[samples]

    # --- cells -----------------------------------------------------------------------------------

    def _operate(self, operation: Operation) -> None:
        cells = self._cells
        match operation:
            case Trim(seq_id, keep):
                cells.trim(seq_id, keep)
            case Copy(source, target, count):
                cells.copy(source, target, count)
            case Save(seq_id, key):
                num_tokens = cells.length(seq_id)
                state = torch.empty(HEAD.size + num_tokens * cells.token_bytes, dtype=torch.uint8)
                HEAD.pack_into(state.numpy().data, 0, MARK, cells.token_bytes, num_tokens)
                state[HEAD.size :] = cells.read(seq_id)
                self._snapshots[key] = state
            case Load(key, seq_id, count):
                cells.length(seq_id)
                if key not in self._snapshots:
                    raise EngineError(f"there is no snapshot {key}")
                state = self._snapshots[key]
                num_tokens = self._count_saved(state)
                if num_tokens < count:
                    raise EngineError(f"snapshot {key} has {num_tokens} tokens, not {count}")
                cells.write(seq_id, state[HEAD.size :], num_tokens, count)
            case Drop(key):
                self._snapshots.pop(key, None)
            case _:
                raise EngineError("the torch backend cannot swap cells")

    def _count_saved(self, state: Tensor) -> int:
        """Return the number of tokens in a state. Raises EngineError if it is not one of ours."""
        if len(state) >= HEAD.size:
            mark, token_bytes, count = HEAD.unpack_from(state.numpy().data)
            if (mark, token_bytes) == (MARK, self._cells.token_bytes) and (
                len(state) == HEAD.size + count * token_bytes
            ):
                return int(count)
        raise EngineError("a saved state is damaged, or of another model or type of cells")

    def snapshot(self, key: int) -> memoryview:
        return memoryview(self._snapshots[key].numpy())

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        state = torch.empty(num_bytes, dtype=torch.uint8)
        return StateBuffer(memoryview(state.numpy()), state)

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        if self._count_saved(filled.state) != num_tokens:
            raise EngineError(f"a saved state has other tokens than {num_tokens}")
        self._snapshots[key] = filled.state

    def embed(self, chunks: list[Chunk]) -> Vectors:
        with torch.inference_mode():
            try:
                self._adapters.use(())
                return self._embedder.embed(chunks)
            except RuntimeError as error:
                raise EngineError(f"PyTorch failed: {str(error)[:500]}") from error

    def close(self) -> None:
        self._snapshots.clear()
        del self._decoder, self._cells, self._embedder, self._adapters
