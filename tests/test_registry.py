"""The model that a name in a request means."""

from types import SimpleNamespace

import pytest

from cllm.errors import UnknownModel
from cllm.registry import MAX_NAME, Registry

ALIASES = ["gpt-4o", "claude-*", "org/m", "v[12]", "q?", "gpt-4o"]


def registry_of(model_name="tiny", aliases=ALIASES):
    service = SimpleNamespace(model_name=model_name)
    return Registry(service, aliases), service


@pytest.mark.parametrize("name", [None, "", "tiny", "tiny:latest"])
@pytest.mark.parametrize("aliases", [ALIASES, []])
def test_own_name_and_missing_name_select_the_default_model(name, aliases):
    registry, service = registry_of(aliases=aliases)
    assert registry.get(name) is service
    assert registry.get() is service


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_latest_is_optional_for_a_model_whose_name_has_it(name):
    registry, service = registry_of("tiny:latest")
    assert registry.get(name) is service


@pytest.mark.parametrize("name", ["gpt-4o", "claude-opus", "claude-", "org/m", "v1", "v2", "q8"])
def test_aliases_and_patterns_select_the_model(name):
    registry, service = registry_of()
    assert registry.get(name) is service


@pytest.mark.parametrize(
    "name",
    ["other", "Tiny", "tiny:q4", "gpt-4o:latest", "GPT-4o", "opus-claude-", "v3", "q", "q80"],
)
def test_unknown_name_is_rejected_with_the_served_name(name):
    registry, _ = registry_of()
    with pytest.raises(UnknownModel) as caught:
        registry.get(name)
    error = caught.value
    assert (error.asked, error.served) == (name, "tiny")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert str(error) == f"The model {name!r} does not exist; this server has 'tiny'."


def test_long_name_matches_no_pattern_and_is_truncated_in_the_error():
    registry, service = registry_of(aliases=["*"])
    assert registry.get("a" * MAX_NAME) is service
    with pytest.raises(UnknownModel) as caught:
        registry.get("a" * (MAX_NAME + 1))
    assert caught.value.asked == "a" * 100
    assert "a" * 101 not in str(caught.value)


def test_names_lists_the_model_and_its_aliases_without_patterns():
    registry, service = registry_of()
    assert registry.names == ["tiny", "gpt-4o", "org/m"]
    assert all(registry.get(name) is service for name in registry.names)
