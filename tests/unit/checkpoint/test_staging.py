"""Copies for a background save: of any form, in memory that is used again only when it was given back, and capped."""

from __future__ import annotations

import threading

import pytest
import torch

from remesh.checkpoint.background.staging import Buffer, Copies, StagingBuffers
from remesh.checkpoint.checkpoint_errors import CheckpointingException


def test_copies_are_equal_and_their_own() -> None:
    originals = [
        torch.arange(7.0),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(True),
        torch.zeros(0, 4, dtype=torch.int8),
        torch.arange(5).to(torch.bfloat16)[::2],
    ]
    expected = [one.clone() for one in originals]
    copies = StagingBuffers().copy(originals)
    for one in originals:
        one.zero_()
    assert all(torch.equal(found, wanted) for found, wanted in zip(copies.tensors, expected, strict=True))
    assert all(found.is_contiguous() for found in copies.tensors)


def buffer_of(copies: Copies) -> Buffer:
    assert copies.buffer is not None
    return copies.buffer


def test_memory_is_used_again_only_when_it_was_given_back() -> None:
    staging = StagingBuffers()
    first, second = staging.copy([torch.ones(100)]), staging.copy([torch.ones(100)])
    assert buffer_of(first) is not buffer_of(second)
    staging.give_back(first)
    staging.give_back(first)
    third = staging.copy([torch.full((90,), 2.0)])
    assert buffer_of(third) is buffer_of(first)
    assert second.tensors[0].eq(1).all()
    staging.give_back(third)
    assert buffer_of(staging.copy([torch.ones(10)])).num_bytes < 100, "a small save does not hold a large buffer"
    staging.give_back(second)
    staging.release()
    assert buffer_of(staging.copy([torch.ones(100)])) is not buffer_of(second)


def test_what_is_in_use_is_counted_until_it_is_given_back_or_forgotten() -> None:
    staging = StagingBuffers()
    first, second = staging.copy([torch.ones(16)]), staging.copy([torch.ones(32)])
    assert staging.used_bytes == 192
    staging.give_back(second)
    assert staging.used_bytes == 64
    del first
    assert staging.used_bytes == 0


def test_a_save_beyond_the_cap_waits_for_those_before_it() -> None:
    staging = StagingBuffers(max_bytes=1000)
    first = staging.copy([torch.ones(200)])
    copied = threading.Event()

    def copy_one_more() -> None:
        staging.copy([torch.ones(200)])
        copied.set()

    waiting = threading.Thread(target=copy_one_more)
    waiting.start()
    assert not copied.wait(0.05)
    staging.give_back(first)
    waiting.join(100)
    assert copied.is_set()


def test_a_save_that_never_fits_is_told_at_once() -> None:
    with pytest.raises(CheckpointingException, match="they have 4032 bytes, expected at most 1000"):
        StagingBuffers(max_bytes=1000).copy([torch.ones(1000)])
