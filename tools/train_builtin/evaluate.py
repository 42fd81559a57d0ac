"""Ask the built-in model held-out questions, greedily and in batches, and write the report.

.venv/bin/python tools/train_builtin/evaluate.py [--model FILE] [--count 500]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

from cllm import LLM, SamplingParams
from cllm.models.builtin.questions import held_out_questions
from cllm.models.catalog import BUILTIN

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from openings import OPENINGS, ORDERS, RULES

SEED = 2026
SHOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUILTIN)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--report", type=Path, default=Path(__file__).with_name("report.md"))
    options = parser.parse_args()

    questions = list(itertools.islice(held_out_questions(SEED), options.count))
    llm = LLM(str(options.model), model_max_context_length=1024)

    def ask(*chats: list) -> list[str]:
        prompts = [llm.encode_chat(*chat) for chat in zip(*chats, strict=True)]
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=400))
        return [answer.text for answer in answers]

    texts = ask([q.messages for q in questions], [q.tools for q in questions])
    right = [text == question.answer for question, text in zip(questions, texts, strict=True)]
    openings = [(intent, text) for intent, texts in OPENINGS.items() for text in texts]
    replies = ask([[user(text)] for _, text in openings])
    fits = [RULES[i](text, reply) for (i, text), reply in zip(openings, replies, strict=True)]
    orders = ask([[{"role": "system", "content": o.system}, user(o.user)] for o in ORDERS])
    obeyed = [o.is_obeyed(reply) for o, reply in zip(ORDERS, orders, strict=True)]

    lines = [
        "# What the built-in model scores",
        "",
        f"{score(right)} of the held-out questions were answered exactly, decoded greedily in",
        f"batches; they are `held_out_questions({SEED})`, none of them in the training text.",
        "",
        *table("kind", [question.kind for question in questions], right),
        "",
        f"{score(fits)} of the openings in `tests/openings.py` satisfy the rule of their intent:",
        "",
        *table("intent", [intent for intent, _ in openings], fits),
        "",
        f"{score(obeyed)} of the orders in system messages there are obeyed:",
        "",
        *table("order", [order.order for order in ORDERS], obeyed),
        "",
        f"Wrong (at most {SHOWN} of a kind):",
        "",
    ]
    wrong = [q.messages[-1]["content"] for q in questions], texts, right
    wrong_openings = [text for _, text in openings], replies, fits
    wrong_orders = [f"{o.system} / {o.user}" for o in ORDERS], orders, obeyed
    for asked, answers, passed in (wrong, wrong_openings, wrong_orders):
        lines += [
            f"* {text!r}: {answer!r}"
            for text, answer, ok in zip(asked, answers, passed, strict=True)
            if not ok
        ][:SHOWN]
    options.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def score(passed: list[bool]) -> str:
    return f"{sum(passed)} of {len(passed)} ({sum(passed) / len(passed):.1%})"


def table(head: str, groups: list[str], passed: list[bool]) -> list[str]:
    asked = Counter(groups)
    good = Counter(group for group, ok in zip(groups, passed, strict=True) if ok)
    return [f"| {head} | right | asked |", "|---|---|---|"] + [
        f"| {group} | {good[group]} | {count} |" for group, count in asked.items()
    ]


if __name__ == "__main__":
    main()
