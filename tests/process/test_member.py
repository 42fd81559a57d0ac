"""One engine of a pool: which requests it has got, which wait, and what it owes its callers."""

import asyncio

import pytest
from fake_engines import FakeMember, ask, step

from cllm.core.output import EmbeddingOutput, Stats
from cllm.core.request import Priority
from cllm.engine.commands import (
    Abort,
    AdapterLoaded,
    Add,
    Explain,
    Explained,
    LoadAdapter,
    SetYielding,
)
from cllm.errors import EngineError
from cllm.process.member import AssignedRequest
from cllm.process.supervisor import HEALTHY_AFTER, Death
from cllm.routing.router import Candidate, Router, RoutingRequest
from cllm.scheduler.trace import Explanation


def kill(member, *in_step, is_own_fault=True):
    """Let the engine die in a step with these requests, and return the one that kills engines."""
    member.die()
    death = Death("SIGABRT", [*in_step], is_own_fault, 1.0)
    return member.find_fatal_request(death, is_certain=True)


def test_engine_that_is_not_ready_gets_its_requests_when_it_is():
    member = FakeMember()
    member.die()
    member.get("a", "b")
    assert not member.has("a")
    member.get("stopped")
    member.pool.ended.add("stopped")
    member.start()
    assert member.take_added() == ["a", "b"]
    assert member.has("a")


def test_all_commands_of_a_request_are_sent_together():
    """SetYielding follows the request that it names."""
    member = FakeMember()
    member.die()
    member.get("a")
    member.pool.make_commands = lambda name: [Add(ask(name)), SetYielding(name, True)]
    member.start()
    assert member.take_sent() == [Add(ask("a")), SetYielding("a", True)]


def test_requests_wait_during_a_search_until_the_suspects_have_tokens():
    """After a second death of the same step, and new requests wait as well."""
    member = FakeMember()
    member.get("a", "b")
    for _ in range(2):
        assert kill(member, "a", "b") is None
        member.take_sent()
        member.start()
    assert member.take_added() == ["a"], "one suspect at a time"
    member.get("new")
    assert member.is_stuck_with("new")
    assert not member.is_stuck_with("a")
    member.take(step("a"))
    assert member.take_added() == ["b"]
    member.take(step("b"))
    assert member.take_added() == ["new"]
    assert not member.is_searching


def test_vectors_end_the_wait_for_a_suspect():
    member = FakeMember()
    member.get("texts", "b")
    for _ in range(2):
        kill(member, "texts", "b")
        member.start()
    member.take_sent()
    member.take(EmbeddingOutput("texts", [], ""))
    assert member.take_added() == [], "it has only begun"
    member.take(EmbeddingOutput("texts", [b"0000"], ""))
    assert member.take_added() == ["b"]


def test_request_that_kills_two_engines_alone_is_fatal():
    member = FakeMember()
    member.get("a", "other")
    assert kill(member, "a") is None
    assert member.list_harmless() == ["other"]
    member.start()
    assert kill(member, "a") == "a"


def test_end_from_outside_makes_no_suspects():
    member = FakeMember()
    member.get("a")
    for _ in range(3):
        assert kill(member, "a", is_own_fault=False) is None
        member.start()
    assert member.list_harmless() == ["a"]
    assert not member.is_searching
    assert member._ends["a"] == 3
    member.take(step("a"))
    assert not member._ends, "a token shows that it does no harm"


def test_suspects_are_forgotten_after_healthy_service():
    now = 0.0
    member = FakeMember(clock=lambda: now)
    member.get("a", "b")
    kill(member, "a", "b")
    member.start()
    member.take(step("a", "b"))
    assert member.list_harmless() == []
    now = HEALTHY_AFTER
    member.take(step("a"))
    assert member.list_harmless() == ["a", "b"]


def test_engine_with_suspicious_texts_gets_no_requests_before_they_are_done():
    member = FakeMember()
    member.pool.separating.add(0)
    member.get("a")
    assert member.take_added() == []
    member.resume()
    assert member.take_added() == []
    member.pool.separating.clear()
    member.resume()
    assert member.take_added() == ["a"]


def test_abort_reaches_the_engine_only_if_it_has_the_request():
    router = Router(max_blocks=0)
    member = FakeMember()
    booking = router.choose(RoutingRequest((), (), 10), [Candidate(0, 2)])
    member.give("a", AssignedRequest(booking, Priority.NORMAL, 3))
    assert router.booked(0).num_seqs == 1
    member.abort("a")
    assert member.take_sent() == [Abort("a")]
    assert router.booked(0).num_seqs == 0
    assert (member.bookings, member.num_seqs) == ({}, [0] * len(Priority))
    member.die()
    member.get("b")
    member.abort("b")
    assert member.take_sent() == []
    assert not member.bookings


@pytest.mark.parametrize("moves", [False, True])
def test_others_continue_when_a_suspect_is_aborted_or_moves_away(moves):
    member = FakeMember()
    member.get("a", "b")
    for _ in range(2):
        kill(member, "a", "b")
        member.start()
    member.take_sent()
    if moves:
        member.leave("a")
    else:
        member.abort("a")
    assert member.take_added() == ["b"]


