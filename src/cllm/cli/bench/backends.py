"""``cllm bench compare-backends``: one model on several backends."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from cllm.backends.registry import BACKENDS
from cllm.cli.bench.files import print_json
from cllm.cli.options import AnswerTokens, Json, Positive
from cllm.cli.progress import open_bar
from cllm.models import catalog

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(name for name in BACKENDS if name != "fake")]

Model = Annotated[
    str | None,
    Parameter(help="A GGUF file, a checkpoint's folder or a name. [default: the built-in model]"),
]
Other = Annotated[
    str | None, Parameter(help="The same weights in another form: a GGUF file of a checkpoint.")
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    backend: Annotated[
        tuple[BackendName, ...],
        Parameter(help="The backends; the others are compared with the first."),
    ] = ("torch", "llama_cpp")
    sequences: Annotated[
        tuple[int, ...],
        Parameter(
            validator=Positive, consume_multiple=True, help="Numbers of sequences, such as 1 8."
        ),
    ] = (1, 8)
    rounds: Annotated[int, Parameter(validator=Positive, help="Runs of each backend, in turn.")] = 5
    prompt_tokens: Annotated[
        int, Parameter(validator=Number(gte=2), help="Tokens of a prompt for the speeds.")
    ] = 128
    max_tokens: AnswerTokens = 32
    json: Json = False


def compare_backends(
    model: Model = None,
    other: Other = None,
    /,
    *,
    options: ComparisonOptions = ComparisonOptions(),
) -> None:
    """Compute one model on several backends, and compare their logits, texts, speed and memory.

    PyTorch takes the checkpoint if MODEL or OTHER is one, and else the GGUF file.
    """
    from cllm.bench.backend_comparison import Plan, choose_files, compare, print_results

    paths = [catalog.resolve(model)]
    if other is not None:
        paths.append(catalog.resolve(other))
    plan = Plan(
        choose_files(options.backend, paths),
        options.sequences,
        options.rounds,
        options.prompt_tokens,
        options.max_tokens,
    )
    with closing(open_bar("comparing backends")) as bar:
        results = compare(plan, bar.update)
    if options.json:
        print_json(results)
        return
    from rich.console import Console

    print_results(results, plan, Console())
