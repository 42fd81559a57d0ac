"""``cllm tune``."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from cllm import __version__
from cllm.bench.measure import Bench, CandidateError
from cllm.bench.quality import TEXT, Quality
from cllm.bench.requantize import (
    SIZE_LIMIT,
    Form,
    Requantized,
    best_of,
    estimated_bytes,
    original_form,
    read_form,
    try_forms,
    workplace,
    write_form,
)
from cllm.bench.tune import (
    KV_KL_LIMIT,
    KV_TYPE,
    Choice,
    Outcome,
    Tuned,
    applied,
    final_figures,
    knobs,
    search,
    starting_choice,
    works,
)
from cllm.cli.doctor import cpu_name
from cllm.cli.files import check_writable, write_file
from cllm.cli.progress import Bar, loading_bar
from cllm.cli.remarks import print_notes
from cllm.cli.settings_flags import ConfigFlag, ModelArgument, ModelFlags, settings_from_flags
from cllm.config_sources import Loaded, plant, value_at
from cllm.engine.build import build_vocabulary, fitted
from cllm.engine.params import EngineParams
from cllm.engine.settings import engine_params
from cllm.errors import StartupError
from cllm.models import catalog, hub
from cllm.models.gguf import GgufHeader, check_kv_type, read_header, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cllm.bench.measure import Speeds, Work

NOISY = 0.3  # a share from which the machine, and not the settings, is what was measured
MAX_TEXT_TOKENS = 1024  # whose logits lie in a file, some 600 KB each for a large vocabulary


class Report(msgspec.Struct, frozen=True):
    """What --json prints."""

    model: str
    cpu: str
    cores: int
    seconds: float
    settings: Tuned
    recommended: Choice
    kv_quality: dict[str, Quality]
    original_form: str | None
    forms: list[Requantized]
    recommended_form: str | None


def tune(
    model: ModelArgument = None,
    /,
    *,
    minutes: Annotated[
        float,
        Parameter(
            validator=Number(gt=0), help="Approximate time to measure; more is more certain."
        ),
    ] = 4.0,
    out: Annotated[
        Path | None,
        Parameter(help="The YAML file to write. [default: print it]", show_default=False),
    ] = None,
    requantize: Annotated[
        bool,
        Parameter(
            negative="",
            help="Also try other quantizations of the output head and the body, and compare "
            "speed and quality. This "
            "writes about ten temporary copies of the model.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        Parameter(
            help="A UTF-8 text for measuring quality, at best like those of your users; up to "
            "1024 tokens of it are "
            "read. [default: a page of English]",
            show_default=False,
        ),
    ] = None,
    write: Annotated[
        Path | None,
        Parameter(
            help="With --requantize: write the fastest copy with little loss of quality to this "
            "file.",
            show_default=False,
        ),
    ] = None,
    write_as: Annotated[
        str | None,
        Parameter(
            help="With --write: try only this quantization, as BODY+HEAD (such as Q4_0+Q6_K), "
            "and write it.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, Parameter(negative="", help="Print one JSON object instead of the YAML.")
    ] = False,
    config: ConfigFlag = None,
    settings: ModelFlags | None = None,
) -> None:
    """Find the settings that make a model fastest on this machine, and write them as YAML for cllm
    serve --config.

    Threads, the size of a pass, layout and type of the KV cache are measured in turn, each
    candidate in a child process against the present value; what is not faster by more than the
    noise stays as it is. The report goes to stderr. Keep the machine quiet meanwhile.
    """
    begun = time.monotonic()
    loaded = settings_from_flags(config, settings, model)
    print_notes(loaded)
    tree = loaded.settings
    if tree.backend.name != "llama_cpp":
        raise StartupError(f"backend.name is {tree.backend.name}; only llama_cpp can be tuned")
    check_options(requantize=requantize, out=out, write=write, write_as=write_as)
    words = TEXT if text is None else read_text(text)
    with hub.stderr_progress() as progress:
        path = catalog.resolve(tree.model.path, tree.model.quantization, progress)
    params, header = fitted(engine_params(tree, path, check_tokens=True)), read_header(path)
    tokens = build_vocabulary(params).tokenize(words, add_special=True, parse_special=False)[
        :MAX_TEXT_TOKENS
    ]
    if len(tokens) < 2:
        raise StartupError(f"{text} is too short to judge quality by")
    if requantize and header.split_count > 1:
        raise StartupError(
            f"--requantize needs the model in one file; this one has {header.split_count}"
        )
    form = read_form(write_as, header) if write_as else None

    needed = bytes_needed(header, len(tokens), form) if requantize else 0
    with (
        workplace(needed) as folder,
        Bench() as bench,
        closing(loading_bar(f"cllm: measuring {path.name}")) as bar,
    ):
        tuning = Tuning(bench, bar, params, tokens, folder, minutes * 60)
        tuned = tuning.tune()
        forms = tuning.requantize(form) if requantize else []
        chosen = form or chosen_form(forms, header)
    report = Report(
        catalog.model_name(path),
        cpu_name(),
        os.cpu_count() or 1,
        round(time.monotonic() - begun, 1),
        tuned,
        tuned.recommended,
        tuning.kv_quality,
        str(original_form(header)) if requantize else None,
        forms,
        best.form if (best := best_of(forms)) else None,
    )
    yaml = yaml_text(loaded, report)
    print_report(report)
    if out is not None:
        write_file(out, yaml.encode())
        print(f"{out}: cllm serve --config {out}", file=sys.stderr)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    elif out is None:
        print(yaml, end="")
    if write and chosen:
        with closing(loading_bar(f"cllm: writing {write.name}")) as bar:
            write_copy(path, write, chosen, bar)
        print(f"{write}: {chosen}, {size_text(write.stat().st_size)}", file=sys.stderr)
    elif write:
        print("cllm: no form is faster at little cost, so no copy was written", file=sys.stderr)
        sys.exit(1)


class Tuning:
    """What is measured, and how far it is."""

    def __init__(
        self,
        bench: Bench,
        bar: Bar,
        params: EngineParams,
        tokens: list[int],
        folder: Path,
        seconds: float,
    ) -> None:
        self.bench, self.bar, self.params, self.tokens = bench, bar, params, tokens
        self.header = read_header(Path(params.path))
        self.folder, self.seconds = folder, seconds
        self.start = starting_choice(params, os.cpu_count() or 1)
        self.kv_quality: dict[str, Quality] = {}
        self.begun = time.monotonic()

    def measure(self, choice: Choice, work: Work) -> Speeds:
        changes = [f"{key} {value}" for key, value in choice.items() if value != self.start[key]]
        self.bar.update(
            min(1.0, (time.monotonic() - self.begun) / self.seconds),
            ", ".join(changes) or "as it is",
        )
        try:
            check_kv_type(self.header, choice[KV_TYPE])
        except StartupError as error:
            raise CandidateError(str(error)) from None
        return self.bench.measure(applied(self.params, choice), work)

    def tune(self) -> Tuned:
        """Raises StartupError if the model cannot be measured as it is."""
        try:
            self.works = works(
                lambda work: self.measure(self.start, work), self.params.max_num_seqs, self.seconds
            )
        except CandidateError as error:
            raise StartupError(f"the model cannot be measured: {error}") from None
        cores = os.cpu_count() or 1
        tries = knobs(self.start, self.works, cores, self.params.max_num_batched_tokens)
        left = self.seconds - (time.monotonic() - self.begun)
        self.tuned = search(
            tries, final_figures(self.works), self.start, self.measure, self.refuse, left
        )
        return self.tuned

    def refuse(self, key: str, choice: Choice) -> str:
        """Cells of another type must not change the answers much."""
        if key != KV_TYPE:
            return ""
        logits = self.folder / "logits"
        try:
            self.bench.write_logits(applied(self.params, self.start), self.tokens, logits)
            quality = self.bench.quality(applied(self.params, choice), self.tokens, logits)
        except CandidateError as error:
            return f"its quality cannot be measured: {error}"
        self.kv_quality[str(choice[key])] = quality
        return (
            "" if quality.kl <= KV_KL_LIMIT else f"it changes answers too much: {in_words(quality)}"
        )

    def requantize(self, form: Form | None) -> list[Requantized]:
        """With the settings that were chosen; ``form`` alone, if there is one."""
        params = applied(self.params, self.start | self.tuned.recommended)
        figures, forms = final_figures(self.works), None if form is None else [form]

        def progress(text: str, share: float) -> None:
            self.bar.update(share, text)

        return try_forms(self.bench, params, figures, self.tokens, forms, self.folder, progress)


def bytes_needed(header: GgufHeader, num_tokens: int, form: Form | None) -> int:
    """For a candidate and the original's logits."""
    candidate = SIZE_LIMIT * header.tensor_bytes if form is None else estimated_bytes(form, header)
    return int(candidate) + 4 * num_tokens * header.array_lengths.get("tokenizer.ggml.tokens", 0)


