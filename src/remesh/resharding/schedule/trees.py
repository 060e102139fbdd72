"""Trees and chains over receiver hosts by which bytes reach many hosts, in closed form.

Definitions. A *hop* is one sending from host to host. The *depth* of a set of hops is the number of hops on the
longest way to a receiver. A receiver is *interior* when it passes bytes on, else a *leaf*.

- *Chain*: owner, first receiver, second receiver, ... No host sends more than it takes; depth ``k``, ``k`` receivers.
  Chains of several owners to the same receivers begin at different receivers (`rotate`): as many owners as receivers
  make a ring in which every host takes and sends all of the time, and no pipeline has to fill.
- *Two trees*: halves of the bytes go through two binary trees. A receiver that is interior in one is a leaf in the
  other, so no host sends more than it takes either, and the depth is about ``log2(k)``.

With racks, receivers stand in the order of their racks, so that a chain enters each rack once.

Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hop:
    """One sending from host to host."""

    giver: str
    taker: str


def rotate(items: Sequence[T], by: int) -> tuple[T, ...]:
    """The items from number ``by`` on, around to the one before it."""
    by %= max(len(items), 1)
    return (*items[by:], *items[:by])


def chain_hops(owner: str, receivers: Sequence[str]) -> tuple[Hop, ...]:
    """The hops of a chain from host to host, in the order of ``receivers``."""
    return tuple(Hop(giver, taker) for giver, taker in zip((owner, *receivers[:-1]), receivers, strict=True))


def two_tree_hops(owner: str, receivers: Sequence[str]) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """Hops for the first and for the second half of the bytes.

    Receivers are numbered from 1. In an in-order binary tree all odd numbers are leaves. The second tree numbers them
    from the other end when their count is even, and one further when it is odd, which turns odd into even.
    """
    count = len(receivers)
    other = receivers[::-1] if count % 2 == 0 else rotate(receivers, -1)
    return tuple(_tree(owner, receivers, 1, count)), tuple(_tree(owner, other, 1, count))


def _tree(parent: str, receivers: Sequence[str], low: int, high: int) -> Iterator[Hop]:
    """Hops into numbers ``low .. high``, whose root is at the largest power of two that leaves it a left subtree."""
    if low > high:
        return
    root = low - 1 + (1 << ((high - low + 1).bit_length() - 1))
    host = receivers[root - 1]
    yield Hop(parent, host)
    yield from _tree(host, receivers, low, root - 1)
    yield from _tree(host, receivers, root + 1, high)


def depths_of(hops: Iterable[Hop]) -> dict[str, int]:
    """The number of hops from an owner to each receiver; hops are given in an order that can be carried out."""
    depth: dict[str, int] = {}
    for hop in hops:
        depth[hop.taker] = depth.get(hop.giver, 0) + 1
    return depth
