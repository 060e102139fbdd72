"""A stream without indices goes on at the sample where the job stands, whatever its dataset can do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from remesh.elasticity.training.reading import digest_of
from remesh.elasticity.training.sample_stream import Stream
from remesh.elasticity.typed_values import decode, encode
from remesh.foundation.errors import ConfigError

LENGTH = 7


class Plain:
    """Yields the same numbers in each epoch; knows nothing of positions."""

    num_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.num_begun += 1
        return iter(range(LENGTH))


class Shuffling:
    """Another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Stateful:
    """Goes on from its own state, which has a tensor in it."""

    def __init__(self) -> None:
        self.at = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            self.num_read += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


KINDS = (Plain, Shuffling, Stateful)


def whole(kind: type, num_epochs: int) -> list[int]:
    found = []
    for epoch in range(num_epochs):
        dataset = kind()
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        found += list(dataset)
    return found


@given(st.sampled_from(KINDS), st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["taken", "again", "new"]))))
def test_no_sample_is_lost_or_repeated_by_any_story(kind: type, story: list[tuple[int, str]]) -> None:
    stream, position, seen = Stream(kind()), 0, []
    for count, what in story:
        batch = list(stream.take(position, count, 4))
        if what == "again":  # it came to nothing: the same once more
            assert stream.take(position, count, 4) == batch
        if what == "new":  # another process, with the state that was carried before the batch was taken
            state = decode(encode("stream", stream.state_dict()))
            assert state["samples"] == position
            stream = Stream(kind())
            stream.load_state_dict(state)
            assert stream.take(position, count, 4) == batch
        seen += batch
        position += len(batch)
    assert seen == whole(kind, 4)[: len(seen)]
    assert len(seen) == min(sum(count for count, _ in story), 4 * LENGTH)


def test_a_dataset_with_state_reads_nothing_twice() -> None:
    stream = Stream(Stateful())
    assert [stream.take(at, 2, None) for at in (0, 2)] == [[0, 1], [2, 3]]
    other = Stateful()
    again = Stream(other)
    again.load_state_dict(stream.state_dict())
    assert again.take(2, 2, None) == [2, 3]
    assert other.num_read == 2


def test_a_plain_dataset_is_begun_anew_and_passed_over() -> None:
    dataset = Plain()
    assert Stream(dataset).take(9, 3, None) == [2, 3, 4]
    assert dataset.num_begun == 2


def test_batches_run_across_epochs_and_end_with_the_last() -> None:
    stream = Stream(Plain())
    assert stream.take(5, 4, 2) == [5, 6, 0, 1]
    assert stream.take(9, 9, 2) == [2, 3, 4, 5, 6]
    assert stream.take(14, 3, 2) == []


def test_what_is_no_stream_and_what_ends_too_early_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an iterable dataset, found int"):
        Stream(3)
    with pytest.raises(ConfigError, match="two epochs in a row were empty"):
        Stream([]).take(0, 1, None)
    with pytest.raises(ConfigError, match="at sample 20: it ended after 14"):
        Stream(Plain()).take(20, 1, 2)


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning")  # torchdata asks torch for all its names
def test_torchdatas_loader_goes_on_where_it_was() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata, of the extra test")
    make = lambda: Stream(stateful.StatefulDataLoader(list(range(20)), batch_size=None))  # noqa: E731
    stream = make()
    assert [stream.take(at, 6, None) for at in (0, 6)] == [list(range(6)), list(range(6, 12))]
    again = make()
    again.load_state_dict(decode(encode("stream", stream.state_dict())))
    assert again.take(6, 6, None) == list(range(6, 12))
    assert again.take(12, 10, None) == [*range(12, 20), 0, 1]


class Rank:
    """A stream as one of several ranks reads it: with random state of its own outside."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        torch.manual_seed(0)  # as every rank enters ``train``
        self.stream = Stream(make())
        self._seed = seed

    def take(self, position: int, count: int) -> list[int]:
        self._seed += 2
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        found = [int(sample) for sample in self.stream.take(position, count, None, seed=5)]
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "the program's state was touched"
        return found


class Numbers(torch.utils.data.IterableDataset[int]):
    """Shuffled by one of the process's generators, all at once or sample by sample."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        left = list(range(LENGTH))
        while left:
            yield left.pop(self._draw(len(left)))


class PythonsSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(order)


