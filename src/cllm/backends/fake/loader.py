"""Loads the fake backend, which needs no file; see ``registry.Loader``."""
# ruff: noqa: ARG001  # the protocol has these arguments

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cllm.backends.base import Backend, Vocabulary
    from cllm.backends.params import BackendParams, ModelSize, SingleGpu
    from cllm.models.hub import Progress

COPIED_SHARE = 0.0


def resolve(
    name: str | None, quantization: str | None = None, progress: Progress | None = None
) -> None:
    pass


def measure(params: BackendParams, *, check_tokens: bool = False) -> ModelSize | None:
    return None


def measure_gpus(params: BackendParams) -> int | None:
    return None


def find_gpus(params: BackendParams) -> list[SingleGpu]:
    return []


def may_divide_cores(params: BackendParams) -> bool:
    return False


def load(
    params: BackendParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    from cllm.backends.fake.backend import Costs, FakeBackend

    if progress is not None:
        progress(1.0)  # there is nothing to read
    return FakeBackend(
        context_length=params.context_length or 1024,
        max_num_seqs=params.max_num_seqs,
        max_num_batched_tokens=params.max_num_batched_tokens,
        costs=Costs(step=0.005, row=0.0005, token=0.0001),
    )


def load_vocabulary(params: BackendParams) -> Vocabulary:
    from cllm.backends.fake.vocabulary import FakeVocabulary

    return FakeVocabulary()
