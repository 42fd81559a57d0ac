"""A model and its context in llama.cpp.

One wrong call into libllama kills the process, so ``forward`` checks the contract's guarantees
before it calls. The batch arrays live as long as the backend and are written through numpy views;
logits are read through another view.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.base import Logits, StateBuffer, Vectors
from cllm.backends.llama_cpp.arrays import BatchArrays
from cllm.backends.llama_cpp.embedder import Embedder, facts_of
from cllm.backends.llama_cpp.fit import fit, max_samples
from cllm.backends.llama_cpp.library import (
    TESTED_VERSION,
    check_pointer,
    last_error,
    log_lines,
    supports_gpu_offload,
    system_info,
)
from cllm.backends.llama_cpp.states import Bytes, States
from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Chunk, Copy, Drop, Load, Operation, Row, Save, Trim
from cllm.core.model_info import ModelInfo
from cllm.errors import EngineError, StartupError
from cllm.models.gguf import compute_fingerprint

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

NOTHING = np.zeros(0, np.uint8)
# libllama's limit; in the unified layout, ids from n_seq_max on can hold tokens, too
MAX_SEQ_IDS = 256
SCRATCH_ID = MAX_SEQ_IDS - 1  # hidden from the caller
TILE = 64  # queries of the attention kernel for prompts; the one for fewer takes twice as long each
PADDED, PADDED_CONTEXT = 48, 512  # tokens in a tile, and before it, from which on padding pays off
NO_CELLS = 1  # llama_decode's return value if a batch does not fit; nothing has changed then
USUAL_BANDWIDTH = 2e9  # bytes per second at which memory is laid out
WEIGHTS_FOLLOW = b"load_tensors: loading model tensors"  # logged before the first progress report
KV_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}


def options_of(params: BackendParams) -> Options:
    """Return the options as attributes.

    They were checked when the settings were read. Checking them again would import pydantic, and
    the engine process would start 0.1 s later.
    """
    if params.options:
        return cast("Options", SimpleNamespace(**params.options))
    from cllm.backends.llama_cpp.options import Options

    return Options()


def uses_gpu(params: BackendParams) -> bool:
    """Return whether the weights will be on a GPU."""
    return options_of(params).n_gpu_layers != 0 and supports_gpu_offload()


class Probed(NamedTuple):
    """What a model's memory supports.

    A saved state of n tokens takes state_bytes + n * state_bytes_per_token.
    """

    can_trim: bool
    state_bytes: int
    state_bytes_per_token: int


class LlamaCppBackend:
    """Implements the contract of backends/base.py."""

    def __init__(
        self, params: BackendParams, progress: Callable[[float], None] | None = None
    ) -> None:
        """Load ``params.path``; ``progress`` receives the loaded share, 0 to 1.

        Raises StartupError if it cannot be loaded.

        The first share, 0, is reported after the vocabulary and before any weight is read. A
        damaged file may abort the process.
        """
        self._path = Path(params.path)
        self._model = self._load_model(options_of(params), progress)
        self._check_architecture()
        self.vocabulary = LlamaVocabulary(self._model)
        self.vocabulary.check()
        self._context: Any = None
        self._num_ids = 0
        self._open(params)

    def reopen(self, params: BackendParams) -> None:
        """Replace the context with one for ``params``. The weights stay loaded; snapshots are lost.

        Raises StartupError if that fails; there is no context then.
        """
        self._embedder.close()
        lib.llama_free(self._context)
        self._context = None  # so it is not freed again if the next line fails
        self._open(params)

    def _open(self, params: BackendParams) -> None:
        options, on_gpu = options_of(params), uses_gpu(params)
        vocab = lib.llama_model_get_vocab(self._model)
        vocabulary_size = int(lib.llama_vocab_n_tokens(vocab))
        trained = int(lib.llama_model_n_ctx_train(self._model))
        # In the unified layout, llama.cpp silently gives a sequence's cells before its window to
        # other sequences.
        windowed = lib.llama_model_n_swa(self._model) > 0
        plain = not (
            lib.llama_model_is_recurrent(self._model)
            or lib.llama_model_is_hybrid(self._model)
            or windowed
        )
        sizes = fit(params, trained, plain=plain, on_gpu=on_gpu)
        self._params, self._options, self._sizes, self._plain = params, options, sizes, plain
        self._pads = plain and not on_gpu
        self._portable = plain
        self._snapshots: dict[int, Bytes] = {}
        self._make_batch(params.max_num_batched_tokens, sizes.max_num_seqs)
        begun = time.perf_counter()
        self._open_context(sizes.layout)
        # Memory that was never used may be slow to get. The next layout gets used memory, so the
        # time is capped.
        size = sizes.num_cells * params.kv_bytes_per_token
        layout_seconds = min(time.perf_counter() - begun, size / USUAL_BANDWIDTH)
        generates = bool(self._memory)
        probed = self._probe() if generates else Probed(True, 0, 0)
        vectors = facts_of(self._model, self._context, vocabulary_size)
        if not generates:  # an encoder keeps no state between texts
            lib.llama_free(self._context)
            self._context = None
        max_embedding_tokens = min(sizes.context_length, trained, vectors.max_tokens)
        threads = options.n_threads_batch or options.n_threads
        self._embedder = Embedder(self._model, vectors, max_embedding_tokens, threads)
        self.info = ModelInfo(
            name=self._metadata("general.name") or self._path.stem,
            architecture=self._metadata("general.architecture") or "unknown",
            description=self._describe(),
            vocabulary_size=vocabulary_size,
            context_length=sizes.context_length,
            trained_context_length=trained,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            max_num_samples=max_samples(params, sizes),
            num_cells=sizes.num_cells,
            layout=sizes.layout,
            end_tokens=[t for t in range(vocabulary_size) if lib.llama_vocab_is_eog(vocab, t)],
            model_bytes=int(lib.llama_model_size(self._model)),
            kv_bytes_per_token=params.kv_bytes_per_token,
            system=system_info(),
            on_gpu=on_gpu,
            tile=TILE,
            can_trim=probed.can_trim,
            num_spare_ids=self._num_ids - sizes.max_num_seqs,
            can_change_layout=generates and sizes.can_change and probed.can_trim and self._portable,
            layout_seconds=layout_seconds,
            generates=generates,
            embedding_size=vectors.size,
            pooling=vectors.pooling,
            max_embedding_tokens=max_embedding_tokens,
            max_embedding_batch_tokens=vectors.max_batch_tokens,
            embeds_whole=vectors.whole,
            state_bytes=probed.state_bytes,
            state_bytes_per_token=probed.state_bytes_per_token,
            fingerprint=f"{compute_fingerprint(self._path)} {TESTED_VERSION} {params.kv_type} "
            f"{'' if self._portable else sizes}",
        )

    def _open_context(self, layout: str) -> None:
        self._context = self._make_context(layout)
        self._memory = lib.llama_get_memory(self._context)
        self._logits_address = 0
        if not self._memory:
            self._num_ids = self._sizes.max_num_seqs
            return
        self._num_ids = max(
            self._sizes.max_num_seqs, SCRATCH_ID if layout == "unified" and self._plain else 0
        )
        self._states = States(
            self._context, self._sizes.max_num_seqs, layout, portable=self._portable
        )

    def change_layout(self, layout: str) -> None:
        lib.llama_free(self._context)
        self._context = None
        try:
            self._open_context(layout)
        except StartupError as error:
            self._open_context(self.info.layout)
            raise EngineError(f"the KV layout stays {self.info.layout}: {error}") from None
        num_spare_ids = self._num_ids - self._sizes.max_num_seqs
        self.info = msgspec.structs.replace(self.info, layout=layout, num_spare_ids=num_spare_ids)

    def _probe(self) -> Probed:
        """Find out by trying what this model's memory supports and how big its states are.

        This also warms up.
        """

        def decode(start: int, count: int) -> int:
            self._token[:count], self._id_address[:count], self._wants_logits[:count] = (
                0,
                self._first_id,
                1,
            )
            self._position[:count] = range(start, start + count)
            self._batch.n_tokens = count
            code = lib.llama_decode(self._context, self._batch)
            if code != 0:
                raise StartupError(
                    f"the model cannot decode: llama_decode returned {code}: "
                    f"{last_error('no reason')}"
                )
            return int(lib.llama_state_seq_get_size(self._context, 0))

        count = min(4, len(self._token))
        first = decode(0, 1)
        per_token = (decode(1, count) - first) // count
        can_trim = bool(lib.llama_memory_seq_rm(self._memory, 0, 1, -1))
        lib.llama_memory_clear(self._memory, False)
        return Probed(can_trim, first - per_token, per_token)

    def _load_model(self, options: Options, progress: Callable[[float], None] | None) -> Any:
        c_params = lib.llama_model_default_params()
        c_params.n_gpu_layers = options.n_gpu_layers
        c_params.load_mode = {
            (True, False): lib.LLAMA_LOAD_MODE_MMAP,
            (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
            (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
            (False, False): lib.LLAMA_LOAD_MODE_NONE,
        }[options.use_mmap, options.use_mlock]

        failed: list[BaseException] = []

        def report(share: float, _: ctypes.c_void_p) -> bool:
            try:
                if progress and not failed:
                    progress(share)
            except BaseException as error:  # noqa: BLE001  # raised when the load has ended; ctypes would swallow it
                failed.append(error)
            return not failed

        # a local name keeps it alive during the load
        callback = lib.llama_progress_callback(report)
        c_params.progress_callback = callback

        def listen(line: bytes) -> None:
            if line.startswith(WEIGHTS_FOLLOW):
                report(0.0, ctypes.c_void_p())

        with log_lines(listen):
            model = lib.llama_model_load_from_file(str(self._path).encode(), c_params)
        if failed:
            if model:
                lib.llama_model_free(model)
            raise failed[0]
        return check_pointer(model, f"cannot load {self._path}")

    def _make_context(self, layout: str) -> Any:
        params, options, sizes = self._params, self._options, self._sizes
        threads = options.n_threads or os.cpu_count() or 1
        c_params = lib.llama_context_default_params()
        c_params.n_ctx = sizes.num_cells
        c_params.n_batch = params.max_num_batched_tokens
        c_params.n_ubatch = min(options.n_ubatch, params.max_num_batched_tokens)
        c_params.n_seq_max = sizes.max_num_seqs
        c_params.n_outputs_max = max_samples(params, sizes)
        c_params.n_threads = threads
        c_params.n_threads_batch = options.n_threads_batch or threads
        c_params.type_k = c_params.type_v = KV_TYPES[params.kv_type]
        if params.kv_type != "f16":  # llama.cpp reads quantized values only so
            c_params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        c_params.kv_unified = layout == "unified"
        c_params.no_perf = True
        context = lib.llama_init_from_model(self._model, c_params)
        what = (
            f"cannot create a context of {c_params.n_ctx} tokens with {params.kv_type} cells for "
            f"{self._path}"
        )
        return check_pointer(context, what)

    def _check_architecture(self) -> None:
        if lib.llama_model_has_encoder(self._model) or not lib.llama_model_has_decoder(self._model):
            raise StartupError(
                f"{self._path} is an encoder model ({self._describe()}), which does not generate "
                "text"
            )

    def _metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(256)
        length = lib.llama_model_meta_val_str(self._model, key.encode(), buffer, 256)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _describe(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._model, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    def _make_batch(self, size: int, max_num_seqs: int) -> None:
        arrays = self._arrays = BatchArrays(size, max_num_seqs)
        self._token, self._position, self._wants_logits = (
            arrays.token,
            arrays.position,
            arrays.wants_logits,
        )
        self._ids, self._first_id, self._id_address = arrays.ids, arrays.first_id, arrays.id_address
        self._batch = arrays.batch

    def forward(self, batch: Batch) -> Logits:
        """Raises EngineError if llama_decode fails."""
        if not self.info.generates:
            raise EngineError("this model does not generate")
        copied: tuple[int, Bytes] = (-1, NOTHING)
        for operation in batch.operations:
            copied = self._operate(operation, copied)
        if not batch.rows:
            return np.zeros((0, self.info.vocabulary_size), np.float32)
        self._fill(batch)
        num_tokens = self._batch.n_tokens
        padded = self._pad(batch) if self._pads else None
        code = lib.llama_decode(self._context, self._batch)
        if code == NO_CELLS and padded is not None:
            self._batch.n_tokens, padded = num_tokens, None
            code = lib.llama_decode(self._context, self._batch)
        if padded is not None:
            self._trim(padded.seq.seq_id, padded.start + padded.size)
        if code != 0:
            raise EngineError(f"llama_decode returned {code}: {last_error('no reason given')}")
        return self._read_logits()[: batch.num_samples]

    def _read_logits(self) -> Logits:
        """Return a view of llama.cpp's whole logits buffer.

        It is kept until the buffer moves: making one is slow.
        """
        pointer = lib.llama_get_logits(self._context)
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            self._logits_address = address
            self._logits = np.ctypeslib.as_array(
                pointer, (self.info.max_num_samples, self.info.vocabulary_size)
            )
        return self._logits

    def _fill(self, batch: Batch) -> None:
        """Write the rows into the arrays of the llama_batch.

        Raises EngineError for what would abort the process.
        """
        at = num_samples = 0
        for row in batch.rows:
            seq_id, count = row.seq.seq_id, row.size
            self._check_seq_id(seq_id, len(self._ids))
            end = at + count
            if end > len(self._token):
                raise EngineError(f"a batch of more than {len(self._token)} tokens")
            if count == 1:
                self._token[at] = row.seq.tokens[row.start]
                self._position[at] = row.start
                self._id_address[at] = self._first_id + 4 * seq_id
            else:
                self._token[at:end] = row.tokens
                self._position[at:end] = range(row.start, row.start + count)
                self._id_address[at:end] = self._first_id + 4 * seq_id
                self._wants_logits[at:end] = 0
            self._wants_logits[end - max(1, row.num_samples) : end] = row.num_samples > 0
            num_samples += row.num_samples
            at = end
        if at == 0:
            raise EngineError("an empty batch")
        if num_samples > self.info.max_num_samples:
            raise EngineError(f"a batch of more than {self.info.max_num_samples} samples")
        self._batch.n_tokens = at

    def _pad(self, batch: Batch) -> Row | None:
        """Fill a nearly full tile with padding tokens after one row and return that row; None if it
        does not pay off.

        The padding comes after all needed tokens, so it changes no result. The caller must trim it.
        """
        row = max(batch.rows, key=lambda row: row.size)
        count = self._batch.n_tokens
        # the first token of each row is computed first, then the rest of each
        if self.info.layout == "partitioned":
            if sum(row.size > 1 for row in batch.rows) > 1:
                return None
            count = row.size - (len(batch.rows) > 1)
        at, end = self._batch.n_tokens, row.start + row.size
        missing = TILE - count
        if not (PADDED <= count < TILE and row.start >= PADDED_CONTEXT):
            return None
        if at + missing > len(self._token) or end + missing > self.info.context_length:
            return None
        self._token[at : at + missing] = 0
        self._position[at : at + missing] = range(end, end + missing)
        self._id_address[at : at + missing] = self._first_id + 4 * row.seq.seq_id
        self._wants_logits[at : at + missing] = 0
        self._batch.n_tokens = at + missing
        return row

    def _operate(self, operation: Operation, copied: tuple[int, Bytes]) -> tuple[int, Bytes]:
        """Carry out one operation.

        If it copies a saved state, return the source's seq_id and state, which the next call gets
        as ``copied``.
        """
        match operation:
            case Trim(seq_id, keep):
                self._trim(seq_id, keep)
            case Copy(source, target, count) if self.info.layout == "unified":
                self._check_seq_id(source, self._num_ids)
                self._trim(target, 0)
                lib.llama_memory_seq_cp(self._memory, source, target, 0, count)
            case Copy(source, target, count):
                # seq_cp would copy whole streams in the next decode, which costs more
                self._check_seq_id(source, self._num_ids)
                state = copied[1] if copied[0] == source else self._state(source)
                self._restore(target, state, count)
                return source, state
            case Save(seq_id, key):
                self._snapshots[key] = self._state(seq_id)
            case Load(key, seq_id, count):
                if key not in self._snapshots:
                    raise EngineError(f"there is no snapshot {key}")
                self._restore(seq_id, self._snapshots[key], count)
            case Drop(key):
                self._snapshots.pop(key, None)
        return -1, NOTHING

    def _trim(self, seq_id: int, keep: int) -> None:
        self._check_seq_id(seq_id, self._num_ids)
        if not lib.llama_memory_seq_rm(self._memory, seq_id, keep, -1):
            raise EngineError(f"sequence id {seq_id} cannot be trimmed to {keep} tokens")

    def _state(self, seq_id: int) -> Bytes:
        """Return the state of ``seq_id``."""
        self._check_seq_id(seq_id, self._num_ids)
        # libllama saves no owners for these ids, so 0 owns the cells meanwhile
        if seq_id >= len(self._ids):
            self._move(0, SCRATCH_ID)
            lib.llama_memory_seq_cp(self._memory, seq_id, 0, -1, -1)
            try:
                return self._state(0)
            finally:
                self._trim(0, 0)
                self._move(SCRATCH_ID, 0)
        return self._states.save(seq_id)

    def _move(self, source: int, target: int) -> None:
        lib.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        lib.llama_memory_seq_rm(self._memory, source, -1, -1)

    def _restore(self, seq_id: int, state: Bytes, count: int) -> None:
        self._check_seq_id(seq_id, self._num_ids)
        try:
            self._states.load(seq_id, state)
        except EngineError:
            self._trim(seq_id, 0)
            raise
        if self.info.can_trim:
            self._trim(seq_id, count)

    def embed(self, chunks: list[Chunk]) -> Vectors:
        return self._embedder.embed(chunks)

    def snapshot(self, key: int) -> memoryview:
        return self._states.saved_part(self._snapshots[key])

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        state = self._states.new_state_buffer(num_bytes)
        return StateBuffer(self._states.saved_part(state), state)

    def install_snapshot(self, key: int, filled: StateBuffer) -> None:
        self._snapshots[key] = filled.state

    def _check_seq_id(self, seq_id: int, limit: int) -> None:
        if not 0 <= seq_id < limit:
            raise EngineError(f"sequence id {seq_id} is not below {limit}")

    def close(self) -> None:
        self._embedder.close()
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)
