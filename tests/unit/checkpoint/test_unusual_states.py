"""States as models and libraries of others make them: each value comes back as it was, or is refused by its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import remesh
from remesh.checkpoint.checkpoint_errors import CheckpointMismatchError
from remesh.checkpoint.run import load_requests
from remesh.checkpoint.values.nests import diff
from remesh.foundation.errors import Error
from tests.profiles import seeds

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that some of them are to go

_WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "of two": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "a TwoTensor, which is made of other tensors"),
    "parameter of two": (lambda: torch.nn.Parameter(TwoTensor(torch.ones(2, 3), torch.ones(2, 3))), "a TwoTensor"),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(3)), "a FakeTensor, without values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "it is nested"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "it is nested",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "it is not initialised yet"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "of layout torch.sparse_coo"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the device meta"),
}


@pytest.mark.parametrize("kind", _WITHOUT_MEMORY)
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, reason = _WITHOUT_MEMORY[kind]
    with pytest.raises(Error, match=f"tensor 'of.strangers': .*{reason}"):
        remesh.save({"of": {"strangers": make()}, "other": torch.ones(1)}, tmp_path / "new")
    remesh.save({"of": {"strangers": torch.ones(3)}}, tmp_path / "plain")
    with pytest.raises(Error, match=f"tensor 'of.strangers': .*{reason}"):
        remesh.load({"of": {"strangers": make()}}, tmp_path / "plain")


def test_a_class_of_tensors_that_has_memory_of_its_own_comes_back(tmp_path: Path) -> None:
    class Marked(torch.Tensor):
        pass

    remesh.save(
        {"v": torch.arange(6.0).reshape(2, 3).as_subclass(Marked), "b": torch.nn.Buffer(torch.ones(2))}, tmp_path
    )
    loaded = remesh.load({"v": torch.zeros(2, 3).as_subclass(Marked), "b": torch.nn.Buffer(torch.zeros(2))}, tmp_path)
    assert type(loaded["v"]) is Marked
    assert loaded["v"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["b"].tolist() == [1, 1]


def test_integers_of_a_quantized_tensor_are_not_read_under_another_scale(tmp_path: Path) -> None:
    def by_tensor(scale: float, value: float = 1) -> torch.Tensor:
        return torch.quantize_per_tensor(torch.full((4,), float(value)), scale, 0, torch.quint8)

    def by_channel(scale: float, value: float = 1) -> torch.Tensor:
        scales = torch.tensor([scale, 1.0])
        return torch.quantize_per_channel(
            torch.full((2, 2), float(value)), scales, torch.zeros(2, dtype=torch.int64), 0, torch.qint8
        )

    for number, make in enumerate((by_tensor, by_channel)):
        remesh.save({"v": make(0.25)}, tmp_path / str(number))
        loaded = remesh.load({"v": make(0.25, 2)}, tmp_path / str(number))
        assert torch.equal(loaded["v"].dequantize(), make(0.25).dequantize())
        for wrong in (make(0.5), make(0.25).dequantize()):
            with pytest.raises(Error, match=r"a chunk of tensor 'v' .* stored quantized .*0\.25.* to be filled is"):
                remesh.load({"v": wrong}, tmp_path / str(number))


def test_a_view_of_conjugates_is_saved_as_it_looks_and_is_not_filled(tmp_path: Path) -> None:
    values = torch.complex(torch.arange(3.0), torch.ones(3))
    remesh.save({"c": values.conj(), "n": values.conj().imag}, tmp_path)
    loaded = remesh.load({"c": torch.zeros(3, dtype=torch.complex64), "n": torch.zeros(3)}, tmp_path)
    assert torch.equal(loaded["c"], values.conj())
    assert loaded["n"].tolist() == [-1, -1, -1]
    for name, view in (("c", torch.zeros_like(values).conj()), ("n", torch.zeros_like(values).conj().imag)):
        with pytest.raises(Error, match=f"tensor '{name}': it shows the "):
            remesh.load({name: view}, tmp_path)


@pytest.mark.parametrize("wrap", [lambda one: (one, 1), lambda one: SimpleNamespace(a=one)])
def test_a_part_of_a_tensor_is_not_saved_as_common_data(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    """Only the first rank's would be there."""
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    with pytest.raises(Error, match="holds a DTensor in a tuple or another object"):
        remesh.save({"v": wrap(part)}, tmp_path / "new")
    remesh.save({"v": wrap(torch.ones(2))}, tmp_path / "plain")


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(Error, match="could not be loaded again"):
        remesh.save({"names": np.array(["a", 1], dtype=object)}, tmp_path / "new")
    remesh.save({"names": np.array(["a", "b"])}, tmp_path / "plain")
    assert remesh.load({"names": 0}, tmp_path / "plain")["names"].tolist() == ["a", "b"]


class _Unwilling:
    def __reduce__(self) -> str:
        raise ValueError("not in this state")


def _loop() -> tuple[list[Any]]:
    inner: list[Any] = []
    inner.append((inner,))
    return (inner,)


