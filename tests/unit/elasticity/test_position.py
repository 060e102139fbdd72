from collections import Counter

import pytest
from hypothesis import given, strategies as st

from remesh.elasticity.training.position import Position, derive_seed, plan_batch, plan_share
from remesh.foundation.errors import ConfigError


def stream(num_samples: int, batch_size: int, num_epochs: int, sizes: list[int]) -> list[int]:
    """What all ranks fetch together when the number of data-parallel ranks changes from batch to batch."""
    fetched: list[int] = []
    position = Position()
    while True:
        batch = plan_batch(position, num_samples=num_samples, batch_size=batch_size, seed=7, num_epochs=num_epochs)
        if not batch:
            return fetched
        dp_size = sizes[position.step % len(sizes)]
        for dp_rank in range(dp_size):
            share = plan_share(batch, dp_rank=dp_rank, dp_size=dp_size)
            fetched += share.indices if share.weight else ()
        position = position.after(len(batch))


@given(
    num_samples=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    num_epochs=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_every_sample_is_seen_once_per_epoch_on_any_sequence_of_meshes(
    num_samples: int, batch_size: int, num_epochs: int, sizes: list[int]
) -> None:
    fetched = stream(num_samples, batch_size, num_epochs, sizes)
    for epoch in range(num_epochs):
        seen = Counter(fetched[epoch * num_samples : (epoch + 1) * num_samples])
        assert seen == Counter(range(num_samples))


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_order_of_samples_does_not_depend_on_the_mesh(sizes: list[int]) -> None:
    assert stream(23, 5, 2, sizes) == stream(23, 5, 2, [1])


@given(num_batch=st.integers(1, 30), dp_size=st.integers(1, 12))
def test_weights_turn_the_mean_over_ranks_into_the_mean_over_the_batch(num_batch: int, dp_size: int) -> None:
    batch = [3 * i + 1 for i in range(num_batch)]
    shares = [plan_share(batch, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    mean_over_ranks = sum(sum(s.indices) / len(s.indices) * s.weight for s in shares) / dp_size
    assert mean_over_ranks == pytest.approx(sum(batch) / num_batch)


def test_each_epoch_has_its_own_order() -> None:
    first = plan_batch(Position(), num_samples=50, batch_size=50, seed=1, num_epochs=None)
    second = plan_batch(Position(1, 50), num_samples=50, batch_size=50, seed=1, num_epochs=None)
    assert sorted(first) == sorted(second)
    assert first != second


def test_order_is_pinned_so_that_old_checkpoints_go_on_with_the_same_samples() -> None:
    assert plan_batch(Position(), num_samples=8, batch_size=8, seed=0, num_epochs=1) == (7, 1, 6, 3, 4, 0, 5, 2)
    assert derive_seed(0, 1, 2) == 6892990246117180931


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        plan_batch(Position(), num_samples=0, batch_size=4, seed=0, num_epochs=None)
