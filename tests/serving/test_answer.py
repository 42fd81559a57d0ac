"""Requests as the engine gets them."""

from random import Random

import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import AdapterFile
from cllm.serving.adapter_use import AdapterUse
from cllm.serving.answer import SchedulingOptions, make_request

OPTIONS = SchedulingOptions(cache_salt="salt")


def request(prompt, use):
    return make_request("R", prompt, SamplingParams(), OPTIONS, use)


def use_of(invocation):
    return AdapterUse.of({"late": 1.0}, {"late": AdapterFile("1", invocation)})


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ([1, 2, 3, 4], 1),
        ([1, 2, 3, 2, 3, 5], 3),  # the last invocation counts
        ([9, 9, 2, 3], 2),
        ([512, 768], None),  # the bytes are there, but not the tokens
        ([2, 4, 3], None),
        ([2], None),
    ],
)
def test_activated_adapter_begins_at_its_last_invocation(prompt, begin):
    assert use_of((2, 3)).find_begin(prompt) == begin
    made = request(prompt, use_of((2, 3)))
    assert made.num_base_tokens == (begin or 0)
    assert made.cache_salt == "salt"
    assert bool(made.adapters) == (begin is not None)


def test_prompt_that_begins_with_the_invocation_shares_nothing_with_the_base():
    made = request([2, 3, 4], use_of((2, 3)))
    assert (made.num_base_tokens, bool(made.adapters)) == (0, True)
    assert made.cache_salt not in ("", "salt")


def test_invocation_is_found_in_random_prompts():
    random = Random(1)
    for _ in range(2000):
        values = [0, 1, 256, 65536, 16777216]
        prompt = [random.choice(values) for _ in range(random.randint(1, 30))]
        wanted = [random.choice(values) for _ in range(random.randint(1, 3))]
        places = [i for i in range(len(prompt)) if prompt[i : i + len(wanted)] == wanted]
        assert use_of(tuple(wanted)).find_begin(prompt) == max(places, default=None)


def test_adapters_are_part_of_what_results_are_stored_under():
    from cllm.process.results import digest

    greedy = SamplingParams(temperature=0)
    uses = [
        AdapterUse(),
        use_of((2, 3)),
        AdapterUse.of({"late": 0.5}, {"late": AdapterFile("1", (2, 3))}),
    ]
    keys = {digest(make_request("R", [1, 2, 3], greedy, OPTIONS, use)) for use in uses}
    assert len(keys) == 3
