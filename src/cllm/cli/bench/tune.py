"""``cllm tune``."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from cllm.backends.registry import AUTO
from cllm.bench.tune.load import WORKLOADS, ServerBench
from cllm.bench.tune.measure import Bench, CandidateError
from cllm.bench.tune.quality import TEXT, Quality
from cllm.bench.tune.report import TuningReport, format_yaml, in_words, print_report, settings_tree
from cllm.bench.tune.requantize import (
    SIZE_LIMIT,
    Quantization,
    Requantized,
    estimated_bytes,
    find_best,
    original_quantization,
    read_quantization,
    try_quantizations,
    workplace,
    write_quantization,
)
from cllm.bench.tune.search import (
    KV_KL_LIMIT,
    KV_TYPE,
    Choice,
    Traffic,
    apply_choice,
    final_figures,
    knobs,
    search,
    starting_choice,
    works,
)
from cllm.bench.tune.tiles import measure_tiles
from cllm.cli.bench.files import check_writable, print_json, write_file
from cllm.cli.doctor import describe_cpu
from cllm.cli.progress import Bar, open_bar
from cllm.cli.remarks import print_notes
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, ModelFlags, settings_from_flags
from cllm.config.sources import LoadedConfig
from cllm.engine.build import build_vocabulary, fit_memory
from cllm.engine.params import EngineParams
from cllm.engine.settings import make_engine_params
from cllm.errors import StartupError
from cllm.input_files import read_input_text
from cllm.models import catalog, hub
from cllm.models.gguf import GgufHeader, format_size, read_header
from cllm.models.sequence_memory import check_kv_type

if TYPE_CHECKING:
    from cllm.bench.tune.load import Served
    from cllm.bench.tune.measure import Speeds, SpeedWork

    Workload = str
else:
    Workload = Literal[WORKLOADS]

MAX_TEXT_TOKENS = 1024  # their logits are in a file, some 600 KB each for a large vocabulary
ENGINE_SECTIONS = ("model", "kv", "backend", "scheduler")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    minutes: Annotated[
        float,
        Parameter(
            validator=Number(gt=0),
            help="Approximate duration of the measurements; longer ones are more precise.",
        ),
    ] = 4.0
    out: Annotated[Path | None, Parameter(help="The YAML file to write. [default: print it]")] = (
        None
    )
    workloads: Annotated[
        tuple[Workload, ...],
        Parameter(
            consume_multiple=True,
            help="Tune for these workloads of cllm bench load, each sent to a server with the "
            "candidate's settings. This needs many more minutes. [default: prompts and decoding "
            "without a server]",
            show_default=False,
        ),
    ] = ()
    scale: Annotated[
        float,
        Parameter(
            validator=Number(gt=0), help="With --workloads: factor for the lengths of prompts."
        ),
    ] = 0.1
    requantize: Annotated[
        bool,
        Parameter(
            help="Also try other quantizations of the output head and the body, and compare "
            "speed and quality. This writes about ten temporary copies of the model."
        ),
    ] = False
    text: Annotated[
        Path | None,
        Parameter(
            help="A UTF-8 text for measuring quality, preferably similar to your users' texts. Up "
            "to 1024 tokens of it are used. [default: a page of English]"
        ),
    ] = None
    write: Annotated[
        Path | None,
        Parameter(
            help="With --requantize: write the fastest copy with little loss of quality to this "
            "file."
        ),
    ] = None
    write_as: Annotated[
        str | None,
        Parameter(
            help="With --write: try only this quantization, as BODY+HEAD (such as Q4_0+Q6_K), "
            "and write it."
        ),
    ] = None
    json: Annotated[bool, Parameter(help="Print one JSON object instead of the YAML.")] = False


def tune(
    model: ModelArgument = None,
    /,
    *,
    options: TuneOptions = TuneOptions(),
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Find the settings that make a model fastest on this machine, and write them as YAML for cllm
    serve --config.

    Threads, the size of a pass, and layout and type of the KV cache are measured in turn, each
    candidate in a child process against the current value. A candidate is chosen only if it is
    faster by more than the noise. The report goes to stderr. Keep the machine idle meanwhile.
    """
    begun = time.monotonic()
    loaded = settings_from_flags(config, settings, model)
    print_notes(loaded)
    backend = loaded.settings.backend.name
    if backend not in (AUTO, "llama_cpp"):
        raise StartupError(f"backend.name is {backend}; only llama_cpp can be tuned")
    check_options(options)
    subject = find_subject(loaded, options)
    form = read_quantization(options.write_as, subject.header) if options.write_as else None
    tuning = measure(subject, form, options)
    show(tuning.report(time.monotonic() - begun), loaded, options)
    if options.write:
        write_copy(
            subject.path, options.write, form or chosen_quantization(tuning.forms, subject.header)
        )


