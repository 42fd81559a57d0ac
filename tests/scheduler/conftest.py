"""Adds an option that rewrites the scenarios: ``pytest tests/scheduler --update-scenarios``. Then
review the diff.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-scenarios",
        action="store_true",
        help="rewrite the tables in tests/scheduler/scenarios",
    )


@pytest.fixture
def update_scenarios(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-scenarios", default=False))
