"""Measure speculation with a model that has learned the built-in model's stories.

    uv run python -m benchmarks.speculation MODEL [--how mtp] [--load stories] [--clients 1,32]
        [--requests 4] [--rounds 4]

Two servers of MODEL, with and without ``scheduler.speculation``, answer the same requests in turn:
to repeat a story with another name (``--load edits``, the default), or for new stories. MODEL must
have learned this, as the built-in model and that of ``tools/train_hybrid`` have. Printed are the
output tokens per second of both, their ratio, how many draft tokens were right, and how many texts
differ. The exit code is 1 if one differs for a single client: with several, what shares a batch may
change a close decision.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from pathlib import Path

import httpx2

from benchmarks.adapters import compute_rate
from cllm.bench.load.client import Outcome, run_stages
from cllm.bench.load.dialects import DIALECTS
from cllm.bench.load.scenarios import Sizes, edits
from cllm.bench.load.workload import Group, RequestSpec, Stage, Task
from cllm.bench.servers import MODEL, RunningServer, cllm
from cllm.cli.doctor import describe_cpu
from cllm.cli.main import install_signal_handlers
from cllm.models.builtin.questions import stories

GREEDY = {"max_tokens": 320, "temperature": 0}
COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def new_stories(spec: RequestSpec, sizes: Sizes) -> list[Stage]:
    """Return questions for stories. The built-in model's answers are the right ones."""
    rng, tasks = random.Random(spec.seed), []
    for _ in range(sizes.requests):
        story = stories(rng)
        body = DIALECTS[spec.api].body(spec.model, story.messages, GREEDY)
        tasks.append(Task(body, answer=story.answer))
    return [[Group(tasks=tasks, clients=sizes.clients)]]


LOADS = {"edits": edits, "stories": new_stories}


def send(server: RunningServer, load: str, clients: int, requests: int, seed: int) -> Outcome:
    """Send the requests of a seed; each client sends ``requests`` of them."""
    spec = RequestSpec(model=MODEL, prompt_words=1, max_tokens=1, seed=seed)
    return run_stages(
        server, LOADS[load](spec, Sizes(requests=clients * requests, clients=clients))
    )


def count_drafts(server: RunningServer) -> list[float]:
    """Return the draft tokens so far, and how many of them were right."""
    lines = httpx2.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"cllm:{name}_total"))
        for name in COUNTERS
    ]


def main() -> int:
    install_signal_handlers()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--how", default="auto")
    parser.add_argument("--load", choices=LOADS, default="edits")
    parser.add_argument("--clients", default="1,32")
    parser.add_argument("--requests", type=int, default=4, help="of each client, in a round")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(describe_cpu())
    seeds, has_changed = itertools.count(), False
    with (
        cllm(options.model, "--scheduler.speculation", "off") as plain,
        cllm(options.model, "--scheduler.speculation", options.how) as drafting,
    ):
        for server in (plain, drafting):
            send(server, options.load, 1, 2, next(seeds))
        for clients in map(int, options.clients.split(",")):
            ratios, differing, before = [], 0, count_drafts(drafting)
            for number in range(options.rounds):
                seed, outcomes = next(seeds), {}
                for server in (plain, drafting) if number % 2 else (drafting, plain):
                    outcomes[server.url] = send(
                        server, options.load, clients, options.requests, seed
                    )
                off, on = outcomes[plain.url], outcomes[drafting.url]
                ratios.append(compute_rate(on) / compute_rate(off))
                texts = [{each.task.body: each.text() for each in one.answers} for one in (off, on)]
                differing += sum(texts[1][body] != text for body, text in texts[0].items())
                right = sum(each.succeeded for each in off.answers)
                print(
                    f"{clients} clients: {compute_rate(off):.1f} tokens/s without, "
                    f"{compute_rate(on):.1f} with: {ratios[-1]:.3f}; "
                    f"{right} of {len(off.answers)} answers right"
                )
            drafted, accepted = (
                now - then for now, then in zip(count_drafts(drafting), before, strict=True)
            )
            share = accepted / drafted if drafted else 0.0
            print(
                f"{clients} clients: median {statistics.median(ratios):.3f} ({min(ratios):.3f}-"
                f"{max(ratios):.3f}), {share:.0%} of {drafted:.0f} draft tokens right, "
                f"{differing} texts differ"
            )
            has_changed |= clients == 1 and differing > 0
    return int(has_changed)


if __name__ == "__main__":
    sys.exit(main())
