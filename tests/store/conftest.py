"""A store that works in the test's own thread."""

import pytest
from store_parts import opened


@pytest.fixture
def store(tmp_path):
    with opened(tmp_path) as store:
        yield store
