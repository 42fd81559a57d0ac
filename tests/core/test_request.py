from typing import get_args

from cllm.core.request import Priority, PriorityName


def test_each_priority_class_has_a_name_that_users_write() -> None:
    assert get_args(PriorityName) == tuple(priority.name.lower() for priority in Priority)
