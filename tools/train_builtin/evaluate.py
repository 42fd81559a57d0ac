"""Ask the built-in model held-out questions, greedily and in batches, and write the report.

.venv/bin/python tools/train_builtin/evaluate.py [--model FILE] [--count 500]
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path

from cllm import LLM, SamplingParams
from cllm.models.builtin.questions import KINDS, held_out_questions
from cllm.models.catalog import BUILTIN

SEED = 2026


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUILTIN)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--report", type=Path, default=Path(__file__).with_name("report.md"))
    options = parser.parse_args()

    questions = list(itertools.islice(held_out_questions(SEED), options.count))
    llm = LLM(str(options.model), model_max_context_length=1024)
    prompts = [llm.encode_chat(question.messages, question.tools) for question in questions]
    completions = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=400))
    right = [
        done.text == question.answer for question, done in zip(questions, completions, strict=True)
    ]

    asked = Counter(question.kind for question in questions)
    good = Counter(question.kind for question, ok in zip(questions, right, strict=True) if ok)
    lines = [
        "# What the built-in model scores",
        "",
        (
            f"{sum(right)} of {len(right)} held-out questions ({sum(right) / len(right):.1%}) "
            f"answered exactly, decoded"
        ),
        (
            f"greedily in batches; the questions are `held_out_questions({SEED})`, none of them in "
            f"the training text."
        ),
        "",
        "| kind | right | asked |",
        "|---|---|---|",
        *(f"| {kind} | {good[kind]} | {asked[kind]} |" for kind in KINDS),
    ]
    wrong = [(q, c) for q, c, ok in zip(questions, completions, right, strict=True) if not ok]
    if wrong:
        lines += ["", "Wrong:", ""]
        lines += [
            f"* {q.messages[-1]['content']!r}: {c.text!r}, not {q.answer!r}" for q, c in wrong
        ]
    options.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