def test_count_of_ends_follows_a_request_to_its_next_engine():
    member = FakeMember()
    member.get("a")
    kill(member, "a", is_own_fault=False)
    member.leave("a")
    assert "a" not in member.bookings
    assert member._ends["a"] == 1


def test_room_depends_on_the_class():
    """Requests of lower classes do not keep those of higher ones from starting."""
    member = FakeMember()
    member.get("a", "b", priority=Priority.BATCH)
    assert member.has_room(Priority.NORMAL)
    assert not member.has_room(Priority.BATCH)
    member.get("c", n=2)
    assert not member.has_room(Priority.NORMAL)
    assert [member.count_seqs(one) for one in (Priority.NORMAL, Priority.BATCH)] == [2, 4]


def test_engine_whose_requests_wait_for_memory_has_no_room():
    member = FakeMember()
    member.get("a")
    member.take(step(num_running=1, num_waiting=1))
    assert not member.has_room(Priority.NORMAL)
    member.take(step(num_running=1))
    assert member.has_room(Priority.NORMAL)


def test_idle_engine_relieves_one_whose_requests_wait():
    idle, busy = FakeMember(0), FakeMember(1)
    busy.get("a", "b", "c")
    assert not idle.should_relieve(busy, Priority.NORMAL), "as far as is known, none waits"
    busy.take(step(num_running=2, num_waiting=1))
    assert idle.should_relieve(busy, Priority.NORMAL)
    assert not busy.should_relieve(idle, Priority.NORMAL)
    idle.get("d", "e")
    assert not idle.should_relieve(busy, Priority.NORMAL)


def test_explanations_come_in_the_order_of_the_questions():
    async def main():
        member = FakeMember()
        questions = [asyncio.create_task(member.explain(count)) for count in (1, 2)]
        await asyncio.sleep(0)
        assert member.take_sent() == [Explain(1), Explain(2)]
        assert member.has_work(), "an engine without requests owes the answers"
        answers = [Explanation([], [], count, [], {}, None, "") for count in (1, 2)]
        for answer in answers:
            member.take(Explained(answer))
        assert await asyncio.gather(*questions) == answers
        assert not member.has_work()

    asyncio.run(main())


def test_callers_get_an_error_when_the_engine_dies():
    """Not one that is asked later, from the next engine."""

    async def main():
        member = FakeMember()
        asked = asyncio.create_task(member.explain(1))
        adapter = asyncio.create_task(member.load_adapter("x", "/x.gguf"))
        await asyncio.sleep(0)
        member.forget_step(EngineError("it died"))
        for task in (asked, adapter):
            with pytest.raises(EngineError, match="it died"):
                await task
        member.die()
        with pytest.raises(EngineError, match="not ready"):
            await member.explain(1)
        member.start()
        assert not member.has_work()

    asyncio.run(main())


@pytest.mark.parametrize("error", ["", "it does not fit"])
def test_all_who_load_an_adapter_get_the_answer(error):
    async def main():
        member = FakeMember()
        tasks = [asyncio.create_task(member.load_adapter("x", "/x.gguf")) for _ in range(2)]
        await asyncio.sleep(0)
        assert member.take_sent() == [LoadAdapter("x", "/x.gguf")] * 2
        member.take(AdapterLoaded("x", error))
        assert await asyncio.gather(*tasks) == [error] * 2

    asyncio.run(main())


def test_totals_include_engines_that_have_died():
    member = FakeMember()
    member.take(step(num_steps=5, num_running=2))
    member.forget_step(EngineError("it died"))
    assert member.stats.num_running == 0
    member.die()
    member.start()
    member.take(step(num_steps=3))
    assert member.stats.num_steps == 3
    assert member.stats_since_start.num_steps == 8


def test_begun_requests_fail_if_the_model_file_has_changed():
    """Their tokens would be those of two models."""
    member = FakeMember()
    member.get("a")
    member.die()
    member.start("other")
    [failure] = [call for call in member.pool.calls if call[0] == "fail"]
    assert failure[2] == ["a"]
    assert "has changed" in failure[3]
    member.die()
    member.start("other and another context")
    assert [call[0] for call in member.pool.calls].count("fail") == 1


def test_process_owes_answers_while_texts_wait():
    member = FakeMember()
    assert not member.owes_answers()
    member.pool.texts.add(0)
    assert member.owes_answers()
    assert not member.has_work(), "tokenizing needs no steps"


def test_forgetting_all_leaves_nothing():
    member = FakeMember()
    member.get("a", "b", n=2)
    kill(member, "a", "b")
    member.forget_all(EngineError("closed"))
    assert (member.bookings, member.num_seqs) == ({}, [0] * len(Priority))
    assert member.stats == Stats(num_seq_ids=2, num_cells=member.stats.num_cells)
    assert not member.is_searching
