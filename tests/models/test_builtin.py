"""That the expected texts of the tests are those of the built-in model."""

from __future__ import annotations

import hashlib

import pytest
from conftest import BUILTIN_SHA256

pytestmark = pytest.mark.llama


def test_expected_texts_are_those_of_this_model(builtin_path):
    """Whoever trains it again looks at the expected texts, and then writes down the new hash."""
    assert hashlib.sha256(builtin_path.read_bytes()).hexdigest() == BUILTIN_SHA256
