"""A radix tree over token ids that finds the stored sequences with the same prefix, even inside an
edge.

After SGLang's RadixAttention (Zheng et al. 2024), with one difference: the tree stores whole paths
with their owners, not nodes with data of their own. So one call removes an owner, and no nodes have
to be merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Owner = TypeVar("Owner")
# the first token of an edge; at the root, (salt, token) if there is a salt
Key = int | tuple[str, int]


class Node(Generic[Owner]):
    """An edge and the subtree below it.

    ``owners`` are all owners whose paths contain the whole edge. ``key`` is the node's key in the
    parent's ``children``.
    """

    __slots__ = ("children", "edge", "key", "owners", "parent")

    def __init__(self, edge: Tokens, parent: Node[Owner] | None, key: Key) -> None:
        self.edge = edge
        self.parent = parent
        self.key = key
        self.children: dict[Key, Node[Owner]] = {}
        # a set with a fixed order, so that runs are reproducible
        self.owners: dict[Owner, None] = {}


class RadixTree(Generic[Owner]):
    """Paths of tokens and their owners, one path each. Paths with different salts share no prefix.

    Invariants: an owner of a node owns its parent; a node without owners is not in the tree;
    children of a node start with different tokens. Each call costs O(length of the path), compared
    in numpy, plus its number of edges.
    """

    def __init__(self) -> None:
        self._root: Node[Owner] = Node(np.zeros(0, np.int32), None, -1)
        self._ends: dict[Owner, Node[Owner]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def insert(self, tokens: Tokens, owner: Owner, salt: str = "") -> None:
        """Store a path for ``owner``. Raises ValueError if it already has one."""
        if owner in self._ends:
            raise ValueError(f"{owner!r} is already in the tree")
        node, at = self._root, 0
        while at < len(tokens):
            key = make_key(tokens, at, salt)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(tokens[at:].copy(), node, key)
                shared = len(child.edge)
            else:
                shared = common_prefix(child.edge, tokens[at:])
                if shared < len(child.edge):
                    child = self._split(child, shared)
            child.owners[owner] = None
            node, at = child, at + shared
        self._ends[owner] = node

    def _split(self, node: Node[Owner], length: int) -> Node[Owner]:
        """Split an edge in two; returns the new upper node."""
        assert node.parent is not None
        upper: Node[Owner] = Node(node.edge[:length], node.parent, node.key)
        upper.owners = dict(node.owners)
        node.parent.children[node.key] = upper
        node.edge, node.parent, node.key = node.edge[length:], upper, int(node.edge[length])
        upper.children[node.key] = node
        return upper

    def remove(self, owner: Owner) -> None:
        """Remove the path of ``owner``. Raises KeyError if it has none."""
        node: Node[Owner] | None = self._ends.pop(owner)
        while node is not None and node.parent is not None:
            del node.owners[owner]
            if not node.owners:
                del node.parent.children[node.key]
            node = node.parent

    def match(self, tokens: Tokens, salt: str = "") -> Iterator[tuple[Owner, int]]:
        """Yield (owner, number of shared tokens) for owners that share a prefix with ``tokens``,
        longest first.
        """
        path = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(make_key(tokens, at, salt))
            if child is None:
                break
            shared = common_prefix(child.edge, tokens[at:])
            node, at = child, at + shared
            path.append((node, at))
            if shared < len(child.edge):
                break
        seen: set[Owner] = set()
        for node, depth in reversed(path):
            for owner in node.owners:
                if owner not in seen:
                    seen.add(owner)
                    yield owner, depth

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        stack = [(self._root, set(self._ends))]
        while stack:
            node, allowed = stack.pop()
            assert node is self._root or node.owners, "a node without owners"
            assert node.owners.keys() <= allowed, "an owner of a node does not own its parent"
            for key, child in node.children.items():
                assert child.parent is node, "a child with two parents"
                assert child.key == key, "a child under a wrong key"
                assert child.edge[:1].tolist() == [key if isinstance(key, int) else key[1]], (
                    "the key differs from the edge's first token"
                )
                stack.append((child, set(self._ends) if node is self._root else set(node.owners)))


def make_key(tokens: Tokens, at: int, salt: str) -> Key:
    return (salt, int(tokens[0])) if salt and not at else int(tokens[at])


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of leading tokens that two arrays share."""
    length = min(len(a), len(b))
    differing = a[:length] != b[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length
