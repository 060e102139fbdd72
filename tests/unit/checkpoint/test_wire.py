"""Messages to a worker process: tensors come back as they were, whatever libraries do to torch."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest
import torch

from remesh.checkpoint.background.worker_messages import Channel

TENSORS = [
    torch.arange(6.0).reshape(2, 3).T,
    torch.tensor(3, dtype=torch.int64),
    torch.zeros(0, 4, dtype=torch.bfloat16),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([True, False]),
]


def test_tensors_travel_without_what_torch_unpickles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_library(content: bytes) -> None:
        raise AssertionError("a worker would import the library for this")

    if hasattr(torch.storage, "_load_from_bytes"):
        monkeypatch.setattr(torch.storage, "_load_from_bytes", of_a_library)
    sender, receiver = map(Channel, Pipe())
    sender.send({"tensors": TENSORS, "step": 3})
    got = receiver.receive()
    assert got["step"] == 3
    for one, sent in zip(got["tensors"], TENSORS, strict=True):
        assert one.dtype == sent.dtype and one.shape == sent.shape and torch.equal(one, sent)
    got["tensors"][0].zero_()  # they may be written to
    for end in (sender, receiver):
        end.close()
