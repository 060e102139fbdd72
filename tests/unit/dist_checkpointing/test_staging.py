"""Copies for a background save: of any form, and in memory that is used again only when it was given back."""

from __future__ import annotations

import torch

from remesh.dist_checkpointing.staging import Staging


def test_copies_are_equal_and_their_own() -> None:
    originals = [
        torch.arange(7.0),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(True),
        torch.zeros(0, 4, dtype=torch.int8),
        torch.arange(5).to(torch.bfloat16)[::2],
    ]
    expected = [one.clone() for one in originals]
    copies = Staging().copy(originals)
    for one in originals:
        one.zero_()
    assert all(torch.equal(found, wanted) for found, wanted in zip(copies.tensors, expected, strict=True))
    assert all(found.is_contiguous() for found in copies.tensors)


def test_memory_is_used_again_only_when_it_was_given_back() -> None:
    staging = Staging()
    first, second = staging.copy([torch.ones(100)]), staging.copy([torch.ones(100)])
    assert first.buffer.data_ptr() != second.buffer.data_ptr()
    staging.give_back(first)
    third = staging.copy([torch.full((90,), 2.0)])
    assert third.buffer.data_ptr() == first.buffer.data_ptr()
    assert second.tensors[0].eq(1).all()
    staging.give_back(third)
    assert staging.copy([torch.ones(10)]).buffer.numel() < 100, "a small save does not hold a large buffer"
    staging.give_back(second)
    staging.release()
    assert staging.copy([torch.ones(100)]).buffer.data_ptr() != second.buffer.data_ptr()
