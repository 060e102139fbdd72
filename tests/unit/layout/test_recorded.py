"""Recorded loaders: random programs of views against running them on the values; what is no move is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import remesh
from remesh.foundation.errors import LayoutError
from remesh.layout.affine import find_runs, shards_of_runs
from remesh.layout.numbers import NumberedSources
from remesh.layout.recorded import Recorded, record

Step = Callable[[torch.Tensor], torch.Tensor]


def _steps(rng: random.Random, like: torch.Tensor) -> Step:
    """A random operation that moves the elements of a tensor of this shape, and may drop, repeat or pad some."""
    dim = rng.randrange(like.ndim)
    size = like.shape[dim]
    low = rng.randrange(size)
    high = rng.randint(low + 1, size)
    picked = [rng.randrange(size) for _ in range(rng.randint(1, 4))]
    order = rng.sample(range(like.ndim), like.ndim)
    choices: list[Step] = [
        lambda x: x.permute(order),
        lambda x: x.narrow(dim, low, high - low),
        lambda x: torch.cat(x.split(max(1, size // 2), dim)[::-1], dim),
        lambda x: x.chunk(2, dim)[0],
        lambda x: x.index_select(dim, torch.tensor(picked)),
        lambda x: torch.stack([x, x.clone()], dim),
        lambda x: x.flip(dim),
        lambda x: x.repeat_interleave(2, dim),
        lambda x: x.roll(1, dim),
        lambda x: torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [1, 2]),
        lambda x: x.unsqueeze(dim),
        lambda x: x.contiguous(),
        lambda x: x[(slice(None),) * dim + (slice(low, None, 2),)],
        lambda x: torch.as_tensor(x.numpy().copy()),
    ]
    if size % 2 == 0:
        choices.append(lambda x: x.unflatten(dim, (2, size // 2)).transpose(dim, dim + 1).flatten(dim, dim + 1))
        choices.append(lambda x: torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1))  # interleaved
    if like.ndim > 1:
        choices.append(lambda x: x.flatten(0, 1))
        choices.append(lambda x: x.reshape(-1, *x.shape[:-1]))
    return rng.choice(choices)


def _program(
    rng: random.Random, sources: dict[str, torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """A random program: a chain of steps for each of some results, of which a few join two sources."""
    chains: list[tuple[str, str | None, list[Step]]] = []
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(sources))
        other = rng.choice(list(sources)) if rng.random() < 0.4 else None
        at = _begin(sources, name, other)
        steps: list[Step] = []
        for _ in range(rng.randint(0, 5)):
            if at.ndim == 0 or not 0 < at.numel() < 400 or at.ndim > 5:
                break
            steps.append(_steps(rng, at))
            at = steps[-1](at)
        chains.append((name, other, steps))

    def run(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        made = []
        for name, other, steps in chains:
            at = _begin(given, name, other)
            for step in steps:
                at = step(at)
            made.append(at)
        return made

    return run


def _begin(given: dict[str, torch.Tensor], name: str, other: str | None) -> torch.Tensor:
    return given[name] if other is None else torch.cat([given[name].flatten(), given[other].flatten()])


def _load_of(program: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]]):
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for name, value in zip(into, program(given), strict=True):
            into[name].copy_(value)

    return load


def _filled(
    recorded: Recorded, values: dict[str, torch.Tensor], like: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    targets = {name: torch.zeros(one.shape) for name, one in like.items()}
    bound = recorded.bind(targets)
    remesh.reshard({name: values[name] for name in bound.pieces}, dict(bound.pieces))
    bound.copy()
    return targets


def _check_programs(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        shapes = [tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4))) for _ in range(rng.randint(1, 3))]
        values = {f"s{at}": torch.randn(shape) for at, shape in enumerate(shapes)}
        program = _program(rng, values)
        expected = {f"t{at}": one.clone() for at, one in enumerate(program(values))}
        recorded = record(
            _load_of(program), {name: one.shape for name, one in values.items()}, expected, may_lack=expected
        )
        found = _filled(recorded, values, expected)
        assert all(found[name].equal(expected[name]) for name in expected), (seed, shapes, recorded)


def test_what_random_programs_of_views_do_to_values_is_what_was_recorded() -> None:
    _check_programs(range(150))


@pytest.mark.slow
def test_what_many_random_programs_do_is_what_was_recorded() -> None:
    _check_programs(range(150, 6000))


def test_a_loader_that_writes_into_parts_of_its_targets_is_recorded() -> None:
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        into["w"][:, 0::2].copy_(given["gate"])  # interleaved
        into["w"].data[:, 1::2] = given["up"]
        into["rows"][torch.tensor([2, 0])] = given["gate"][:2]
        into["rows"][1].fill_(0)

    values = {"gate": torch.randn(4, 3), "up": torch.randn(4, 3)}
    targets = {"w": torch.zeros(4, 6), "rows": torch.zeros(3, 3)}
    recorded = record(load, dict.fromkeys(values, (4, 3)), targets)
    assert recorded.zeros == {"rows": 3} and not recorded.unused
    assert [len(recorded.places["w"][name]) for name in values] == [1, 1]
    expected = {name: torch.zeros(one.shape) for name, one in targets.items()}
    load(values, expected)
    found = _filled(recorded, values, targets)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_loaders_that_run_group_by_group_are_recorded_as_one() -> None:
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for name, one in given.items():
            layer, _, part = name.partition(".")
            into[layer].narrow(0, 3 * int(part), 3).copy_(one)

    shapes = {f"{layer}.{part}": (3, 2) for layer in "ab" for part in "01"}
    targets = {layer: torch.empty(6, 2, device="meta") for layer in "ab"}
    groups = [["a.0", "a.1"], ["b.0"], ["b.1"]]
    assert record(load, shapes, targets, groups=groups).places == record(load, shapes, targets).places


def test_of_a_source_only_what_is_read_gets_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    write = NumberedSources._write

    def counted(self: NumberedSources, to: torch.Tensor, index: torch.Tensor) -> None:
        made.append(to.numel())
        write(self, to, index)

    monkeypatch.setattr(NumberedSources, "_write", counted)
    targets = {"rows": torch.zeros(8, 16), "columns": torch.zeros(64, 2), "spread": torch.zeros(3, 64)}

    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        into["rows"].copy_(given["s"].chunk(8)[3])
        into["columns"].copy_(given["s"].chunk(8, 1)[5])
        into["spread"].copy_(given["s"][:, 0].expand(3, 64))

    record(load, {"s": (64, 16)}, targets)
    assert made == [128, 128, 64]


def test_a_source_that_the_loader_moves_within_itself_is_read_as_it_is_then() -> None:
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        given["s"][0].copy_(given["s"][1])
        torch.index_select(given["r"].clone(), 0, torch.tensor([2, 3, 0, 1]), out=given["r"])
        into["t"].copy_(torch.cat([given["s"], given["r"]]))

    values = {name: torch.randn(4, 2) for name in "sr"}
    targets = {"t": torch.zeros(8, 2)}
    found = _filled(record(load, dict.fromkeys(values, (4, 2)), targets), values, targets)
    s, r = values.values()
    assert found["t"].equal(torch.cat([s[[1, 1, 2, 3]], r[[2, 3, 0, 1]]]))


def test_targets_that_are_one_memory_are_filled_once() -> None:
    embed = torch.zeros(4, 2)
    targets = {"embed": embed, "head": embed}
    recorded = record(lambda given, into: into["embed"].copy_(given["e"]), {"e": (4, 2)}, targets)
    assert recorded.same_as == {"head": "embed"} and recorded.made_of("head") == {"e"}
    bound = recorded.bind(targets)
    assert not bound.copies and bound.pieces["e"].tensor.data_ptr() == embed.data_ptr()


def _swap(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    into["t"].copy_(given["s"].flip(0))


def _in_a_thread(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


REFUSED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], object], str]] = {
    "product": (lambda s, t: t.copy_(2 * s), "aten.mul"),
    "product in place": (lambda s, t: t.copy_(s.mul_(2)), "aten.mul_"),
    "sum": (lambda s, t: t.copy_(s + s.flip(0)), "aten.add"),
    "mean": (lambda s, t: t.copy_((s + s.flip(0)) // 2), "aten.add"),
    "matrix product": (lambda s, t: t.copy_(s @ s), "aten.mm"),
    "order by values": (lambda s, t: t.copy_(s.sort().values), "aten.sort"),
    "absolute values": (lambda s, t: t.copy_(s.abs()), "aten.abs"),
    "largest of two": (lambda s, t: t.copy_(torch.maximum(s, s.flip(0))), "aten.maximum"),
    "quantisation": (lambda s, t: t.copy_((s / s.abs().max()).to(torch.int8)), "aten.abs"),
    "sum past torch": (lambda s, t: t.copy_(torch.as_tensor(s.numpy() + 3)), "element \\(0, 0\\) of target 't' is"),
    "mean past torch": (lambda s, t: t.copy_(torch.as_tensor((s.numpy() + s.numpy()[::-1]) // 2)), "is computed"),
    "another constant": (lambda s, t: t.fill_(1), "is computed"),
    "zeros alone": (lambda s, t: t.zero_(), "'t' of shape \\(2, 2\\): 4"),
    "another thread": (lambda s, t: _in_a_thread(lambda: t.copy_(s.flip(0))), "'t' of shape"),
    "half": (lambda s, t: t[:1].copy_(s[:1]), "'t' of shape \\(2, 2\\): 2"),
    "own dtype": (lambda s, t: t.copy_(torch.empty(2, 2).copy_(s)), "dtype torch.float32 that the loader makes"),
    "lossy cast": (lambda s, t: t.copy_(s.to(torch.bfloat16).float()), "through torch.bfloat16, expected one cast"),
    "two casts": (lambda s, t: t.copy_(s.half().to(torch.float8_e4m3fn)), "to torch.float16 and then to"),
    "bytes": (lambda s, t: t.view(torch.uint8).copy_(s.view(torch.uint8).flip(1)), "is computed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_move_is_refused_by_name(what: str) -> None:
    load, told = REFUSED[what]
    with pytest.raises(LayoutError, match=told):
        record(
            lambda given, into: load(given["s"], into["t"]),
            {"s": (2, 2)},
            {"t": torch.zeros(2, 2)},
            dtypes={"s": torch.float32},
        )


def test_casts_that_lose_no_more_than_the_targets_own_are_told() -> None:
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        into["t"].copy_(given["s"].to(torch.float32).to(torch.float64))

    targets = {"t": torch.zeros(2, 2, dtype=torch.bfloat16)}
    recorded = record(load, {"s": (2, 2)}, targets, dtypes={"s": torch.bfloat16})
    assert recorded.casts == {"s": {"float32"}}


def test_an_index_that_the_loader_computes_is_no_computing_of_weights() -> None:
    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        order = (torch.arange(4) * 3 + 1) % 4
        into["t"].copy_(given["s"][order])

    recorded = record(load, {"s": (4, 2)}, {"t": torch.zeros(4, 2)})
    found = _filled(recorded, {"s": torch.arange(8.0).reshape(4, 2)}, {"t": torch.zeros(4, 2)})
    assert found["t"][:, 0].tolist() == [2, 0, 6, 4]


def test_targets_of_other_shapes_than_were_recorded_are_refused() -> None:
    recorded = record(_swap, {"s": (2, 2)}, {"t": torch.zeros(2, 2)})
    with pytest.raises(LayoutError, match=r"target 't' has shape \(2, 3\), expected \(2, 2\)"):
        recorded.bind({"t": torch.zeros(2, 3)})
    with pytest.raises(LayoutError, match="expected one of the recorded targets"):
        recorded.bind({"u": torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("moved", "num_boxes"),
    [
        (lambda x: x, 1),
        (lambda x: x.T, 1),
        (lambda x: x[:, 3:9], 1),
        (lambda x: x.reshape(4, 6, 10).transpose(1, 0, 2), 4),
        (lambda x: np.concatenate([x[12:], x[:12]]), 2),
        (lambda x: np.repeat(x, 2, axis=0), 2),
    ],
)
def test_the_boxes_of_usual_moves_are_few(moved, num_boxes: int) -> None:
    elements = np.ascontiguousarray(moved(np.arange(240).reshape(24, 10))).reshape(-1)
    shards = shards_of_runs(find_runs(elements, np.arange(len(elements))), (24, 10), "reading")
    assert len(shards) == num_boxes


def test_a_permutation_without_order_is_no_layout() -> None:
    order = np.random.default_rng(0).permutation(1 << 18)
    with pytest.raises(LayoutError, match=r"reading: a tensor of shape \(262144,\) lies there in \d+ boxes"):
        shards_of_runs(find_runs(order, np.arange(len(order))), (1 << 18,), "reading")
