"""Label many texts: each answer is one of the labels, and all are computed together.

python examples/label.py
MODEL=hf:Qwen/Qwen3-1.7B-GGUF:Q8_0 python examples/label.py
"""

import os
import time

from cllm import LLM, SamplingParams

LABELS = [
    "black",
    "blue",
    "brown",
    "green",
    "grey",
    "orange",
    "pink",
    "purple",
    "red",
    "white",
    "yellow",
]
THINGS = ["grass", "snow", "coal", "a banana", "the sky", "a carrot", "chocolate", "a flamingo"]


def label(llm: LLM, things: list[str]) -> list[str]:
    """Return a label for each thing."""
    conversations = [[{"role": "user", "content": f"What colour is {thing}?"}] for thing in things]
    params = SamplingParams(temperature=0)
    done = llm.chat(conversations, params, response_format=LABELS, priority="batch")
    return [one.text for one in done]


def main() -> None:
    with LLM(
        os.environ.get("MODEL"), model_max_context_length=512, scheduler_max_num_seqs=16
    ) as llm:
        things = THINGS * 8
        begun = time.perf_counter()
        labels = label(llm, things)
        seconds = time.perf_counter() - begun
        for thing, colour in list(zip(things, labels, strict=True))[: len(THINGS)]:
            print(f"{thing}: {colour}")
        print(f"{len(things)} labels in {seconds:.2f} s, {len(things) / seconds:.0f} per second")


if __name__ == "__main__":
    main()