_REFUSED: dict[str, tuple[Any, str]] = {
    "class": (Fraction(1, 3), r"common data at 'args\.1\.deep': it holds instances of fractions\.Fraction"),
    "raises": (
        _Unwilling(),
        r"common data at 'args\.1\.deep': expected values that can be pickled, found: not in this",
    ),
    "itself": (_loop(), r"common data at 'args\.1\.deep': a value holds itself"),
    "key": ({Fraction(1, 3): 1}, r"common data: it holds instances of fractions\.Fraction"),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_value_that_is_refused_is_told_with_its_place(kind: str, tmp_path: Path) -> None:
    value, told = _REFUSED[kind]
    with pytest.raises(CheckpointMismatchError, match=told):
        remesh.save({"args": ["a", {"deep": value}], "w": torch.ones(2)}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_quantized_tensor_is_refused_in_the_background_alone(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.quint8)
    with pytest.raises(CheckpointMismatchError, match=r"one of shape \(6,\) is quantized .*save without background"):
        remesh.save({"q": quantized}, tmp_path / "behind", background=True)
    remesh.save({"q": quantized}, tmp_path / "at once")


_CLASHING: dict[str, dict[Any, Any]] = {
    "number and text": {0: torch.ones(1), "0": 5},
    "dot": {"a.b": torch.ones(1), "a": {"b": 3}},
    "nest and value": {0: {"t": torch.ones(1)}, "0": 5},
    "empty": {"a.b": torch.ones(1), "a": []},
}


@pytest.mark.parametrize("kind", _CLASHING)
def test_a_value_under_the_name_of_a_tensor_is_refused_when_it_is_saved(kind: str, tmp_path: Path) -> None:
    """The state could not be asked for again: one of both would be of the wrong kind."""
    with pytest.raises(Error, match="has the name '[0ab.]+', under which there is a tensor as well"):
        remesh.save(_CLASHING[kind], tmp_path)


def test_an_empty_text_is_a_key_like_any_other(tmp_path: Path) -> None:
    remesh.save({"": torch.ones(2), "a": {"": 3, "b": torch.ones(1)}}, tmp_path)
    loaded = remesh.load({"": torch.zeros(2), "a": {"": 0, "b": torch.zeros(1)}}, tmp_path)
    assert loaded[""].tolist() == [1, 1] and loaded["a"][""] == 3
    with pytest.raises(Error, match="not in the checkpoint, 'a.c.'"):
        remesh.load({"a": {"c": {"": 0}}}, tmp_path)


def test_keys_come_in_the_order_of_the_request_then_of_the_checkpoint(tmp_path: Path) -> None:
    """A program that walks over two dicts side by side would pair what does not belong together."""
    remesh.save({"x": 1, "w": torch.ones(1), "y": {"n": 2, "t": torch.ones(1), "m": 3}, "z": 4}, tmp_path)
    loaded = remesh.load({"w": torch.zeros(1), "y": {"m": 0, "t": torch.zeros(1), "n": 0}, "x": 0}, tmp_path)
    assert [*loaded] == ["w", "y", "x", "z"]
    assert [*loaded["y"]] == ["m", "t", "n"]


def test_values_in_lists_come_back_at_their_places(tmp_path: Path) -> None:
    saved = {"l": [torch.ones(1), 3, {"t": torch.ones(2), "x": 4}], "d": {"l": [{"t": torch.ones(1)}, 5]}, "n": [6]}
    remesh.save(saved, tmp_path / "a")
    assert remesh.load({}, tmp_path / "a") == {"l": {1: 3, 2: {"x": 4}}, "d": {"l": {1: 5}}, "n": [6]}
    assert remesh.load({"l": [torch.zeros(1), 0, {"t": torch.zeros(2), "x": 0}]}, tmp_path / "a")["l"][1] == 3
    assert remesh.load({"l": [torch.zeros(1), 0, {"x": 0}]}, tmp_path / "a")["l"][2] == {"x": 4}
    assert remesh.load({"d": {"l": [{}, 0]}}, tmp_path / "a", strict=False)["d"]["l"] == [{}, 5]
    remesh.save({"l": [{"w": torch.ones(1)}, {"w": torch.ones(1), "count": 7}]}, tmp_path / "b")
    other = {"l": [{"w": torch.zeros(1), "count": 0}, {"w": torch.zeros(1), "count": 1}]}
    with pytest.raises(Error, match="1 keys that are asked for are not in the checkpoint, 'l.0.count'"):
        remesh.load(other, tmp_path / "b")
    found = remesh.load(other, tmp_path / "b", strict=False)["l"]
    assert [one["count"] for one in found] == [0, 7] and all(one["w"] == 1 for one in found)


@pytest.mark.parametrize("asked", [[torch.zeros(1)], [torch.zeros(1), 0], [torch.zeros(1), {"x": 0}, 0]])
def test_a_list_of_another_form_is_told(tmp_path: Path, asked: list[Any]) -> None:
    remesh.save({"l": [torch.ones(1), {"x": 1}, 5, 6]}, tmp_path)
    with pytest.raises(Error, match="'l|at l:"):
        remesh.load({"l": asked}, tmp_path) if len(asked) > 1 else remesh.load({"l": [*asked, 0, 0, 0, 7]}, tmp_path)


def test_lists_that_an_earlier_release_has_saved_in_order_are_read(tmp_path: Path) -> None:
    """``golden/lists_in_order`` was written when what is left of a list had no places."""
    golden = Path(__file__).parent / "golden" / "lists_in_order"

    def asked(**others: Any) -> dict[str, Any]:
        zeros = torch.zeros
        groups = [{"lr": zeros(()), "eps": 0.0}, {"lr": zeros(()), "eps": 0.0}]
        inner = {"l": [{"t": zeros(1)}, 0, {"u": zeros(2)}]}
        return {"l": [zeros(2), 0, {"t": zeros(3), "x": 0}], "d": inner, "groups": groups, **others}

    found = remesh.load(asked(), golden)
    assert found["l"][1] == 3 and found["l"][2]["x"] == 4 and found["l"][2]["t"].tolist() == [0, 1, 2]
    assert found["d"]["l"][1] == 5 and found["n"] == [6, [7]]
    assert [group["eps"] for group in found["groups"]] == [1.0, 2.0]
    assert remesh.load({}, golden) == {"d": {}, "n": [6, [7]]}
    for strict in (True, False):
        with pytest.raises(Error, match="list 'l' is asked for with 1 of the 2 tensors .* saved without their places"):
            remesh.load({"l": [torch.zeros(2), 0, {"x": 0}]}, golden, strict=strict)
    remesh.save(found, tmp_path / "new")
    assert remesh.load({}, tmp_path / "new")["d"]["l"] == {1: 5}


def _random_nest(chance: random.Random, depth: int) -> Any:
    """With tensors, values, and containers of either, of both and of none."""
    kind = chance.choice("tttvvvdle" if depth else "dl")
    if depth > 3 or kind in "tv":
        return torch.full((2,), chance.random()) if kind == "t" else chance.choice([1, "a", None, 2.5, (1, 2)])
    if kind == "e":
        return chance.choice([dict, list])()
    inner = [_random_nest(chance, depth + 1) for _ in range(chance.randint(1, 4))]
    return inner if kind == "l" else {f"k{at}": one for at, one in enumerate(inner)}


def _emptied(nest: Any) -> Any:
    if isinstance(nest, torch.Tensor):
        return torch.zeros_like(nest)
    if isinstance(nest, dict):
        return {key: _emptied(one) for key, one in nest.items()}
    return [_emptied(one) for one in nest] if isinstance(nest, list) else f"not {nest}"


@pytest.mark.parametrize("seed", seeds(400, quick=40))
def test_whatever_was_saved_comes_back_as_it_was(tmp_path: Path, seed: int) -> None:
    nest = {"state": _random_nest(random.Random(seed), 0)}
    remesh.save(nest, tmp_path)
    found = remesh.load(_emptied(nest), tmp_path)
    assert diff(nest, found) == ([], [], [])


def test_a_state_of_many_lists_is_loaded_without_a_look_at_all_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: names that are compared with the beginning of another one."""
    state = {f"b{at}": [torch.zeros(1), at] for at in range(400)}
    remesh.save(state, tmp_path)
    looked_at = 0
    below = load_requests._below

    def counting(name: str, stored: Any) -> list[str]:
        nonlocal looked_at
        looked_at += 1
        return below(name, stored)

    monkeypatch.setattr(load_requests, "_below", counting)
    assert remesh.load({key: [torch.ones(1), 0] for key in state}, tmp_path)["b7"] == [torch.zeros(1), 7]
    assert not looked_at


@pytest.mark.parametrize("make", [dict, list])
def test_a_state_that_holds_itself_is_refused(make: type, tmp_path: Path) -> None:
    inner: Any = make()
    state = {"t": torch.ones(1), "inner": inner}
    if isinstance(inner, dict):
        inner["outer"] = state
    else:
        inner.append(inner)
    with pytest.raises(Error, match="holds itself"):
        remesh.save(state, tmp_path)


@pytest.mark.parametrize("background", [False, True])
def test_storages_can_be_resized_after_a_save_and_a_load(tmp_path: Path, background: bool) -> None:
    """As FSDP and offloading do it: what NumPy has seen of a tensor never lets its storage go."""
    state = {
        "one": torch.arange(300.0),
        "columns": torch.arange(90_000.0).reshape(300, 300).t(),
        "large": torch.arange(1 << 18),
        "bfloat16": torch.ones(3, 5, dtype=torch.bfloat16)[:, 2:],
        "complex": torch.ones(3, dtype=torch.complex64),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 2),
    }
    remesh.save(state, tmp_path / "c", background=background).result()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    remesh.load(state, tmp_path / "c")
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
        tensor.untyped_storage().resize_(0)
