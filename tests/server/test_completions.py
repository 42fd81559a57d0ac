"""OpenAI's completions through the real client, with the options of evaluation harnesses and
editors.
"""

import math

import openai
import pytest

pytestmark = pytest.mark.llama

TEXT = "Once there was a clever fox"


@pytest.fixture(scope="module")
def ask(client):
    model = client.models.list().data[0].id

    def ask(prompt=TEXT, *, extra=None, **params):
        return client.completions.create(
            model=model,
            prompt=prompt,
            **{"temperature": 0, "max_tokens": 8, **params},
            extra_body=extra,
        )

    return ask


@pytest.fixture(scope="module")
def encode(builtin_server):
    return lambda text: builtin_server.client.post("/encode", json={"text": text}).json()["tokens"]


def check_aligned(text, logprobs, start=0):
    """Check that the tokens spell the text from the character ``start`` on, and that their offsets
    are right.
    """
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("<|") or text[offset:].startswith(token)
    assert "".join(token for token in logprobs.tokens if not token.startswith("<|")) == text[start:]


def test_logprobs_describe_each_generated_token(ask):
    """With greedy sampling each token is the most probable one; all lists have the same length."""
    choice = ask(logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) > 2
    check_aligned(choice.text, logprobs)
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == max(top.values()) == logprob <= 0
        assert sum(map(math.exp, top.values())) <= 1.0001


def test_sampled_token_is_reported_beyond_the_top_logprobs(ask):
    """At a high temperature most sampled tokens are not among the most probable. With logprobs 0
    only the sampled token is reported.
    """
    logprobs = (
        ask(logprobs=2, temperature=50, seed=1, extra={"top_k": 0, "min_p": 0}, top_p=1)
        .choices[0]
        .logprobs
    )
    assert {2, 3} >= {len(top) for top in logprobs.top_logprobs}
    assert all(
        token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )
    assert all(len(top) == 1 for top in ask(logprobs=0).choices[0].logprobs.top_logprobs)


def test_streamed_logprobs_equal_whole_ones(ask):
    """Offsets continue from chunk to chunk."""
    whole = ask(logprobs=2, echo=True, n=2).choices
    for i in range(2):
        text, tokens, values, offsets = "", [], [], []
        for chunk in ask(logprobs=2, echo=True, n=2, stream=True):
            choice = chunk.choices[0]
            if choice.index == i:
                text += choice.text
                if choice.logprobs:
                    tokens += choice.logprobs.tokens
                    values += choice.logprobs.token_logprobs
                    offsets += choice.logprobs.text_offset
        assert text == whole[i].text
        assert tokens == whole[i].logprobs.tokens
        assert offsets == whole[i].logprobs.text_offset
        assert values[0] is None
        assert values[1:] == pytest.approx(whole[i].logprobs.token_logprobs[1:], abs=1e-3)


