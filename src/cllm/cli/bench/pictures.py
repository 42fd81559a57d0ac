"""Pictures and HTML pages that a command writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cllm.cli.bench.files import check_writable, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Plot = Annotated[Path | None, Parameter(help="File for a picture: .png or .svg.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    plot: Plot = None
    html: Annotated[Path | None, Parameter(help="File for an HTML report with pictures.")] = None


def check_files(out: Path | None, plot: Path | None, html: Path | None) -> None:
    """Check the output files before anything is measured.

    Raises StartupError if one cannot be written.
    """
    if plot is not None or html is not None:
        from cllm.bench.load.plots import check_picture

        if plot is not None:
            check_picture(plot)
    check_writable(out, plot, html)


def write_picture(path: Path, figure: Figure) -> None:
    """Write ``figure`` in the format of the file's name. Raises StartupError if that fails."""
    from cllm.bench.load.plots import picture

    write_file(path, picture(figure, path.suffix.lower()))
