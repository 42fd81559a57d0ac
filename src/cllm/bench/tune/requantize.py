"""Tries other types for the weights: what they gain in speed on this machine, and what they cost in
quality.

A quantization of a model is named by the types of its body and its head, such as Q4_0+Q6_K. The
head is the matrix that computes the logits. It is used for every decoded token, and it is large if
the vocabulary is. Its best type differs from CPU to CPU. So heads are tried first, with the body
unchanged, and then bodies with the best head.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cllm.backends.llama_cpp.quantize import head_name, quantize
from cllm.bench.tune.measure import Bench, CandidateError
from cllm.bench.tune.quality import Quality
from cllm.bench.tune.search import (
    LEAST_GAIN,
    MIN_ROUNDS,
    SpeedFigure,
    Trial,
    measure_figures,
    race,
)
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.gguf import TENSOR_TYPES, GgufHeader, format_size, read_header

HEADS = ("Q4_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
BODIES = {"Q4_0": "Q4_0", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "Q8_0": "Q8_0"}
"""llama.cpp's file type -> the tensor type of most of its weights."""
SIZE_LIMIT = 1.1  # times the original's size; a larger copy would trade memory for speed
KL_LIMIT = 0.03  # nats; one above it is not recommended, but --write-as accepts it
SHARE_OF_ROOM = 1.2  # free space that is needed, as a multiple of the bytes to write

Progress = Callable[[str, float], None]
"""Called with the current activity and its completed share, 0 to 1."""


class Quantization(msgspec.Struct, frozen=True):
    """The types of a model's body and head. ``body`` is a file type, or the original's tensor type
    for an unchanged body.
    """

    body: str
    head: str

    def __str__(self) -> str:
        return f"{self.body}+{self.head}"


class Requantized(msgspec.Struct, frozen=True):
    """A quantization compared with the original. ``quality`` is None if it was not measured."""

    form: str
    num_bytes: int
    original: Trial
    outcome: Trial
    quality: Quality | None

    @property
    def recommended(self) -> bool:
        return (
            self.quality is not None
            and self.quality.kl <= KL_LIMIT
            and self.outcome.beats(LEAST_GAIN)
        )


def original_quantization(header: GgufHeader) -> Quantization:
    """Return the quantization of the model as it is. The body's type is the type of most of its
    bytes."""
    head = head_name(header)
    sizes = Counter[str]()
    for tensor in header.tensors:
        if tensor.name != head:
            sizes[tensor.type] += tensor.num_bytes
    return Quantization(
        sizes.most_common(1)[0][0],
        next(tensor.type for tensor in header.tensors if tensor.name == head),
    )


def read_quantization(text: str, header: GgufHeader) -> Quantization:
    """Return the quantization named "BODY+HEAD". Raises StartupError listing the known types."""
    body, _, head = text.partition("+")
    known, heads = {*BODIES, original_quantization(header).body}, possible_heads(header)
    if body not in known or head not in heads:
        raise StartupError(
            f"{text} is not a quantization: write BODY+HEAD, with BODY one of "
            f"{', '.join(sorted(known))} and HEAD one of {', '.join(heads)}"
        )
    return Quantization(body, head)


def heads_to_try(header: GgufHeader) -> list[Quantization]:
    original = original_quantization(header)
    return limit_sizes(
        [
            Quantization(original.body, head)
            for head in possible_heads(header)
            if head != original.head
        ],
        header,
    )


def possible_heads(header: GgufHeader) -> list[str]:
    """Return the types whose block size divides the head's rows. llama.cpp replaces unsuitable
    types in the body, but not in the head.
    """
    blocks = {name: elements for name, elements, _ in TENSOR_TYPES.values()}
    row = next(tensor.shape[0] for tensor in header.tensors if tensor.name == head_name(header))
    return [head for head in HEADS if row % blocks[head] == 0]


def bodies_to_try(header: GgufHeader, head: str) -> list[Quantization]:
    original = original_quantization(header)
    return limit_sizes(
        [Quantization(body, head) for body, kind in BODIES.items() if kind != original.body], header
    )


