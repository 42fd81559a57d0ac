"""A model and its context in llama.cpp.

One wrong call into libllama kills the process, so ``forward`` checks what the contract promises before it calls.
The batch arrays live as long as the backend and are written through numpy views; logits are read through one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.base import Logits, ModelInfo
from cllm.backends.llama_cpp.library import check_pointer, last_error, system_info
from cllm.core.batch import Batch
from cllm.errors import EngineError, StartupError

PHYSICAL_BATCH = 512  # tokens that llama.cpp computes in one pass over the weights
MIN_CONTEXT = 256
USUAL_CONTEXT = 4096


class LlamaCppParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to load: sizes in tokens, memory in bytes.

    context_length None means as the model and the memory allow; max_num_seqs is a limit, ``fit`` may take fewer.
    """

    context_length: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    unified: bool = False
    kv_memory: int = 1 << 31
    kv_bytes_per_token: int = 0
    n_threads: int | None = None
    n_gpu_layers: int = 99
    use_mmap: bool = True
    use_mlock: bool = False


class Fit(NamedTuple):
    """Sizes of the KV cache in tokens: of one sequence, how many sequences, of all together."""

    context_length: int
    max_num_seqs: int
    num_cells: int


def fit(params: LlamaCppParams, trained_context_length: int) -> Fit:
    """Share kv_memory among sequences: first the context that was asked for (or the usual), then as many as fit.

    Raises StartupError with the sizes if not even one sequence fits.
    """
    affordable = params.kv_memory // max(1, params.kv_bytes_per_token)
    context = params.context_length or max(MIN_CONTEXT, min(trained_context_length, USUAL_CONTEXT, affordable))
    if context > affordable:
        need = context * params.kv_bytes_per_token
        raise StartupError(
            f"one sequence of {context} tokens needs {need / 1e6:.0f} MB of KV cache, but "
            f"{params.kv_memory / 1e6:.0f} MB are allowed: lower model.max_context_length or raise kv.max_memory_mb"
        )
    if params.unified:
        return Fit(context, params.max_num_seqs, min(affordable, params.max_num_seqs * context))
    num_seqs = min(params.max_num_seqs, affordable // context)
    return Fit(context, num_seqs, num_seqs * context)


class LlamaCppBackend:
    """See backends/base.py for the contract."""

    def __init__(self, path: Path, params: LlamaCppParams, progress: Callable[[float], None] | None = None) -> None:
        """Load ``path``; ``progress`` is told the loaded share, 0 to 1. Raises StartupError if it cannot be loaded."""
        self._model = self._load_model(path, params, progress)
        self._check_architecture(path)
        vocab = lib.llama_model_get_vocab(self._model)
        vocabulary_size = int(lib.llama_vocab_n_tokens(vocab))
        trained = int(lib.llama_model_n_ctx_train(self._model))
        sizes = fit(params, trained)
        self._context = self._make_context(path, params, sizes)
        self._memory = lib.llama_get_memory(self._context)
        self.info = ModelInfo(
            name=self._metadata("general.name") or path.stem,
            architecture=self._metadata("general.architecture") or "unknown",
            description=self._describe(),
            vocabulary_size=vocabulary_size,
            context_length=sizes.context_length,
            trained_context_length=trained,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            num_cells=sizes.num_cells,
            layout="unified" if params.unified else "partitioned",
            end_tokens=[t for t in range(vocabulary_size) if lib.llama_vocab_is_eog(vocab, t)],
            model_bytes=int(lib.llama_model_size(self._model)),
            kv_bytes_per_token=params.kv_bytes_per_token,
            system=system_info(),
            can_trim=not (lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model)),
        )
        self._make_batch(params.max_num_batched_tokens, sizes.max_num_seqs)

    def _load_model(self, path: Path, params: LlamaCppParams, progress: Callable[[float], None] | None) -> Any:
        c_params = lib.llama_model_default_params()
        c_params.n_gpu_layers = params.n_gpu_layers
        c_params.load_mode = {
            (True, False): lib.LLAMA_LOAD_MODE_MMAP,
            (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
            (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
            (False, False): lib.LLAMA_LOAD_MODE_NONE,
        }[params.use_mmap, params.use_mlock]

        failed: list[BaseException] = []

        def report(share: float, _: ctypes.c_void_p) -> bool:
            try:
                if progress and not failed:
                    progress(share)
            except BaseException as error:  # noqa: BLE001  # it would be lost here: the load ends, then it is raised
                failed.append(error)
            return not failed

        callback = lib.llama_progress_callback(report)  # a local name keeps it alive during the load
        c_params.progress_callback = callback
        model = lib.llama_model_load_from_file(str(path).encode(), c_params)
        if failed:
            if model:
                lib.llama_model_free(model)
            raise failed[0]
        return check_pointer(model, f"cannot load {path}")

    def _make_context(self, path: Path, params: LlamaCppParams, sizes: Fit) -> Any:
        threads = params.n_threads or os.cpu_count() or 1
        c_params = lib.llama_context_default_params()
        c_params.n_ctx = sizes.num_cells
        c_params.n_batch = params.max_num_batched_tokens
        c_params.n_ubatch = min(PHYSICAL_BATCH, params.max_num_batched_tokens)
        c_params.n_seq_max = sizes.max_num_seqs
        c_params.n_outputs_max = sizes.max_num_seqs
        c_params.n_threads = threads
        c_params.n_threads_batch = threads
        c_params.kv_unified = params.unified
        c_params.no_perf = True
        context = lib.llama_init_from_model(self._model, c_params)
        return check_pointer(context, f"not enough memory for a context of {c_params.n_ctx} tokens of {path}")

    def _check_architecture(self, path: Path) -> None:
        if lib.llama_model_has_encoder(self._model) or not lib.llama_model_has_decoder(self._model):
            raise StartupError(f"{path} is an encoder model ({self._describe()}), which does not generate text")

    def _metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(256)
        length = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, 256)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _describe(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._model, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    def _make_batch(self, size: int, max_num_seqs: int) -> None:
        self._token = np.zeros(size, np.int32)
        self._position = np.zeros(size, np.int32)
        self._num_seq_ids = np.ones(size, np.int32)
        self._wants_logits = np.zeros(size, np.int8)
        # llama_batch wants a pointer to the id of each token: one array of ids, and addresses into it
        self._ids = np.arange(max_num_seqs, dtype=np.int32)
        self._id_address = np.zeros(size, np.uint64)
        self._first_id = self._ids.ctypes.data
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=self._token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._position.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._num_seq_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._id_address.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def forward(self, batch: Batch) -> Logits:
        for seq_id, keep in batch.operations:
            self._check_seq_id(seq_id)
            lib.llama_memory_seq_rm(self._memory, seq_id, keep, -1)
        self._fill(batch)
        code = lib.llama_decode(self._context, self._batch)
        if code != 0:
            raise EngineError(f"llama_decode returned {code}: {last_error('no reason given')}")
        pointer = lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (batch.num_samples, self.info.vocabulary_size))

    def _fill(self, batch: Batch) -> None:
        """Write the rows into the arrays of the llama_batch, after checking what would abort the process."""
        at = 0
        for seq, start, count, samples in batch.rows:
            self._check_seq_id(seq.seq_id)
            end = at + count
            if end > len(self._token):
                raise EngineError(f"a batch of more than {len(self._token)} tokens")
            if count == 1:
                self._token[at] = seq.tokens[start]
                self._position[at] = start
                self._id_address[at] = self._first_id + 4 * seq.seq_id
            else:
                self._token[at:end] = seq.tokens[start : start + count]
                self._position[at:end] = range(start, start + count)
                self._id_address[at:end] = self._first_id + 4 * seq.seq_id
                self._wants_logits[at:end] = 0
            self._wants_logits[end - 1] = samples
            at = end
        if at == 0:
            raise EngineError("an empty batch")
        self._batch.n_tokens = at

    def _check_seq_id(self, seq_id: int) -> None:
        if not 0 <= seq_id < len(self._ids):
            raise EngineError(f"sequence id {seq_id} is not below {len(self._ids)}")

    def close(self) -> None:
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)
