"""The quality that another quantization of a model loses: how far its next-token distributions are
from the original's.

Mean Kullback-Leibler divergence and top-1 agreement over the positions of a text, as in llama.cpp's
perplexity tool (https://github.com/ggml-org/llama.cpp/tree/master/tools/perplexity).
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Rows = npt.NDArray[np.float64]

TEXT = """\
The harbour of the old town lies behind a long wall of grey stone. In the morning, before the sun has reached the
roofs, the boats come in one after another, and the people who wait for them already know by the sound of an engine
whose boat it is. Two women sort the fish into boxes with ice; a boy counts the boxes and writes the numbers on a
board. "Forty-one, forty-two," he says, and nobody has ever found him wrong.

Later in the day the harbour belongs to the visitors. They ask how deep the water is, why the tide comes twice, and
where one can eat. The answer to the second question is that the moon pulls at the water on the near side more than at
the earth itself, and at the earth more than at the water on the far side; so there are two bulges, and the earth
turns below them.

Here is how to make the soup that they all ask for:
1. Cut two onions and a carrot into small pieces and fry them slowly in butter.
2. Add half a litre of water, 300 g of potatoes and a little salt, and cook for 20 minutes.
3. Put the fish in at the end; it needs no more than five minutes.

A program that keeps the list of the boats could begin like this:

def total(boats: dict[str, int]) -> int:
    return sum(count for name, count in boats.items() if not name.startswith("test"))

In the evening the wind turns. The lamps along the wall are lit, the last ferry leaves at half past nine, and whoever
has missed it sits down on the steps and has a good reason to stay until tomorrow. If it rains, the keeper of the
lighthouse opens his door, although the rules, which his grandfather wrote in 1911, say that he must not.
"""


class Quality(msgspec.Struct, frozen=True):
    """Mean divergence from the original in nats, and the share of positions with the same most
    probable token.
    """

    kl: float
    top1: float
    num_tokens: int


def compare(original: Logits, other: Logits) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Return KL(original || other) of each row, in nats, and whether its most probable token is the
    same.

    Both arguments have the shape (rows, vocabulary). Computed in float64.
    """
    log_p, log_q = log_softmax(original), log_softmax(other)
    p = np.exp(log_p)
    difference = np.subtract(log_p, log_q, out=np.zeros_like(p), where=p > 0)
    return (p * difference).sum(axis=1), original.argmax(axis=1) == other.argmax(axis=1)


def log_softmax(logits: Logits) -> Rows:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
