"""From the rows of a batch to what the decoder computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cllm.backends.torch.attention import make_plan
from cllm.backends.torch.cells import Cells, Runs, index_cells
from cllm.backends.torch.decoder import AnyDecoder, Step


def make_step(
    decoder: AnyDecoder, cells: Cells, rows: Sequence[tuple[int, int, list[int]]]
) -> Step:
    """Give the new tokens cells, and return the step that computes them.

    Each of ``rows`` is a seq_id, the number of its tokens before, and the new ones. Raises
    EngineError if there are too few free cells; some rows may have got theirs.
    """
    device = decoder.device
    tokens: list[int] = []
    positions: list[int] = []
    added: Runs = []
    for seq_id, start, new in rows:
        tokens += new
        positions += range(start, start + len(new))
        added += cells.grow(seq_id, len(new))
    readable = [
        (start, len(new), cells.runs(seq_id, 0, start + len(new))) for seq_id, start, new in rows
    ]
    return Step(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        index_cells(added, device),
        {window: make_plan(readable, window, device) for window in decoder.windows},
    )