class Subject(NamedTuple):
    """The model to tune, the settings as given, and the tokens of the text on which its quality is
    judged.
    """

    loaded: LoadedConfig
    path: Path
    header: GgufHeader
    params: EngineParams
    tokens: list[int]


def find_subject(loaded: LoadedConfig, options: TuneOptions) -> Subject:
    """Find the model and read the text. Raises StartupError if one of them cannot be used."""
    settings = loaded.settings
    text = TEXT if options.text is None else read_text(options.text)
    with hub.stderr_progress() as progress:
        path = catalog.resolve(settings.model.path, settings.model.quantization, progress)
    params, header = (
        fit_memory(make_engine_params(settings, path, check_tokens=True)),
        read_header(path),
    )
    tokens = build_vocabulary(params).tokenize(text, add_special=True, parse_special=False)
    if len(tokens) < 2:
        raise StartupError(f"--text {options.text} is too short to measure quality")
    if options.requantize and header.split_count > 1:
        raise StartupError(
            f"--requantize needs the model in one file; this one is split into {header.split_count}"
        )
    return Subject(loaded, path, header, params, tokens[:MAX_TEXT_TOKENS])


def measure(subject: Subject, form: Quantization | None, options: TuneOptions) -> Tuning:
    """Measure the settings and, with --requantize, other quantizations of the model: ``form``, or
    those worth trying.
    """
    with (
        workplace(bytes_needed(subject, form) if options.requantize else 0) as folder,
        Bench() as bench,
        closing(open_bar(f"cllm: measuring {subject.path.name}")) as bar,
    ):
        traffic = [Traffic(name, options.scale) for name in options.workloads]
        tuning = Tuning(bench, bar, subject, folder, options.minutes * 60, traffic)
        tuning.tune()
        if options.requantize:
            tuning.requantize(form)
    return tuning


class Tuning:
    """The measurements and their progress."""

    def __init__(
        self,
        bench: Bench,
        bar: Bar,
        subject: Subject,
        folder: Path,
        seconds: float,
        traffic: list[Traffic],
    ) -> None:
        self.bench, self.bar, self.subject = bench, bar, subject
        self.servers = ServerBench(partial(served_settings, subject.loaded))
        self.traffic = traffic
        self.params, self.tokens = subject.params, subject.tokens
        self.folder, self.seconds = folder, seconds
        self.start = starting_choice(self.params, os.cpu_count() or 1)
        self.kv_quality: dict[str, Quality] = {}
        self.forms: list[Requantized] | None = None
        self.begun = time.monotonic()

    def measure(self, choice: Choice, work: SpeedWork | Traffic) -> Speeds | Served:
        changes = [f"{key} {value}" for key, value in choice.items() if value != self.start[key]]
        self.bar.update(
            min(1.0, (time.monotonic() - self.begun) / self.seconds),
            ", ".join(changes) or "current settings",
        )
        try:
            check_kv_type(self.subject.header, choice[KV_TYPE])
        except StartupError as error:
            raise CandidateError(str(error)) from None
        if isinstance(work, Traffic):
            return self.servers.measure(choice, work)
        return self.bench.measure(apply_choice(self.params, choice), work)

    def tune(self) -> None:
        """Measure the settings. Raises StartupError if the unchanged model cannot be measured."""
        try:
            self.works = works(
                partial(self.bench.measure, apply_choice(self.params, self.start)),
                self.params.max_num_seqs,
                self.seconds,
            )
        except CandidateError as error:
            raise StartupError(f"cannot measure the model: {error}") from None
        cores = os.cpu_count() or 1
        step = self.params.max_num_batched_tokens
        tries = knobs(self.start, self.works, cores, step, self.traffic)
        final = final_figures(self.works, self.traffic)
        left = self.seconds - (time.monotonic() - self.begun)
        self.tuned = search(tries, final, self.start, self.measure, self.refuse, left)

    def refuse(self, key: str, choice: Choice) -> str:
        """Return why ``choice`` must not be taken, or "". Another KV type must not change answers
        much.
        """
        if key != KV_TYPE:
            return ""
        logits = self.folder / "logits"
        try:
            self.bench.write_logits(apply_choice(self.params, self.start), self.tokens, logits)
            quality = self.bench.quality(apply_choice(self.params, choice), self.tokens, logits)
        except CandidateError as error:
            return f"cannot measure its quality: {error}"
        self.kv_quality[str(choice[key])] = quality
        return (
            "" if quality.kl <= KV_KL_LIMIT else f"it changes answers too much: {in_words(quality)}"
        )

    def requantize(self, form: Quantization | None) -> None:
        """Measure ``form``, or the quantizations worth trying, with the chosen settings."""
        params = apply_choice(self.params, self.start | self.tuned.recommended)
        figures, forms = final_figures(self.works), None if form is None else [form]

        def progress(text: str, share: float) -> None:
            self.bar.update(share, text)

        self.forms = try_quantizations(
            self.bench, params, figures, self.tokens, forms, self.folder, progress
        )

    def report(self, seconds: float) -> TuningReport:
        """Return the report on what was measured in ``seconds``."""
        header, forms = self.subject.header, self.forms
        types = dict.fromkeys(tensor.type for tensor in header.tensors)
        best = find_best(forms or [])
        return TuningReport(
            model=catalog.derive_model_name(self.subject.path),
            cpu=describe_cpu(),
            cores=os.cpu_count() or 1,
            seconds=round(seconds, 1),
            settings=self.tuned,
            recommended=self.tuned.recommended,
            kv_quality=self.kv_quality,
            original_form=None if forms is None else str(original_quantization(header)),
            forms=forms or [],
            recommended_form=best.form if best else None,
            tiles=measure_tiles(types) if self.params.options["kernels"] == "auto" else [],
        )


