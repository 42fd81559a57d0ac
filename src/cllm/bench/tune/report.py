"""Reports on tuning: as tables, as JSON, and as the YAML that ``cllm serve --config`` takes."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec

from cllm import __version__
from cllm.bench.console import print_lines
from cllm.bench.tune.quality import Quality
from cllm.bench.tune.requantize import Requantized
from cllm.bench.tune.search import Choice, Trial, Tuned
from cllm.bench.tune.tiles import Tiles
from cllm.config.sources import LoadedConfig, get_value, set_value
from cllm.models.gguf import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


NOISY = 0.3  # a share from which the machine, and not the settings, is what was measured


class TuningReport(msgspec.Struct, frozen=True):
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
    tiles: list[Tiles] = []


def format_yaml(loaded: LoadedConfig, report: TuningReport) -> str:
    """Return YAML with the given and the chosen settings, for cllm serve --config."""
    import yaml

    tree = settings_tree(loaded, report.recommended)
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


def settings_tree(loaded: LoadedConfig, choice: Choice) -> dict[str, Any]:
    """Return the given settings with those of ``choice``, as the tree of a YAML file."""
    given = {
        key: get_value(loaded.settings, key)
        for key, origin in loaded.origins.items()
        if origin != "default"
    }
    tree: dict[str, Any] = {}
    for key, value in (given | choice).items():
        set_value(tree, key, value)
    return tree


def one_line(text: str) -> str:
    """Replace unprintable characters, because file names may contain any, and YAML has many line
    ends.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def verdict(tuned: Tuned) -> list[str]:
    """Return lines about the gain."""
    if tuned.before is None or tuned.after is None:
        return ["no setting was faster than the current one by more than the noise"]
    if not tuned.confirmed:
        return ["the changes were not faster when measured again, so the current settings stay"]
    lines = [f"{key}: {value}" for key, value in tuned.chosen.items()]
    gains = [
        f"{figure} {format_rate(tuned.before, figure)} -> {format_rate(tuned.after, figure)}"
        for figure in tuned.before.speeds
    ]
    noise = f"{tuned.after.gain:+.1%} on average, noise {tuned.after.noise:.1%}"
    return [", ".join(lines), f"tokens/s: {', '.join(gains)}; {noise}"]


def remark_on_noise(tuned: Tuned) -> list[str]:
    """Return a line if other programs disturbed the measurements."""
    noise = max((tried.outcome.noise for tried in tuned.tried), default=0.0)
    if noise < NOISY:
        return []
    return [f"the machine was busy (noise up to {noise:.0%}); measure again when it is idle"]


def format_rate(outcome: Trial, figure: str) -> str:
    """Return the median of the rounds as text, or "" if there was none."""
    if not outcome.speeds.get(figure):
        return ""
    speed = statistics.median(outcome.speeds[figure])
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def format_gain(outcome: Trial) -> tuple[str, str]:
    """Return the gain and its noise as text. The noise of one round is unknown, so it is ""."""
    if outcome.failure:
        return "", ""
    rounds = max(map(len, outcome.speeds.values()))
    return f"{outcome.gain:+.1%}", f"{outcome.noise:.1%}" if rounds > 1 else ""


def in_words(quality: Quality) -> str:
    return (
        f"KL divergence {quality.kl:.4f}, top-1 agreement {quality.top1:.1%} over "
        f"{quality.num_tokens} tokens"
    )


def print_report(report: TuningReport) -> None:
    """Print the report on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    console.print(tried_table(report.settings))
    skipped, qualities = report.settings.skipped, report.kv_quality.items()
    lines = [
        f"{key} was not measured: nothing to try, or no time (raise --minutes)" for key in skipped
    ]
    lines += [f"kv.type {name}: {in_words(quality)}" for name, quality in qualities]
    lines += map(describe_tiles, report.tiles)
    print_lines(console, [*lines, *remark_on_noise(report.settings), *verdict(report.settings)])
    if report.original_form:
        print_forms(report, console)


def new_table(title: str, *columns: str) -> Table:
    """Return a table that fits 80 columns, with wrapped headings and right-aligned numbers."""
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    for column in columns:
        is_text = column in ("setting", "form", "")
        table.add_column(
            column.replace(" ", "\n"),
            justify="left" if is_text else "right",
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
        is_present = tried.key != above
        name = tried.key.removeprefix("backend.llama_cpp.") if is_present else ""
        speeds = [format_rate(tried.outcome, figure) for figure in figures]
        gained = ("", "") if is_present else format_gain(tried.outcome)
        remark = tried.outcome.failure or tried.note or ("chosen" if tried.chosen else "")
        table.add_row(name, str(tried.value), *speeds, *gained, remark)
        above = tried.key
    return table


def describe_tiles(tiles: Tiles) -> str:
    """Return from how many rows on products with a type's weights are computed in tiles."""
    return (
        f"{tiles.type} weights: tiles of 16 rows from {tiles.alone} rows on (faster here from "
        f"{tiles.faster_alone}); after full tiles from {tiles.after} more rows on (here "
        f"{tiles.faster_after})"
    )


def print_forms(report: TuningReport, console: Console) -> None:
    figures = list(dict.fromkeys(name for form in report.forms for name in form.original.speeds))
    table = new_table(
        "tokens/s and quality", "form", "size", *figures, "gain", "noise", "KL", "top-1"
    )
    original = next((form.original for form in report.forms if form.original.speeds), Trial({}))
    table.add_row(report.original_form, "", *(format_rate(original, figure) for figure in figures))
    failures = []
    for form in report.forms:
        if form.outcome.failure:
            failures.append(f"{form.form}: {form.outcome.failure}")
            continue
        speeds = [format_rate(form.outcome, figure) for figure in figures]
        cost = (
            ("", "")
            if form.quality is None
            else (f"{form.quality.kl:.4f}", f"{form.quality.top1:.1%}")
        )
        table.add_row(
            form.form, format_size(form.num_bytes), *speeds, *format_gain(form.outcome), *cost
        )
    console.print(table)
    print_lines(console, failures)
    print_lines(console, form_remarks(report))


def form_remarks(report: TuningReport) -> list[str]:
    chosen = report.recommended_form
    return [
        (
            "The first row is the unchanged model. KL: mean divergence of the next token's "
            "probabilities from the unchanged model's, in nats."
        ),
        "top-1: share of positions with the same most probable token.",
        f"{chosen} is the fastest with little loss of quality"
        if chosen
        else "no quantization is faster by more than the noise with little loss of quality",
    ]
