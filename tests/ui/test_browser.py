"""Without Chromium, the tests of the page must not be missed in CI."""

from __future__ import annotations

import pytest
from ui.conftest import find_chromium


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CI", "CLLM_TESTS_WITHOUT_BROWSER"):
        monkeypatch.delenv(name, raising=False)


def test_page_tests_fail_in_ci_without_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make browser"):
        find_chromium("/nowhere")


@pytest.mark.parametrize("variables", [(), ("CI", "CLLM_TESTS_WITHOUT_BROWSER")])
def test_page_tests_are_skipped_where_no_browser_can_be_fetched(
    monkeypatch: pytest.MonkeyPatch, variables: tuple[str, ...]
) -> None:
    for name in variables:
        monkeypatch.setenv(name, "1")
    with pytest.raises(pytest.skip.Exception, match="make browser"):
        find_chromium("/nowhere")


def test_fetched_browser_is_found(tmp_path) -> None:
    path = tmp_path / "chrome"
    path.touch()
    assert find_chromium(str(path)) == str(path)