def served_settings(loaded: LoadedConfig, choice: Choice) -> dict[str, Any]:
    """Return the engine's settings for a server that uses ``choice``."""
    tree = settings_tree(loaded, choice)
    return {section: tree[section] for section in ENGINE_SECTIONS if section in tree}


def bytes_needed(subject: Subject, form: Quantization | None) -> int:
    """Return the disk space for a candidate and the original's logits, in bytes."""
    header = subject.header
    candidate = SIZE_LIMIT * header.tensor_bytes if form is None else estimated_bytes(form, header)
    return int(candidate) + 4 * len(subject.tokens) * header.array_lengths.get(
        "tokenizer.ggml.tokens", 0
    )


# --- files --------------------------------------------------------------------------------------


def check_options(options: TuneOptions) -> None:
    """Check the options before measuring. Raises StartupError."""
    write = options.write
    if write and not options.requantize:
        raise StartupError("--write needs --requantize")
    if options.write_as and not write:
        raise StartupError("--write-as needs --write")
    check_writable(options.out, write)
    if write and write.exists():
        raise StartupError(f"{write} already exists; name another file")


def read_text(path: Path) -> str:
    """Return the text on which quality is judged. Raises StartupError."""
    try:
        return read_input_text(path)
    except OSError as error:
        raise StartupError(f"cannot read --text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"--text {path} is not UTF-8") from None


def show(report: TuningReport, loaded: LoadedConfig, options: TuneOptions) -> None:
    """Print the report, and print or write the YAML."""
    yaml, out = format_yaml(loaded, report), options.out
    print_report(report)
    if out is not None:
        write_file(out, yaml.encode())
        print(f"{out}: cllm serve --config {out}", file=sys.stderr)
    if options.json:
        print_json(report)
    elif out is None:
        print(yaml, end="")


def chosen_quantization(forms: list[Requantized] | None, header: GgufHeader) -> Quantization | None:
    best = find_best(forms or [])
    return None if best is None else read_quantization(best.form, header)


def write_copy(source: Path, target: Path, form: Quantization | None) -> None:
    """Write the copy completely or not at all. Exits with 1 if no quantization is worth writing."""
    if form is None:
        print(
            "cllm: no quantization is faster with little loss of quality, so no copy was written",
            file=sys.stderr,
        )
        sys.exit(1)
    try:
        with (
            closing(open_bar(f"cllm: writing {target.name}")) as bar,
            tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder,
        ):
            copy = Path(folder) / "copy.gguf"
            write_quantization(source, copy, form, bar.update)
            copy.replace(target)
    except OSError as error:
        raise StartupError(f"cannot write {target}: {error.strerror}") from None
    print(f"{target}: {form}, {format_size(target.stat().st_size)}", file=sys.stderr)
