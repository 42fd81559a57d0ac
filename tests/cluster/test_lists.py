"""Lists of what several replicas store, in pages: as if one server had stored everything."""

import asyncio
import itertools
import random
from types import SimpleNamespace
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from conftest import repeat
from pydantic_core import from_json, to_json
from starlette.requests import Request

from cllm.cluster.ask import ReplicaAnswer
from cllm.cluster.lists import answer_list, read_limit
from cllm.errors import BadRequest
from cllm.server.anthropic.batches import choose_page
from cllm.server.list_cursors import find_split
from cllm.server.openai.paging import make_page

ASKED = []  # the limits of the pages that replicas were asked for


def write_time(second):
    return f"2026-01-01T00:00:{second:02d}Z"


def make_replicas(rng, *, has_texts, names):
    """Return replicas with lists of objects of few different times, newest first."""
    numbers = itertools.count()
    replicas = []
    for name in sorted(names):
        seconds = sorted((rng.randrange(5) for _ in range(rng.randrange(8))), reverse=True)
        objects = [
            {
                "id": f"file-{name}_{next(numbers):x}",
                "created_at": write_time(second) if has_texts else second,
            }
            for second in seconds
        ]
        replicas.append(SimpleNamespace(name=name, objects=objects))
    return replicas


def answer(status, content):
    return ReplicaAnswer(status, [], to_json(content))


async def ask(replica, request, target):
    """Answer as a replica does."""
    parts = urlsplit(target)
    query = {name: value for name, [value] in parse_qs(parts.query).items()}
    objects = replica.objects
    if parts.path not in ("/v1/files", "/v1/messages/batches"):
        last = parts.path.rpartition("/")[2]
        found = [one for one in objects if one["id"] == last]
        return answer(200, found[0]) if found else answer(404, {"error": "no such object"})
    limit = read_limit(query["limit"])
    ASKED.append(limit)
    try:
        if parts.path == "/v1/files":
            ascending = query.get("order") == "asc"
            listed = objects[::-1] if ascending else objects
            return answer(200, make_page(listed, query.get("after"), limit, ascending=ascending))
        ids = [one["id"] for one in objects]
        times = [one["created_at"] for one in objects]
        cursors = query.get("before_id"), query.get("after_id")
        begin, end, has_more = choose_page(ids, times, *cursors, limit)
        shown = objects[begin:end]
        last_id = shown[-1]["id"] if shown else None
        return answer(200, {"data": shown, "has_more": has_more, "last_id": last_id})
    except BadRequest as error:
        return answer(error.status, {"error": str(error)})


def list_page(replicas, path, **query):
    scope = {"type": "http", "path": path, "query_string": urlencode(query).encode(), "headers": []}
    response = asyncio.run(answer_list(Request(scope), replicas, ask))
    return response.status_code, from_json(response.body)


def read_all(replicas, path, cursor, **query):
    """Return the ids of all pages, one after the other."""
    ids, more = [], {}
    while True:
        status, page = list_page(replicas, path, **query, **more)
        assert status == 200, page
        ids.append([one["id"] for one in page["data"]])
        assert page["first_id"] == (ids[-1][0] if ids[-1] else page["last_id"])
        if not page["has_more"]:
            return ids
        more = {cursor: page["first_id" if cursor == "before_id" else "last_id"]}


@pytest.mark.parametrize("seed", range(repeat(300, 30)))
def test_pages_are_those_of_one_list_in_which_each_replica_is_asked_for_one_page(seed):
    rng = random.Random(seed)
    replicas = make_replicas(rng, has_texts=False, names=rng.sample(["a", "b", "c", "d"], 3))
    whole = [one for replica in replicas for one in replica.objects]
    whole = [one["id"] for one in sorted(whole, key=lambda one: one["created_at"], reverse=True)]
    limit = rng.randrange(1, 6)
    ASKED.clear()
    for order in ("desc", "asc"):
        pages = read_all(replicas, "/v1/files", "after", order=order, limit=limit)
        ids = [*itertools.chain.from_iterable(pages)]
        assert ids == (whole if order == "desc" else whole[::-1])
        assert len(pages) <= max(1, -(-len(whole) // limit))
    assert {*ASKED} == {limit}


@pytest.mark.parametrize("seed", range(repeat(300, 30)))
def test_pages_of_anthropics_list_go_in_both_directions(seed):
    rng = random.Random(seed)
    replicas = make_replicas(rng, has_texts=True, names=["a", "b", "c"])
    path, limit = "/v1/messages/batches", rng.randrange(1, 6)
    forward = read_all(replicas, path, "after_id", limit=limit)
    whole = [*itertools.chain.from_iterable(forward)]
    assert len(whole) == sum(len(one.objects) for one in replicas)
    if len(whole) < 2:
        return
    place = rng.randrange(1, len(whole))
    status, page = list_page(replicas, path, before_id=whole[place], limit=limit)
    assert status == 200
    assert [one["id"] for one in page["data"]] == whole[max(0, place - limit) : place]
    assert page["has_more"] == (place > limit)


@pytest.mark.parametrize("cursor", ["file-a_ffff", "file-z_1", "else", "@5", "a/../b", "é" * 300])
def test_cursor_that_is_not_in_the_list_is_named(cursor):
    replicas = make_replicas(random.Random(1), has_texts=False, names=["a", "b"])
    reason = "the replica 'z', which gets no" if cursor.startswith("file-z") else "not in this list"
    with pytest.raises(BadRequest, match=f"Invalid 'after': .*{reason}"):
        list_page(replicas, "/v1/files", after=cursor, limit=3)


def test_object_whose_id_names_no_replica_is_found():
    replicas = make_replicas(random.Random(1), has_texts=False, names=["a", "b"])
    replicas[1].objects[:] = [{"id": "file-1", "created_at": 3}, {"id": "file-2", "created_at": 1}]
    replicas[0].objects[:] = [{"id": "file-3", "created_at": 2}]
    assert read_all(replicas, "/v1/files", "after", limit=1) == [["file-1"], ["file-3"], ["file-2"]]


def test_query_is_read_as_by_a_server():
    """Servers accept 1.0 as an integer, and ignore the cursors of Anthropic's list elsewhere."""
    replicas = make_replicas(random.Random(1), has_texts=False, names=["a", "b"])
    status, page = list_page(replicas, "/v1/files", limit="1.0", before_id="file-a_ffff")
    assert (status, len(page["data"]), page["has_more"]) == (200, 1, True)


def test_replica_with_another_form_of_times_does_no_harm():
    replicas = make_replicas(random.Random(1), has_texts=False, names=["a", "b"])
    replicas[1].objects[:] = [{"id": "file-b_1", "created_at": write_time(1)}]
    status, page = list_page(replicas, "/v1/files", limit=50)
    assert status == 200
    assert len(page["data"]) == len(replicas[0].objects) + 1


def test_place_in_an_empty_list_is_its_beginning():
    assert find_split([], "@5", "after") == 0
    assert find_split([], "file-1", "after") is None