def test_echo_reports_logprobs_of_the_prompt(ask, encode):
    """max_tokens 0 returns the prompt only. A continuation has the same logprobs in the prompt as
    when it was generated.
    """
    written = ask(logprobs=0).choices[0]
    whole = TEXT + written.text
    scored = ask(encode(whole), echo=True, logprobs=1, max_tokens=0)
    choice = scored.choices[0]
    assert choice.text == whole
    assert choice.finish_reason == "length"
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens) == (0, len(encode(whole)))
    check_aligned(whole, choice.logprobs)
    assert choice.logprobs.token_logprobs[0] is None
    count = len(written.logprobs.tokens)
    assert choice.logprobs.tokens[-count:] == written.logprobs.tokens
    assert choice.logprobs.token_logprobs[-count:] == pytest.approx(
        written.logprobs.token_logprobs, abs=0.02
    )
    for value, top in zip(
        choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert value in top.values()


def test_cached_prompt_has_the_same_logprobs(ask):
    """The second request finds the prompt in the cache and reports the same logprobs."""
    prompts = [f"{TEXT} and a wise owl", f"{TEXT} and a grey wolf"]
    first = ask(prompts, echo=True, logprobs=2, max_tokens=1)
    again = ask(prompts, echo=True, logprobs=2, max_tokens=1)
    for one, other in zip(first.choices, again.choices, strict=True):
        assert one.logprobs.tokens == other.logprobs.tokens
        assert one.logprobs.token_logprobs[1:] == pytest.approx(
            other.logprobs.token_logprobs[1:], abs=0.02
        )


def test_expected_continuation_scores_higher(ask, encode):
    """This is how evaluation harnesses compare two endings."""

    def score(prompt, ending):
        logprobs = (
            ask(prompt + ending, echo=True, logprobs=1, max_tokens=1)
            .choices[0]
            .logprobs.token_logprobs
        )
        return sum(logprobs[len(encode(prompt)) : len(encode(prompt + ending))])

    for prompt in (TEXT, "Once there was a wise owl"):
        right = ask(prompt, max_tokens=5).choices[0].text
        assert score(prompt, right) > score(prompt, " 7+ zebra =")


def test_echo_puts_the_prompt_before_the_text(ask, encode):
    """Streamed or not, also for token ids and for several prompts."""
    alone = ask().choices[0].text
    assert ask(echo=True).choices[0].text == TEXT + alone
    assert ask(encode(TEXT), echo=True).choices[0].text == TEXT + alone
    assert "".join(chunk.choices[0].text for chunk in ask(echo=True, stream=True)) == TEXT + alone
    assert [c.text for c in ask([TEXT, "Two"], echo=True, max_tokens=0).choices] == [TEXT, "Two"]


def test_best_of_returns_the_most_probable_choices(ask):
    """They are ordered by mean logprob. The usage counts all candidates."""
    params = {
        "temperature": 3.0,
        "seed": 5,
        "top_p": 1,
        "max_tokens": 6,
        "extra": {"top_k": 0, "min_p": 0, "ignore_eos": True},
    }
    every = ask(n=6, logprobs=0, **params)
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in every.choices}
    found = ask(n=2, best_of=6, **params)
    assert [choice.text for choice in found.choices] == sorted(means, key=means.get, reverse=True)[
        :2
    ]
    assert [choice.index for choice in found.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in found.choices)
    assert found.usage.completion_tokens == every.usage.completion_tokens


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"suffix": " end"}, "suffix"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"extra": {"mirostat": 1}}, "mirostat"),
        ({"extra": {"min_tokens": 9}}, "min_tokens"),
        ({"extra": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra": {"cache_salt": ""}}, "cache_salt"),
        (
            {"extra": {"dry_multiplier": 1.0, "dry_sequence_breakers": ["zq\u00e9j9x"]}},
            "dry_sequence_breakers",
        ),
        ({"extra": {"dry_sequence_breakers": ["a"] * 17}}, "dry_sequence_breakers"),
    ],
)
def test_unsupported_combination_is_rejected_with_the_field(ask, params, param):
    """The error names the field."""
    with pytest.raises(openai.BadRequestError) as refused:
        ask(**params)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "extra",
    [
        {"typical_p": 0.4},
        {"top_n_sigma": 0.7},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": [" "]},
    ],
)
def test_each_sampling_extension_changes_the_text_reproducibly(ask, extra):
    """The same seed gives the same text again."""

    def text(seed, extra):
        params = {"temperature": 1.5, "top_p": 1, "max_tokens": 40, "logprobs": 0}
        extra = {"top_k": 0, "min_p": 0, "ignore_eos": True, **extra}
        return ask("Count from 3 to 30.", seed=seed, extra=extra, **params).choices[0].text

    assert text(1, extra) == text(1, extra)
    assert any(text(seed, extra) != text(seed, {}) for seed in range(3))


def test_min_tokens_delays_the_end_and_stop_strings_can_be_included(ask):
    stop = ask(max_tokens=3).choices[0].text[-1]
    early = ask(stop=[stop], max_tokens=20)
    late = ask(stop=[stop], max_tokens=20, extra={"min_tokens": 10})
    assert late.usage.completion_tokens > 10 > early.usage.completion_tokens
    kept = ask(stop=[stop], max_tokens=20, extra={"include_stop_str_in_output": True})
    assert kept.choices[0].text == early.choices[0].text + stop


def test_cache_salt_separates_prefix_caches(ask):
    """A request with another salt, or without one, reuses nothing."""
    text = "Repeat: apple bird bread bridge brown cake chair child cloud cow " * 3
    found = [
        ask(
            text, extra={"cache_salt": salt} if salt else {}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("one", "two", "", "one", "two", "")
    ]
    assert found[:3] == [0, 0, 0]
    assert min(found[3:]) > 10


def test_suffix_makes_a_fill_in_the_middle_prompt(start_server, tiny_model):
    """The prompt is: prefix token, prefix, suffix token, suffix, middle token. Control tokens in
    the texts stay plain text.
    """
    server = start_server(str(tiny_model("gemma3")))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def num_tokens(prompt, suffix):
            usage = client.completions.create(
                model=model, prompt=prompt, suffix=suffix, max_tokens=1
            ).usage
            return usage.prompt_tokens

        def encode(text):
            return server.client.post("/encode", json={"text": text}).json()["tokens"]

        assert num_tokens("hello", " there") == len(encode("hello")) + len(encode(" there")) + 3
        assert num_tokens(encode("hello"), "") == len(encode("hello")) + 3
        assert num_tokens("<|im_end|>", "") > len(encode("<|im_end|>")) + 3
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=model, prompt="a", suffix="b", echo=True, logprobs=1)
    assert refused.value.param == "logprobs"


def test_echo_counts_control_tokens_in_the_text(ask, encode):
    """They are written out there; in the text of token ids they are not."""
    prompt = "<|im_start|>user\nhéllo 😀<|im_end|>\n<|im_start|>assistant\n"
    choice = ask(prompt, echo=True, logprobs=1, max_tokens=3).choices[0]
    assert choice.text.startswith(prompt)
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert choice.logprobs.text_offset[-3] == len(prompt)
    tokens = encode(prompt)
    choice = ask(tokens, echo=True, logprobs=1, max_tokens=3).choices[0]
    assert "<|im_start|>" not in choice.text
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        hidden = token.startswith(("<|im_", "bytes:"))
        assert hidden or choice.text[offset:].startswith(token)
