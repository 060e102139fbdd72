"""A stream without indices goes on at the sample where the job stands, whatever its dataset can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remesh.elastic.training.stream import Stream
from remesh.errors import ConfigError

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
            state = json.loads(json.dumps(stream.state_dict()))
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
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert again.take(6, 6, None) == list(range(6, 12))
    assert again.take(12, 10, None) == [*range(12, 20), 0, 1]