# --- files --------------------------------------------------------------------------------------


def check_options(
    *, requantize: bool, out: Path | None, write: Path | None, write_as: str | None
) -> None:
    """Mistakes that need not wait for minutes."""
    if write and not requantize:
        raise StartupError("--write needs --requantize")
    if write_as and not write:
        raise StartupError("--write-as needs --write")
    check_writable(out, write)
    if write and write.exists():
        raise StartupError(f"{write} exists; name another file")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"--text {path} is not UTF-8") from None


def chosen_form(forms: list[Requantized], header: GgufHeader) -> Form | None:
    best = best_of(forms)
    return None if best is None else read_form(best.form, header)


def write_copy(source: Path, target: Path, form: Form, bar: Bar) -> None:
    """Whole or not at all. Raises StartupError."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            copy = Path(folder) / "copy.gguf"
            write_form(source, copy, form, bar.update)
            copy.replace(target)
    except OSError as error:
        raise StartupError(f"{target} cannot be written: {error.strerror}") from None


def yaml_text(loaded: Loaded, report: Report) -> str:
    """The settings that were given, and those that were chosen; cllm serve --config takes it."""
    import yaml

    given = {
        key: value_at(loaded.settings, key)
        for key, origin in loaded.origins.items()
        if origin != "default"
    }
    tree: dict[str, Any] = {}
    for key, value in (given | report.recommended).items():
        plant(tree, key, value)
    lines = [
        (
            f"cLLM {__version__}: cllm tune, {time.strftime('%Y-%m-%d %H:%M')}, "
            f"{report.seconds / 60:.1f} minutes"
        ),
        f"{report.model} on {report.cpu}, {report.cores} cores",
        *verdict(report.settings),
    ]
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) if tree else ""
    return "".join(f"# {one_line(line)}\n" for line in lines) + body


def one_line(text: str) -> str:
    """Names of files may hold anything, and YAML knows many ends of a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# --- for a person -------------------------------------------------------------------------------


