"""Which of many token sequences begin like this one? A radix tree over token ids that matches inside an edge.

After SGLang's RadixAttention (Zheng et al. 2024), with one difference: what is stored are whole paths and their
owners, not nodes with data of their own, so an owner leaves with one call and nothing has to be merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Owner = TypeVar("Owner")


class Node(Generic[Owner]):
    """An edge and what lies below it. ``owners`` are all whose paths lead through the whole edge."""

    __slots__ = ("children", "edge", "owners", "parent")

    def __init__(self, edge: Tokens, parent: Node[Owner] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, Node[Owner]] = {}
        self.owners: dict[Owner, None] = {}  # a set that keeps its order, so that runs can be repeated


class RadixTree(Generic[Owner]):
    """Paths of tokens and their owners, one path each.

    Invariants: an owner of a node owns its parent; a node without owners is not in the tree; children of a node begin
    with different tokens. Cost of each call: the length of the path, compared in numpy, and its number of edges.
    """

    def __init__(self) -> None:
        self._root: Node[Owner] = Node(np.zeros(0, np.int32), None)
        self._ends: dict[Owner, Node[Owner]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def insert(self, tokens: Tokens, owner: Owner) -> None:
        """Raises ValueError if ``owner`` has a path already."""
        if owner in self._ends:
            raise ValueError(f"{owner!r} is in the tree")
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = Node(tokens[at:].copy(), node)
                node.children[int(tokens[at])] = child
                shared = len(child.edge)
            else:
                shared = common_prefix(child.edge, tokens[at:])
                if shared < len(child.edge):
                    child = self._split(child, shared)
            child.owners[owner] = None
            node, at = child, at + shared
        self._ends[owner] = node

    def _split(self, node: Node[Owner], length: int) -> Node[Owner]:
        """Cut an edge in two; returns the new upper node."""
        assert node.parent is not None
        upper: Node[Owner] = Node(node.edge[:length], node.parent)
        upper.owners = dict(node.owners)
        upper.children[int(node.edge[length])] = node
        node.parent.children[int(node.edge[0])] = upper
        node.edge, node.parent = node.edge[length:], upper
        return upper

    def remove(self, owner: Owner) -> None:
        """Raises KeyError if ``owner`` has no path."""
        node: Node[Owner] | None = self._ends.pop(owner)
        while node is not None and node.parent is not None:
            del node.owners[owner]
            if not node.owners:
                del node.parent.children[int(node.edge[0])]
            node = node.parent

    def match(self, tokens: Tokens) -> Iterator[tuple[Owner, int]]:
        """Owners whose paths begin like ``tokens``, with the number of tokens shared; the longest first."""
        path = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
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

    def num_distinct(self, lengths: Mapping[Owner, int]) -> int:
        """Tokens among the first ``lengths[owner]`` of the owners' paths, those on common parts of them once."""
        counts: dict[int, int] = {}
        for owner, length in lengths.items():
            node, nodes = self._ends[owner], []
            while node.parent is not None:
                nodes.append(node)
                node = node.parent
            left = length
            for node in reversed(nodes):
                counts[id(node)] = max(counts.get(id(node), 0), min(left, len(node.edge)))
                left = max(0, left - len(node.edge))
        return sum(counts.values())

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        stack = [(self._root, set(self._ends))]
        while stack:
            node, allowed = stack.pop()
            assert node is self._root or node.owners, "a node without owners"
            assert node.owners.keys() <= allowed, "an owner of a node does not own its parent"
            for first, child in node.children.items():
                assert child.parent is node, "a child of two"
                assert child.edge[:1].tolist() == [first], "a child under a wrong token"
                stack.append((child, set(self._ends) if node is self._root else set(node.owners)))


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that two arrays share."""
    length = min(len(a), len(b))
    differing = a[:length] != b[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length