def limit_sizes(forms: list[Quantization], header: GgufHeader) -> list[Quantization]:
    """Return the quantizations whose estimated size is at most SIZE_LIMIT times the original's."""
    return [
        form for form in forms if estimated_bytes(form, header) <= SIZE_LIMIT * header.tensor_bytes
    ]


def estimated_bytes(form: Quantization, header: GgufHeader) -> int:
    """Return the size that the quantization would have if all matrices of its body had the same
    type."""
    blocks = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
    head, kept = head_name(header), original_quantization(header).body == form.body
    total = 0
    for tensor in header.tensors:
        name = form.head if tensor.name == head else BODIES.get(form.body, form.body)
        if len(tensor.shape) < 2 or (kept and tensor.name != head):
            total += tensor.num_bytes
        else:
            elements, _ = blocks[tensor.type]
            num_elements = tensor.num_bytes // blocks[tensor.type][1] * elements
            total += num_elements // blocks[name][0] * blocks[name][1]
    return total


def write_quantization(
    source: Path, target: Path, form: Quantization, progress: Callable[[float], None]
) -> None:
    """Write ``source`` in another quantization to ``target``, which may be incomplete after an
    error.

    Raises StartupError with llama.cpp's reason.
    """
    body = None if form.body == original_quantization(read_header(source)).body else form.body
    quantize(source, target, body, head=form.head, threads=None, progress=progress)


@contextmanager
def workplace(num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder for files of ``num_bytes`` in all.

    Raises StartupError if there is too little space.
    """
    with tempfile.TemporaryDirectory(prefix="cllm-tune-") as folder:
        free = shutil.disk_usage(folder).free
        if free < SHARE_OF_ROOM * num_bytes:
            raise StartupError(
                f"this needs {format_size(int(SHARE_OF_ROOM * num_bytes))} in "
                f"{Path(folder).parent}, which has "
                f"{format_size(free)} free; TMPDIR names another folder"
            )
        yield Path(folder)


def try_quantizations(
    bench: Bench,
    params: EngineParams,
    figures: list[SpeedFigure],
    tokens: list[int],
    forms: list[Quantization] | None,
    folder: Path,
    progress: Progress,
) -> list[Requantized]:
    """Measure ``forms``, or by default those worth trying, and return the results in the order of
    the measurements.

    ``tokens`` are the text on which quality is judged. Each form exists in ``folder`` only while it
    is measured. Raises StartupError if the original cannot be measured.
    """
    source, logits = Path(params.path), folder / "logits"
    header = read_header(source)
    try:
        bench.write_logits(params, tokens, logits)
    except CandidateError as error:
        raise StartupError(f"cannot measure the original's quality: {error}") from None

    def try_one(form: Quantization) -> Requantized:
        file = folder / "candidate.gguf"
        try:
            try:
                write_quantization(
                    source, file, form, lambda share: progress(f"writing {form}", share)
                )
            except StartupError as error:
                return Requantized(str(form), 0, Trial({}), Trial({}, failure=str(error)), None)
            candidate = msgspec.structs.replace(params, path=str(file))

            def measure(model: EngineParams) -> dict[str, float]:
                progress(f"measuring {form}", 1.0)
                return measure_figures(figures, lambda work: bench.measure(model, work))

            outcomes = race(
                {"the original": params, str(form): candidate},
                measure,
                lambda done: done < MIN_ROUNDS,
            )
            original, outcome = outcomes.values()
            quality = None
            if not outcome.failure:
                with suppress(CandidateError):
                    quality = bench.quality(candidate, tokens, logits)
            return Requantized(str(form), file.stat().st_size, original, outcome, quality)
        finally:
            file.unlink(missing_ok=True)

    if forms is not None:
        return [try_one(form) for form in forms]
    requantized = [try_one(form) for form in heads_to_try(header)]
    best = find_best(requantized)
    head = (
        original_quantization(header).head
        if best is None
        else read_quantization(best.form, header).head
    )
    return requantized + [try_one(form) for form in bodies_to_try(header, head)]


def find_best(requantized: list[Requantized]) -> Requantized | None:
    """Return the fastest recommended quantization, or None if there is none."""
    return max(
        (one for one in requantized if one.recommended),
        key=lambda one: one.outcome.gain,
        default=None,
    )