def verdict(tuned: Tuned) -> list[str]:
    """What was gained, in lines."""
    if tuned.before is None or tuned.after is None:
        return ["nothing was faster than the present settings by more than the noise"]
    if not tuned.confirmed:
        text = "what seemed faster was not when it was measured once more"
        return [f"{text}, so the present settings stay"]
    lines = [f"{key}: {value}" for key, value in tuned.chosen.items()]
    gains = [
        f"{figure} {rate(tuned.before, figure)} -> {rate(tuned.after, figure)}"
        for figure in tuned.before.speeds
    ]
    noise = f"{tuned.after.gain:+.1%} in the mean, noise {tuned.after.noise:.1%}"
    return [", ".join(lines), f"tokens/s: {', '.join(gains)}; {noise}"]


def unquiet(tuned: Tuned) -> list[str]:
    """A line if other programs were in the way."""
    noise = max((tried.outcome.noise for tried in tuned.tried), default=0.0)
    if noise < NOISY:
        return []
    return [f"the machine was not quiet (noise up to {noise:.0%}): measure again when it is"]


def rate(outcome: Outcome, figure: str) -> str:
    """The median of the rounds; "" if there was none."""
    if not outcome.speeds.get(figure):
        return ""
    speed = statistics.median(outcome.speeds[figure])
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def gain(outcome: Outcome) -> tuple[str, str]:
    """And its noise, which one round does not show."""
    if outcome.failure:
        return "", ""
    rounds = max(map(len, outcome.speeds.values()))
    return f"{outcome.gain:+.1%}", f"{outcome.noise:.1%}" if rounds > 1 else ""


