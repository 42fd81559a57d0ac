"""An encoder in PyTorch, which embeds or ranks; implements the contract of backends/base.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from cllm.backends.base import Logits, StateBuffer, Vectors
from cllm.backends.params import BackendParams
from cllm.backends.torch.backend import check_finite, choose_device, choose_dtype, read_options
from cllm.backends.torch.embedder import MAX_BATCH_TOKENS, check_tokens, pool
from cllm.backends.torch.encoder import Encoder
from cllm.backends.torch.encoder_config import read_encoder_config
from cllm.backends.torch.threads import Threads
from cllm.backends.torch.vocabulary import read_vocabulary
from cllm.backends.torch.weights import Weights
from cllm.core.batch import MAX_CHUNKS, Batch, Chunk
from cllm.core.model_info import ModelInfo
from cllm.errors import EngineError, StartupError
from cllm.models.checkpoint import CONFIG, read_checkpoint


class EncoderBackend:
    """Implements the contract of backends/base.py."""

    drafter = None

    def __init__(
        self, params: BackendParams, progress: Callable[[float], None] | None = None
    ) -> None:
        """Load the checkpoint ``params.path``; ``progress`` receives the loaded share, 0 to 1.

        Raises StartupError if it cannot be loaded.
        """
        options = read_options(params)
        checkpoint = read_checkpoint(Path(params.path))
        device = choose_device(options)
        self._threads = Threads(options.n_threads, device)
        self.share_cores = self._threads.share
        dtype = choose_dtype(options, device, checkpoint)
        config = read_encoder_config(checkpoint.text_config, str(checkpoint.folder / CONFIG))
        self.vocabulary = read_vocabulary(checkpoint, config.vocabulary_size)
        self._between = self.vocabulary.pair_tokens[1]
        with torch.inference_mode():
            self._encoder = Encoder(Weights(checkpoint, dtype, device, progress), config)
        longest = min(
            config.max_tokens,
            checkpoint.max_embedding_tokens or config.max_tokens,
            params.context_length or config.max_tokens,
        )
        for name in params.adapters:
            self.load_adapter(name, "")
        self.info = ModelInfo(
            name=checkpoint.name,
            architecture=config.model_type,
            description=f"{config.model_type} {checkpoint.num_parameters / 1e9:.2g}B "
            f"{str(dtype).removeprefix('torch.')} on {device}",
            vocabulary_size=config.vocabulary_size,
            context_length=longest,
            trained_context_length=config.max_tokens,
            max_num_seqs=params.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            max_num_samples=1,
            num_cells=longest,
            layout="unified",
            end_tokens=self.vocabulary.end_tokens,
            model_bytes=checkpoint.num_parameters * dtype.itemsize,
            fingerprint=f"{checkpoint.fingerprint} torch {dtype}",
            system=f"PyTorch {torch.__version__}",
            on_gpu=device.type != "cpu",
            generates=False,
            embedding_size=1 if config.ranks else config.hidden_size,
            pooling="rank" if config.ranks else checkpoint.pooling or "mean",
            max_embedding_tokens=longest,
            max_embedding_batch_tokens=MAX_BATCH_TOKENS,
            embeds_whole=True,
        )
        begun = time.perf_counter()
        vectors = self.embed([Chunk([0], 0, 1)])
        seconds = time.perf_counter() - begun
        check_finite(torch.from_numpy(vectors), dtype)
        self.info = msgspec.structs.replace(self.info, row_seconds=seconds)
        if progress:
            progress(1.0)

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Raises EngineError for chunks that break the contract, and if PyTorch fails."""
        self._check(chunks)
        texts = [chunk.tokens for chunk in chunks]
        sizes, ranks = [len(text) for text in texts], self.info.pooling == "rank"
        with torch.inference_mode():
            try:
                types = [self._find_types(text) for text in texts]
                hidden = self._threads.run(self._encoder.compute, texts, types)
                if not ranks:
                    return pool(hidden, sizes, self.info.pooling)
                first = torch.stack([text[0] for text in hidden.split(sizes)])
                return pool(self._encoder.score(first), [1] * len(sizes), "cls")
            except RuntimeError as error:  # out of memory, too
                raise EngineError(f"PyTorch failed: {str(error)[:500]}") from error

    def _find_types(self, text: list[int]) -> list[int]:
        """Return the types of tokens: 1 for those of the document in a pair of query and document,
        and of what follows it.
        """
        num_first, size = len(text), len(self._between)
        if self.info.pooling == "rank" and self._encoder.config.num_types > 1 and size:
            places = range(len(text) - size)
            ends = (at + size for at in places if text[at : at + size] == self._between)
            num_first = next(ends, num_first)
        return [0] * num_first + [1] * (len(text) - num_first)

    def _check(self, chunks: list[Chunk]) -> None:
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        is_alone = len(chunks) == 1
        if not 0 < len(chunks) <= MAX_CHUNKS or (num_tokens > MAX_BATCH_TOKENS and not is_alone):
            raise EngineError(f"a batch of {num_tokens} tokens in {len(chunks)} chunks")
        for tokens, start, length in chunks:
            check_tokens(tokens, self.info.vocabulary_size)
            if start or len(tokens) != length or length > self.info.max_embedding_tokens:
                raise EngineError(f"a chunk from {start} to {start + len(tokens)} of {length}")

    # --- what encoders do not do -----------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> None:
        raise StartupError(f"the adapter {name}: a model that only embeds can have no adapters")

    def forward(self, batch: Batch) -> Logits:
        raise EngineError("this model does not generate")

    def snapshot(self, key: int) -> NoReturn:
        raise KeyError(key)

    def new_state_buffer(self, num_bytes: int) -> StateBuffer:
        raise EngineError("this model has no states")

    def install_snapshot(self, key: int, filled: StateBuffer, num_tokens: int) -> None:
        raise EngineError("this model has no states")

    def close(self) -> None:
        del self._encoder
