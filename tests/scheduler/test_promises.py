"""Promises of the README, under random requests: a prefix is computed once, an account with many
requests does not hold up another one, and a seed gives the same text alone and with others.
"""

from __future__ import annotations

import math

import pytest
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.core.request import Priority
from cllm.kv_cache.matching import MIN_SHARED_TOKENS

SYSTEM = 80  # tokens of a shared prefix
CONTEXT = 256

asked = st.lists(
    st.tuples(
        st.integers(0, 2),  # which system prompt
        st.integers(1, 30),  # tokens after it
        st.integers(0, 3),  # steps until the next request arrives
    ),
    min_size=1,
    max_size=12,
)


@given(asked, st.integers(8, 64), st.sampled_from([8, 12]))
@settings(max_examples=15)
def test_a_prefix_is_computed_once_whenever_its_requests_arrive(
    fake_engine, requests: list[tuple[int, int, int]], num_tokens: int, num_seqs: int
) -> None:
    """Every other token of a prompt is its own, and computed too. A request computes again less than
    what is worth a wait.
    """
    engine = fake_engine(
        context_length=CONTEXT,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_tokens, num_seqs),
        num_cells=12 * CONTEXT,
        num_spare_ids=16,
        engine_target_itl=math.inf,
    )
    for number, (system, size, num_steps) in enumerate(requests):
        own = [100 + number, *(7 * i % 50 for i in range(size - 1))]
        engine.add(f"R{number}", [200 + system] * SYSTEM + own, max_tokens=1)
        for _ in range(num_steps):
            engine.step()
    engine.finish()
    assert len(engine.ends()) == len(requests)
    computed = sum(batch.num_tokens for batch in engine.backend.batches)
    systems = {system for system, _, _ in requests}
    needed = len(systems) * SYSTEM + sum(size for _, size, _ in requests)
    num_followers = len(requests) - len(systems)
    assert needed <= computed <= needed + num_followers * (MIN_SHARED_TOKENS - 1)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=20, max_size=100),
    st.integers(0, 40),
    st.tuples(st.integers(1, 60), st.integers(1, 40)),
    st.integers(1, 4),
    st.integers(CONTEXT, 3 * CONTEXT),
)
@settings(max_examples=15)
def test_hundred_requests_of_one_account_do_not_hold_up_one_of_another(
    fake_engine,
    many: list[tuple[int, int]],
    arrival: int,
    one: tuple[int, int],
    num_seqs: int,
    num_cells: int,
) -> None:
    """Of the requests that waited when it arrived, at most one step's worth begins before it."""
    engine = fake_engine(
        context_length=CONTEXT, max_num_seqs=num_seqs, num_cells=num_cells, length=CONTEXT
    )

    def add(name: str, account: str, size: int, output: int) -> None:
        prompt = [len(engine.outputs) % 250, *(3 * i % 250 for i in range(size))]
        engine.add(name, prompt, account=account, max_tokens=output, ignore_eos=True)

    for number, (size, output) in enumerate(many):
        add(f"H{number}", "heavy", size, output)
    for _ in range(arrival):
        engine.step()

    def begun() -> set[str]:
        return {
            row.seq.request.request_id for batch in engine.backend.batches for row in batch.rows
        }

    before = begun()
    add("L", "light", *one)
    while "L" not in begun():
        engine.step()
        assert len(engine.backend.batches) < 5000
    assert len(begun() - before - {"L"}) <= num_seqs, "those begun in the same step included"
    engine.finish(max_steps=20_000)
    assert set(engine.ends().values()) == {"length"}


@given(
    st.tuples(st.lists(st.integers(0, 250), min_size=1, max_size=20), st.integers(0, 2**63 - 1)),
    st.lists(
        st.tuples(
            st.integers(1, 20),  # prompt tokens
            st.integers(1, 30),  # new tokens
            st.integers(0, 5),  # steps before it arrives
            st.sampled_from(Priority),
            st.booleans(),  # whether it is cancelled
        ),
        max_size=10,
    ),
    st.integers(0, 20),
    st.sampled_from(["off", "prompt_lookup"]),
    st.sampled_from([80, 256, None]),  # cells of the pool; None: each sequence has its own
)
@settings(max_examples=repeat(25, 8))
def test_seed_gives_same_text_alone_and_with_others(
    fake_engine,
    seeded: tuple[list[int], int],
    others: list[tuple[int, int, int, Priority, bool]],
    arrival: int,
    speculation: str,
    num_cells: int | None,
) -> None:
    """The others arrive, finish, preempt and are cancelled. The pool is overcommitted."""
    prompt, seed = seeded
    wanted = {"seed": seed, "temperature": 5.0, "max_tokens": 30, "ignore_eos": True, "n": 2}

    def make_engine(num_cells: int | None):
        return fake_engine(
            length=64,
            context_length=64,
            num_cells=num_cells,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            engine_speculation=speculation,
        )

    alone = make_engine(256)
    alone.add("A", prompt, **wanted)
    alone.finish()

    crowd = make_engine(num_cells)
    crowd.scheduler.sequences.length_estimates.output = 4
    for number, (size, output, num_steps, priority, _) in enumerate(others):
        for _ in range(num_steps):
            crowd.step()
        crowd.add(
            f"R{number}",
            [(number + i) % 250 for i in range(size)],
            priority=priority,
            max_tokens=output,
            temperature=5.0,
            seed=number,
        )
    for _ in range(arrival):
        crowd.step()
    crowd.add("A", prompt, **wanted)
    crowd.step()
    for number, (*_, cancelled) in enumerate(others):
        if cancelled:
            crowd.abort(f"R{number}")
    crowd.finish()
    for index in range(2):
        assert crowd.tokens("A", index) == alone.tokens("A", index)
    assert len(alone.tokens("A")) == 30