class OwnSampler(torch.utils.data.Sampler[int]):
    """From the operating system's chance."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(LENGTH).tolist())


def loader(**options: Any) -> Any:
    return torch.utils.data.DataLoader(list(range(LENGTH)), batch_size=None, **options)  # type: ignore[arg-type]


def stateful_loader(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata, of the extra test")
    return module.StatefulDataLoader(list(range(LENGTH)), batch_size=None, **options)


SHUFFLING = {
    "torch's loader": lambda: loader(shuffle=True),
    "a sampler by Python's chance": lambda: loader(sampler=PythonsSampler()),
    "sample by sample by torch's": lambda: Numbers(lambda n: int(torch.randint(n, ()))),
    "sample by sample by Python's": lambda: Numbers(random.randrange),
    "sample by sample by NumPy's": lambda: Numbers(lambda n: int(np.random.randint(n))),
    "a loader of an iterable": lambda: torch.utils.data.DataLoader(Numbers(random.randrange), batch_size=None),
    "torchdata's loader": lambda: stateful_loader(shuffle=True),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning")  # torchdata asks torch for all its names
@pytest.mark.parametrize("make", SHUFFLING.values(), ids=SHUFFLING)
def test_ranks_read_a_loader_that_shuffles_by_the_processs_chance_in_one_order(make: Callable[[], Any]) -> None:
    """Two ranks, seeded differently; a third comes in the middle of an epoch, by the carried state."""
    ranks = [Rank(make, seed) for seed in (0, 1001)]
    found: list[int] = []
    for position in range(0, 4 * LENGTH, 2):
        if position in (4, 16):
            late = Rank(make, 2002)
            late.stream.load_state_dict(decode(encode("stream", ranks[0].stream.state_dict())))
            ranks.append(late)
        batches = [rank.take(position, 2) for rank in ranks]
        assert all(batch == batches[0] for batch in batches), (position, batches)
        assert len({rank.stream.digest for rank in ranks}) == 1
        found += batches[0]
    epochs = [found[start : start + LENGTH] for start in range(0, 4 * LENGTH, LENGTH)]
    assert all(sorted(epoch) == list(range(LENGTH)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "every epoch has the same order"


def test_ranks_that_read_in_orders_of_their_own_have_different_digests() -> None:
    ranks = [Rank(lambda: loader(sampler=OwnSampler()), seed) for seed in range(8)]
    for rank in ranks:
        rank.take(0, LENGTH)
    assert len({rank.stream.digest for rank in ranks}) > 1


def test_a_stream_that_gives_another_order_than_before_is_refused_by_name() -> None:
    stream = Stream(loader(sampler=OwnSampler()))
    for position in range(0, 3 * LENGTH, LENGTH):
        stream.take(position, LENGTH, None)
    again = Stream(loader(sampler=OwnSampler()))
    again.load_state_dict(decode(encode("stream", stream.state_dict())))
    with pytest.raises(ConfigError, match="at sample 14: DataLoader with a OwnSampler gives other samples"):
        again.take(2 * LENGTH, LENGTH, None)


def test_a_checkpoint_without_a_digest_is_taken() -> None:
    stream = Stream(Plain())
    stream.load_state_dict({"samples": 4, "dataset": None})
    assert stream.take(4, 2, None) == [4, 5]


@dataclass
class Sample:
    name: str
    values: list[float]
    itself: Any = None


def samples() -> list[Any]:
    looped = Sample("a", [1.0])
    looped.itself = looped
    big = np.arange(100_000, dtype=np.int32)
    return [
        *(None, True, 1, 1.0, "1", b"1", [1], (1,), {"a": 1}, {"b": 1}, {1}, {2}, 2, -1, "\ud800", [1, 2], [2, 1]),
        *(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(2), torch.zeros(0)),
        *(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([True]), torch.zeros(3, 2).T, torch.ones(3, 2)),
        *(big, big + 1, big.astype(np.int64), big[::-1], np.array(["a"]), np.array(["b"]), np.array([{1: 2}])),
        *(Sample("a", [1.0]), Sample("b", [1.0]), Sample("a", [2.0]), looped, np.float32(3), list(range(9999))),
        *(torch.zeros(2).to_sparse(), torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)),
    ]


def test_samples_that_differ_have_digests_that_differ_and_equal_ones_have_equal_ones() -> None:
    first, second = ([digest_of(sample) for sample in samples()] for _ in range(2))
    assert first == second
    assert len(set(first)) == len(first)
    assert digest_of(1, digest_of(2)) != digest_of(2, digest_of(1))