def in_words(quality: Quality) -> str:
    return (
        f"KL divergence {quality.kl:.4f}, top-1 agreement {quality.top1:.1%} over "
        f"{quality.num_tokens} tokens"
    )


def print_report(report: Report) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(tried_table(report.settings))
    for line in [
        *(
            f"{key} not measured: nothing to try, or no time (--minutes gives more)"
            for key in report.settings.skipped
        ),
        *(f"kv.type {name}: {in_words(quality)}" for name, quality in report.kv_quality.items()),
        *unquiet(report.settings),
        *verdict(report.settings),
    ]:
        console.print(line, markup=False, highlight=False)
    if report.original_form:
        print_forms(report, console)


def new_table(title: str, *columns: str) -> Table:
    """Narrow enough for 80 columns; words over words, numbers at the right."""
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    for column in columns:
        words = column in ("setting", "form", "")
        table.add_column(
            column.replace(" ", "\n"),
            justify="left" if words else "right",
            no_wrap=column == "form",
        )
    return table


def tried_table(tuned: Tuned) -> Table:
    figures = list(
        dict.fromkeys(figure for tried in tuned.tried for figure in tried.outcome.speeds)
    )
    table = new_table("tokens/s", "setting", "value", *figures, "gain", "noise", "")
    above = ""
    for tried in tuned.tried:
        present = tried.key != above
        name = tried.key.removeprefix("backend.llama_cpp.") if present else ""
        speeds = [rate(tried.outcome, figure) for figure in figures]
        gained = ("", "") if present else gain(tried.outcome)
        remark = tried.outcome.failure or tried.note or ("chosen" if tried.chosen else "")
        table.add_row(name, str(tried.value), *speeds, *gained, remark)
        above = tried.key
    return table


def print_forms(report: Report, console: Console) -> None:
    figures = list(dict.fromkeys(name for form in report.forms for name in form.original.speeds))
    table = new_table(
        "tokens/s and quality", "form", "size", *figures, "gain", "noise", "KL", "top-1"
    )
    original = next((form.original for form in report.forms if form.original.speeds), Outcome({}))
    table.add_row(report.original_form, "", *(rate(original, figure) for figure in figures))
    failures = []
    for form in report.forms:
        if form.outcome.failure:
            failures.append(f"{form.form}: {form.outcome.failure}")
            continue
        speeds = [rate(form.outcome, figure) for figure in figures]
        cost = (
            ("", "")
            if form.quality is None
            else (f"{form.quality.kl:.4f}", f"{form.quality.top1:.1%}")
        )
        table.add_row(form.form, size_text(form.num_bytes), *speeds, *gain(form.outcome), *cost)
    console.print(table)
    for line in [
        *failures,
        (
            "The first one is the model as it is. KL: mean divergence of the next token's "
            "probabilities from its, in nats."
        ),
        "top-1: positions with the same most probable token.",
        f"{report.recommended_form} is the fastest at little cost"
        if report.recommended_form
        else "no form is faster by more than the noise at little cost",
    ]:
        console.print(line, markup=False, highlight=False)
