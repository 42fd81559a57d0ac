"""A model and its context in llama.cpp.

One wrong call into libllama kills the process, so ``forward`` checks the contract's guarantees
before it calls. The batch arrays live as long as the backend and are written through numpy views;
logits are read through another view.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from cllm.backends.base import Logits, StateBuffer, Vectors
from cllm.backends.llama_cpp.adapters import LoadedAdapters
from cllm.backends.llama_cpp.arrays import BatchArrays
from cllm.backends.llama_cpp.cells import Cells, PagedCells
from cllm.backends.llama_cpp.draft_head import DraftHead, has_head
from cllm.backends.llama_cpp.embedder import Embedder, read_embedding_facts
from cllm.backends.llama_cpp.fit import (
    MIN_SEQS,
    PAD,
    USUAL_CONTEXT,
    KVSizes,
    fit,
    fit_recurrent,
    max_samples,
    pad_context,
)
from cllm.backends.llama_cpp.ggml_memory import KVAddresses, NewPages, intercept, is_supported
from cllm.backends.llama_cpp.library import (
    TESTED_VERSION,
    attention_kernel,
    check_pointer,
    last_error,
    read_metadata,
    supports_gpu_offload,
    system_info,
    use_own_kernels,
)
from cllm.backends.llama_cpp.paged_memory import NotPaged, PagedMemory
from cllm.backends.llama_cpp.passes import Pass, plan_passes, plan_with_drafts
from cllm.backends.llama_cpp.placement import (
    FLASH_ATTENTION,
    describe_positions,
    scale_positions,
    scaled_length,
)
from cllm.backends.llama_cpp.state_format import CELL
from cllm.backends.llama_cpp.threads import Threads
from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary
from cllm.backends.llama_cpp.weights import describe, load_weights
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Chunk
from cllm.core.model_info import ModelInfo
from cllm.errors import EngineError, StartupError
from cllm.models.file_start import compute_fingerprint

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

log = logging.getLogger("cllm.llama_cpp")

# A step is timed several times, because other processes may disturb a measurement.
PROBES, PROBE_SECONDS = 3, 0.1
MULTI_ROPE = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
KV_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}


def read_options(params: BackendParams) -> Options:
    """Return the options as attributes.

    They were checked when the settings were read. Checking them again would import pydantic, and
    the engine process would start 0.1 s later.
    """
    if params.options:
        return cast("Options", SimpleNamespace(**params.options))
    from cllm.backends.llama_cpp.options import Options

    return Options()


def uses_gpu(params: BackendParams) -> bool:
    """Return whether the weights will be on a GPU, or on RPC workers."""
    options = read_options(params)
    return options.n_gpu_layers != 0 and (bool(options.rpc) or supports_gpu_offload())


class Probed(NamedTuple):
    """What a model's memory supports.

    A saved state of n tokens takes state_bytes + n * state_bytes_per_token. ``row_seconds`` is
    explained at ModelInfo.
    """

    max_taken_back: int | None
    checkpoint_bytes: int
    state_bytes: int
    state_bytes_per_token: int
    row_seconds: float


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
        self._path, self._kv_type = Path(params.path), params.kv_type
        self._threads = Threads(read_options(params), on_gpu=uses_gpu(params))
        self._has_head = params.draft_head and has_head(self._path)
        self._model = load_weights(
            self._path, read_options(params), self._kv_type, progress, head=self._has_head
        )
        self.vocabulary = LlamaVocabulary(self._model)
        self.vocabulary.check()
        # llama.cpp checks for other models that a sequence's positions follow each other
        self._allows_gaps = lib.llama_model_rope_type(self._model) in MULTI_ROPE
        self._is_recurrent = bool(
            lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model)
        )
        self._adapters = LoadedAdapters(self._model, params.adapters)
        self.load_adapter = self._adapters.load
        self._context: Any = None
        self._addresses: KVAddresses | None = None
        self._new_pages = NewPages()
        self._pages: PagedMemory | None = None
        self.drafter: DraftHead | None = None
        self._open(params)

    def reopen(self, params: BackendParams) -> None:
        """Replace the context with one for ``params``. The weights stay loaded; snapshots are lost.

        Raises StartupError if that fails; there is no context then.
        """
        self._embedder.close()
        self._close_context()
        self._threads = Threads(read_options(params), on_gpu=uses_gpu(params))
        self._open(params)

    def _open(self, params: BackendParams) -> None:
        options, on_gpu = read_options(params), uses_gpu(params)
        vocab = lib.llama_model_get_vocab(self._model)
        vocabulary_size = int(lib.llama_vocab_n_tokens(vocab))
        trained = int(lib.llama_model_n_ctx_train(self._model))
        self.share_cores = self._threads.share
        self._scale = partial(scale_positions, options, trained)
        trained = scaled_length(options, trained)
        # In the unified layout, llama.cpp silently gives a sequence's cells before its window to
        # other sequences.
        self._is_windowed = lib.llama_model_n_swa(self._model) > 0
        self._plain = not (self._is_recurrent or self._is_windowed)
        pages = not on_gpu and is_supported()
        self._params, self._options = params, options
        # the bytes of a token in each of llama.cpp's caches: layers with a window have their own
        self._cache_bytes = [params.kv_bytes_per_token]
        use_own_kernels(on=options.kernels == "auto")
        sizes, probed = self._open_fitting(trained, pages=pages, on_gpu=on_gpu)
        generates = bool(self._memory)
        vectors = read_embedding_facts(self._model, self._context, vocabulary_size)
        if not generates:  # an encoder keeps no state between texts
            self._close_context()
        room = max(USUAL_CONTEXT, sizes.num_cells // MIN_SEQS)  # it has its own cells
        longest = min(sizes.context_length, trained, vectors.max_tokens, room)
        self._embedder = Embedder(self._model, vectors, longest, self._threads, self._scale)
        self.info = ModelInfo(
            name=read_metadata(self._model, "general.name") or self._path.stem,
            architecture=read_metadata(self._model, "general.architecture") or "unknown",
            description=describe(self._model),
            vocabulary_size=vocabulary_size,
            context_length=sizes.context_length,
            trained_context_length=trained,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            max_num_samples=max_samples(params, sizes),
            num_cells=sizes.num_cells,
            layout=sizes.layout,
            end_tokens=self.vocabulary.end_tokens,
            model_bytes=int(lib.llama_model_size(self._model)),
            kv_bytes_per_token=self._params.kv_bytes_per_token,
            system=system_info(),
            on_gpu=on_gpu,
            row_seconds=probed.row_seconds,
            drafts=self.drafter is not None,
            attention=self._name_attention(on_gpu=on_gpu),
            max_taken_back=probed.max_taken_back,
            checkpoint_bytes=probed.checkpoint_bytes,
            num_spare_ids=self._cells.num_ids - sizes.max_num_seqs if generates else 0,
            generates=generates,
            embedding_size=vectors.size,
            pooling=vectors.pooling,
            max_embedding_tokens=longest,
            max_embedding_batch_tokens=vectors.max_batch_tokens,
            embeds_whole=vectors.whole,
            state_bytes=probed.state_bytes,
            state_bytes_per_token=probed.state_bytes_per_token,
            checks_states=generates and self._cells.form is not None,
            fingerprint=f"{compute_fingerprint(self._path)} {TESTED_VERSION} {params.kv_type} "
            f"{sizes[:4] if self._is_recurrent else ''}{describe_positions(options)}",
        )

    def _open_fitting(self, trained: int, *, pages: bool, on_gpu: bool) -> tuple[KVSizes, Probed]:
        """Open a context of the size that fits, without paged memory if that is not possible.

        Raises StartupError if that fails, or if paged memory was asked for.
        """
        if self._is_recurrent:
            state_bytes = self._measure_kv().state_bytes
            sizes = fit_recurrent(self._params, trained, state_bytes, pages=pages)
        else:
            is_split = self._is_windowed and pages and self._params.layout != "partitioned"
            if is_split or not self._params.kv_bytes_per_token:
                self._measure_kv()
            num_caches = len(self._cache_bytes)
            sizes = fit(
                self._params, trained, plain=self._plain, pages=pages, num_caches=num_caches
            )
        # on a GPU, a call with all rows is the fastest
        has_streams = sizes.layout == "paged" or (sizes.layout == "partitioned" and not on_gpu)
        self._in_passes = has_streams or sizes.num_past_states > 0
        try:
            probed = self._open_context(sizes)
        except NotPaged as reason:
            self._close_context()
            expected = self._cache_bytes
            self._measure_kv()
            if self._cache_bytes == expected:
                if self._params.layout == "paged":
                    raise StartupError(f"kv.layout cannot be paged: {reason}") from None
                log.warning("the KV cache has no paged memory: %s", reason)
                pages = False
            return self._open_fitting(trained, pages=pages, on_gpu=on_gpu)
        if self._has_head:
            self._open_heads(sizes, probed)
        return sizes, probed

    def _open_heads(self, sizes: KVSizes, probed: Probed) -> None:
        """Make the model draft with its own head, or warn that it cannot."""
        try:
            if probed.max_taken_back == 0:
                raise StartupError("kv.max_memory_mb leaves no memory for past recurrent states")
            c_params = self._make_params(sizes)
            self.drafter = DraftHead(self._model, self._context, c_params, self._threads)
        except StartupError as error:
            log.warning("the model does not draft with its own head: %s", error)

    def _measure_kv(self) -> Probed:
        """Measure the memory of a token's keys and values, and what else only a context tells."""
        past = self._params.max_taken_back if self._is_recurrent else 0
        probed = self._open_context(KVSizes(PAD, 1, PAD, "partitioned", past))
        self._cache_bytes = self._cells.cache_bytes if self._memory else []
        if not self._cache_bytes:
            self._cache_bytes = [max(0, probed.state_bytes_per_token - CELL)]
        self._close_context()
        self._params = msgspec.structs.replace(
            self._params,
            kv_bytes_per_token=sum(self._cache_bytes),
            max_taken_back=probed.max_taken_back or 0,
        )
        return probed

    def _open_context(self, sizes: KVSizes) -> Probed:
        """Open a context of these sizes, and probe it.

        Raises NotPaged if ``sizes`` asks for paged memory that the KV cache cannot have, and
        StartupError for other failures.
        """
        params = self._params
        self._arrays = BatchArrays(params.max_num_batched_tokens, sizes.max_num_seqs)
        if sizes.layout == "paged":
            num_tokens = pad_context(sizes.context_length) * sizes.max_num_seqs
            num_bytes = [num_tokens * each for each in self._cache_bytes]
            self._addresses = KVAddresses(sizes.max_num_seqs, num_bytes, params.kv_memory)
        self._new_pages.recurrent = []
        with intercept(self._addresses or self._new_pages):
            try:
                self._context = self._make_context(sizes)
            except StartupError as error:
                if self._addresses is None:
                    raise
                raise NotPaged(str(error)) from None
        self._memory = lib.llama_get_memory(self._context)
        self._logits_address = 0
        if not self._memory:
            return Probed(None, 0, 0, 0, 0.0)
        self._cells: Cells
        if self._addresses:
            self._pages = PagedMemory(self._addresses.find_rows(), sizes.max_num_seqs)
            self._cells = PagedCells(self._context, sizes, self._pages)
        else:
            states, portable = self._new_pages.recurrent, not self._is_recurrent
            self._cells = Cells(self._context, sizes, portable=portable, states=states)
        return self._probe()

    def _close_context(self) -> None:
        if self.drafter is not None:
            self.drafter.close()
            self.drafter = None
        lib.llama_free(self._context)
        self._threads.forget("model")
        self._context = None  # so it is not freed again
        self._adapters.reset()
        for each in (self._pages, self._addresses):
            if each:
                each.close()
        self._pages = self._addresses = None

    def _probe(self) -> Probed:
        """Find out by trying what this model's memory supports and how big its states are.

        This also warms up.
        """

        def decode(start: int, count: int) -> int:
            self._arrays.fill_plain(start, count)
            code = self._threads.decode(self._context, self._arrays.batch)
            if code != 0:
                raise StartupError(
                    f"the model cannot decode: llama_decode returned {code}: "
                    f"{last_error('no reason')}"
                )
            return int(lib.llama_state_seq_get_size(self._context, 0))

        count = min(4, self._arrays.size)
        first = decode(0, 1)
        self._cells.check_states(windowed=self._is_windowed)
        per_token = (decode(1, count) - first) // count
        times: list[float] = []
        while len(times) < PROBES and sum(times) < PROBE_SECONDS:
            begun = time.perf_counter()
            decode(1 + count + len(times), 1)
            lib.llama_synchronize(self._context)
            times.append(time.perf_counter() - begun)
        row_seconds = min(times)
        has_checkpoints = lib.llama_model_is_hybrid(self._model) and not self._is_windowed
        checkpoint_bytes = self._cells.measure_checkpoint() if has_checkpoints else 0
        max_taken_back: int | None = 0
        if self._is_recurrent:
            max_taken_back = int(lib.llama_n_rs_seq(self._context))
        elif lib.llama_memory_seq_rm(self._memory, 0, 1, -1):
            max_taken_back = None
        self._cells.clear()
        self._cells.max_taken_back = max_taken_back
        return Probed(max_taken_back, checkpoint_bytes, first - per_token, per_token, row_seconds)

    def _make_params(self, sizes: KVSizes) -> Any:
        """Return llama.cpp's parameters of a context."""
        params, options = self._params, self._options
        c_params = lib.llama_context_default_params()
        c_params.n_ctx = sizes.num_cells + sizes.num_past_states * sizes.max_num_seqs  # for padding
        if sizes.layout == "paged":
            c_params.n_ctx = pad_context(sizes.context_length) * sizes.max_num_seqs
        c_params.n_batch = params.max_num_batched_tokens
        c_params.n_ubatch = min(options.n_ubatch, params.max_num_batched_tokens)
        if sizes.num_past_states:  # rows with draft tokens must be in one physical batch
            c_params.n_ubatch = max(c_params.n_ubatch, max_samples(params, sizes))
        # llama.cpp aborts if a physical batch cannot hold one more token than that
        c_params.n_rs_seq = max(0, min(sizes.num_past_states, c_params.n_ubatch - 2))
        c_params.n_seq_max = sizes.max_num_seqs
        c_params.n_outputs_max = max_samples(params, sizes)
        self._threads.set(c_params)
        c_params.type_k = c_params.type_v = KV_TYPES[params.kv_type]
        c_params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
        self._scale(c_params)
        if params.kv_type != "f16":  # llama.cpp reads quantized values only with flash attention
            c_params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        c_params.kv_unified = sizes.layout == "unified"
        c_params.no_perf = True
        return c_params

    def _make_context(self, sizes: KVSizes) -> Any:
        c_params = self._make_params(sizes)
        context = lib.llama_init_from_model(self._model, c_params)
        what = (
            f"cannot create a context of {c_params.n_ctx} tokens with {self._kv_type} cells for "
            f"{self._path}"
        )
        return self._threads.keep("model", check_pointer(context, what))

    def _name_attention(self, *, on_gpu: bool) -> str:
        """Return ModelInfo.attention: "" where llama.cpp computes attention itself."""
        is_flash = self._kv_type != "f16" or self._options.flash_attention != "off"
        return attention_kernel() if is_flash and self._kv_type != "q4_0" and not on_gpu else ""

    def forward(self, batch: Batch) -> Logits:
        """Raises EngineError if llama_decode fails."""
        if not self.info.generates:
            raise EngineError("this model does not generate")
        self._cells.operate(batch.operations)
        if not batch.rows:
            return []
        self._check(batch)
        self._adapters.use(self._context, batch.adapters)
        if not self._in_passes:
            return self._decode(Pass(batch.rows))
        num_tokens, context_length = self._arrays.size, self.info.context_length
        if past := self.info.max_taken_back:
            passes = plan_with_drafts(
                *(batch.rows, num_tokens, context_length, past),
                has_streams=self.info.layout != "unified",
            )
        else:
            pads = not self._is_recurrent
            passes = plan_passes(batch.rows, num_tokens, context_length, pads=pads)
            # The next pass overwrites the logits. Those of the last one need not be copied.
            passes.sort(key=lambda each: sum(row.num_samples for row in each.rows))
        if len(passes) == 1:
            return self._decode(passes[0])
        logits: dict[int, list[Any]] = {}
        for each in passes:
            decoded = iter(self._decode(each))
            for row in each.rows:
                rows = [next(decoded) for _ in range(row.num_samples)]
                logits[row.seq.seq_id] = rows if each is passes[-1] else [r.copy() for r in rows]
        return [each for row in batch.rows for each in logits[row.seq.seq_id]]

    def _decode(self, rows: Pass) -> Logits:
        self._arrays.fill(rows)
        self._cells.past_states.prepare(rows.rows)
        code = self._threads.decode(self._context, self._arrays.batch)
        if rows.size:
            for row in rows.rows:
                if row.size < rows.size:
                    self._cells.free_padding(row)
        if code != 0:
            raise EngineError(f"llama_decode returned {code}: {last_error('no reason given')}")
        if self.drafter is not None:
            self.drafter.record(rows)
        return list(self._read_logits()[: sum(row.num_samples for row in rows.rows)])

    def _read_logits(self) -> npt.NDArray[np.float32]:
        """Return a view of llama.cpp's whole logits buffer. The view is reused until that moves."""
        pointer = lib.llama_get_logits(self._context)
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address:
            self._logits_address = address
            self._logits = np.ctypeslib.as_array(
                pointer, (self.info.max_num_samples, self.info.vocabulary_size)
            )
        return self._logits

    def _check(self, batch: Batch) -> None:
        """Raise EngineError for batches that would abort the process."""
        for row in batch.rows:
            self._cells.check_row(row.seq.seq_id)
            if self._allows_gaps:
                self._cells.check_start(row.seq.seq_id, row.start)
            if self.info.max_taken_back and row.start + row.size > self.info.context_length:
                raise EngineError(f"sequence id {row.seq.seq_id} outgrows its cells")
        if not 0 < batch.num_tokens <= self._arrays.size:
            raise EngineError(f"a batch of {batch.num_tokens} tokens, not 1 to {self._arrays.size}")
        if batch.num_samples > self.info.max_num_samples:
            raise EngineError(f"a batch of more than {self.info.max_num_samples} samples")

    def embed(self, chunks: list[Chunk]) -> Vectors:
        return self._embedder.embed(chunks)

    def snapshot(self, key: int) -> memoryview:
        return self._cells.snapshot(key)

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        return self._cells.new_state_buffer(num_bytes)

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        self._cells.install_snapshot(key, filled, num_tokens)

    def close(self) -> None:
        self._embedder.close()
        self._close_context()
        lib.llama_model_free(self._model)
        self._model = None  # so it is not freed again
