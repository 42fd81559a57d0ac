"""Which engine of a pool gets a request."""

import pytest
from fake_engines import FakeMember, ask
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cllm.core.request import EmbeddingRequest
from cllm.engine.commands import Abort, SetYielding
from cllm.process.assignments import BLOCK, SAMPLED_AFTER, Assignments, describe, name_blocks

# the beginning of a prompt; so long that few requests do not pay for a copy
SHARED = [7] * 16 * BLOCK


def make(count):
    members = [FakeMember(number) for number in range(count)]
    assignments = Assignments(members)
    assignments.measure_caches()
    return assignments, members


def assign(assignments, name, prompt=(1,), **more):
    """Assign a request, as a pool does, and return its engine."""
    request = ask(name, prompt=prompt, **more)
    member, booked = assignments.assign(request)
    member.give(name, booked)
    return member


def test_only_engine_gets_everything_without_a_booking():
    assignments, [member] = make(1)
    member.die()
    assert assignments.assign(ask("a", n=3))[1] == (None, ask("a").priority, 3)


def test_requests_are_spread_by_their_sequences():
    assignments, members = make(2)
    first = assign(assignments, "a", n=2)
    assert [assign(assignments, name) for name in "bc"] == [members[1 - first.number]] * 2


def test_prompt_goes_to_the_engine_that_knows_its_beginning():
    """Until the cache of that engine is empty."""
    assignments, _ = make(4)
    member = assign(assignments, "a", SHARED)
    member.bookings["a"].booking.finish_prompt()
    for i in range(5):
        name = f"b{i}"
        assert assign(assignments, name, [*SHARED, i]) is member
        assignments.remove(name)
    assignments.forget_prefixes(member)
    assert assign(assignments, "c", [*SHARED, 9]) is not member, "it has a request, others none"


def test_request_goes_to_an_engine_that_can_begin_it():
    """Not to one that is not ready, seeks the cause of deaths, or seems to hang."""
    assignments, members = make(4)
    members[0].die()
    members[1].pool.separating.add(1)
    members[2].get("x")
    members[2].hangs = True
    for i in range(3):
        assert assign(assignments, f"a{i}") is members[3]
    members[3].die()
    assert assign(assignments, "b") in members[1:3], "ready, although it may take long"
    for member in members:
        member.die()
    assert assign(assignments, "c") in members, "it waits for the next engine"


def test_caller_may_name_the_engines():
    assignments, members = make(3)
    for i in range(4):
        member, _ = assignments.assign(ask(f"a{i}"), [members[1]])
        assert member is members[1]


def test_engine_of_a_request_is_known_until_its_end():
    assignments, members = make(2)
    member = assign(assignments, "a")
    assert assignments.find("a") is member
    assignments.tell("a", SetYielding("a", True))
    assert member.take_sent()[-1:] == [SetYielding("a", True)]
    member.die()
    assert assignments.find("a") is member
    assignments.tell("a", SetYielding("a", False))
    assert member.take_sent() == []
    assert assignments.list_ready() == [members[1 - member.number]]
    assignments.remove("a")
    assert assignments.find("a") is None
    assignments.remove("a")  # again changes nothing


def test_aborted_request_ends_in_its_engine_and_frees_its_place():
    assignments, _ = make(2)
    member = assign(assignments, "a", n=2)
    assignments.remove("a", abort=True)
    assert member.take_sent() == [Abort("a")]
    assert assignments.find("a") is None
    assert assignments._router.booked(member.number).num_seqs == 0


def test_texts_to_embed_take_no_slots():
    assignments, _ = make(2)
    request = EmbeddingRequest("a", [[1] * 5, [2] * 3], account="x")
    assert assignments.assign(request)[1].num_seqs == 0
    assert (describe(request).num_tokens, describe(request).account) == (8, "x")


def test_only_what_the_base_model_computes_of_an_adapters_prompt_counts():
    request = replace(ask("a", prompt=range(1000)), num_base_tokens=500)
    assert describe(request).ends[-1] == 500
    assert describe(request).num_tokens == 1000


@given(st.integers(0, SAMPLED_AFTER), st.integers(0, SAMPLED_AFTER), st.sampled_from("xy"))
def test_names_say_how_much_two_prompts_have_in_common(num_tokens, length, salt):
    """Equal names mean equal beginnings under equal salts, and lengths increase to the prompt's."""
    prompt = [*range(num_tokens)]
    names, ends = name_blocks(prompt, "x")
    assert len(names) == len(ends)
    assert ends == sorted({*ends})
    assert ends[-1] == len(prompt)
    other, other_ends = name_blocks([*prompt[:length], -1], salt)
    for end, name, other_end, other_name in zip(ends, names, other_ends, other, strict=False):
        is_common = salt == "x" and end == other_end <= min(length, len(prompt))
        assert (name == other_name) == is_common


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK, 100_000, 10_000_001])
def test_long_prompts_have_few_names(num_tokens):
    names, ends = name_blocks([0] * num_tokens, "")
    assert ends[-1] == num_tokens
    assert len(names) < 80
