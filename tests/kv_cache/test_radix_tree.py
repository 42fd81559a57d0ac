"""The radix tree finds the same matches as a comparison with every path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.kv_cache.radix_tree import Node, RadixTree, common_prefix

# few tokens and short runs, so that paths share prefixes, diverge, contain and repeat one another
paths = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=5).map(
    lambda runs: [token for token, count in runs for _ in range(count)]
)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def count_common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def make_tree(**tokens: list[int]) -> RadixTree[str]:
    tree: RadixTree[str] = RadixTree()
    for owner, path in tokens.items():
        tree.insert(array(path), owner)
    tree.check()
    return tree


def test_longest_match_comes_first():
    """Every owner that shares a token is listed once, with the number of shared tokens."""
    tree = make_tree(a=[1, 2, 3], b=[1, 2, 3, 4, 5], c=[1, 9], d=[8])
    assert list(tree.match(array([1, 2, 3, 4, 7]))) == [("b", 4), ("a", 3), ("c", 1)]
    assert list(tree.match(array([1, 2]))) == [("a", 2), ("b", 2), ("c", 1)]
    assert list(tree.match(array([7]))) == list(tree.match(array([]))) == []


def test_match_may_end_inside_edge():
    """A long path is one edge, and any part of it is found."""
    tree = make_tree(a=list(range(100)))
    assert [list(tree.match(array([*range(n), 777]))) for n in (1, 50, 99)] == [
        [("a", 1)],
        [("a", 50)],
        [("a", 99)],
    ]


def test_removed_path_is_not_found():
    """It leaves no owner and no node behind."""
    tree = make_tree(a=[1, 2, 3], b=[1, 2, 4])
    tree.remove("a")
    assert list(tree.match(array([1, 2, 3]))) == [("b", 2)]
    tree.remove("b")
    tree.check()
    assert len(tree) == len(tree._root.children) == 0


def test_owner_has_one_path():
    """A second path for an owner, or removing an unknown owner, raises an error and changes
    nothing.
    """
    tree = make_tree(a=[1, 2])
    with pytest.raises(ValueError, match="'a' is already in the tree"):
        tree.insert(array([5]), "a")
    with pytest.raises(KeyError):
        tree.remove("b")
    assert list(tree.match(array([5]))) == []
    assert len(tree) == 1


def test_tree_copies_its_paths():
    """Later changes of the caller's array do not change the tree."""
    tree, tokens = RadixTree(), array([1, 2, 3])
    tree.insert(tokens, "a")
    tokens[:] = 9
    assert list(tree.match(array([1, 2, 3]))) == [("a", 3)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree, node: node.owners.clear(),
        lambda tree, node: node.owners.update(z=None),
        lambda tree, node: node.children[3].owners.update(b=None, c=None),
        lambda tree, node: setattr(node.children[3], "edge", array([])),
        lambda tree, node: setattr(node.children[3], "edge", array([4])),
        lambda tree, node: setattr(node.children[3], "parent", Node(array([1]), None, 1)),
    ],
    ids=[
        "no owner",
        "a stranger",
        "not the parent's",
        "an empty edge",
        "a wrong token",
        "a wrong parent",
    ],
)
def test_check_detects_broken_invariants(damage):
    """Each test case breaks one invariant."""
    tree = make_tree(a=[1, 2, 3], b=[1, 2, 4], c=[7])
    damage(tree, tree._root.children[1])
    with pytest.raises(AssertionError):
        tree.check()


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix_counts_like_a_loop(a, b):
    """The vectorised comparison counts like a loop."""
    assert common_prefix(array(a), array(b)) == count_common(a, b)


class TreeMachine(RuleBasedStateMachine):
    """Inserts, removes and matches at random, and compares the tree with a dict of paths that is
    searched path by path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[int] = RadixTree()
        self.paths: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 9), path=paths)
    def insert(self, owner: int, path: list[int]) -> None:
        if owner in self.paths:
            with pytest.raises(ValueError, match="is already in the tree"):
                self.tree.insert(array(path), owner)
        else:
            self.tree.insert(array(path), owner)
            self.paths[owner] = path

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.paths)))
        self.tree.remove(owner)
        del self.paths[owner]

    @rule(tokens=paths)
    def match(self, tokens: list[int]) -> None:
        found = list(self.tree.match(array(tokens)))
        shared = {owner: count_common(path, tokens) for owner, path in self.paths.items()}
        assert sorted(found) == sorted((owner, count) for owner, count in shared.items() if count)
        assert [count for _, count in found] == sorted((count for _, count in found), reverse=True)

    @invariant()
    def keeps_invariants(self) -> None:
        self.tree.check()
        assert len(self.tree) == len(self.paths)


TestRadixTree = TreeMachine.TestCase
