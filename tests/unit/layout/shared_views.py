"""Tensors that lie in one memory, and the oracle of them: which address gets which byte of which tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch


def draw_views(chance: random.Random) -> list[torch.Tensor]:
    """Parts of one or two buffers, as models have them: rows, columns, the whole, transposed, of another dtype."""
    buffers = [torch.arange(float(48)).reshape(6, 8) + 100 * number for number in range(chance.randint(1, 2))]
    views = []
    for _ in range(chance.randint(1, 5)):
        view = chance.choice(buffers)
        for dim in range(2):
            start = chance.randrange(view.shape[dim])
            stop = chance.randint(start, view.shape[dim])
            if chance.random() < 0.6:
                view = view.narrow(dim, start, max(stop - start, chance.randrange(2)))
            if view.shape[dim] > 1 and chance.random() < 0.2:
                view = view[::2] if dim == 0 else view[:, ::2]
        form = chance.random()
        if form < 0.2:
            view = view.t()
        elif form < 0.4 and view.stride(1) == 1:
            view = view.view(chance.choice([torch.int32, torch.uint8]))
        elif form < 0.5 and view.is_contiguous():
            view = view.reshape(-1)
        views.append(view)
    return views


def bytes_by_address(view: torch.Tensor, values: torch.Tensor) -> dict[int, int]:
    """What each byte of a view is to be."""
    found = {}
    row, width = values.numpy().tobytes(), view.element_size()
    for at, index in enumerate(torch.cartesian_prod(*(torch.arange(n) for n in view.shape)).reshape(-1, view.ndim)):
        place = sum(int(i) * stride for i, stride in zip(index, view.stride(), strict=True))
        for byte in range(width):
            found[view.data_ptr() + place * width + byte] = row[at * width + byte]
    return found


def fit_together(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether each view can have its values: whether no byte is to be two things."""
    wanted: dict[int, int] = {}
    return all(
        wanted.setdefault(address, byte) == byte
        for view, one in zip(views, values, strict=True)
        for address, byte in bytes_by_address(view, one).items()
    )


def fills_or_refuses(
    fill: Callable[[], object],
    views: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    refusal: type[Exception],
    says: str,
) -> bool:
    """Whether ``fill`` gave each view its values; judges that it did, or refused, in such words, what does not fit."""
    try:
        fill()
    except refusal as raised:
        assert not fit_together(views, values)
        assert says in str(raised)
        return False
    assert all(torch.equal(view, one) for view, one in zip(views, values, strict=True))
    return True
