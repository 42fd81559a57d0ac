"""Replicas of a cluster, started as users start them."""

import pytest
from server.conftest import starter

start_server = pytest.fixture(starter)
start_server_once = pytest.fixture(starter, scope="module")
