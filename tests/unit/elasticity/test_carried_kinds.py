"""All that torch's programs carry beside a model: it goes on as if nothing had happened, or is refused by its name.

The oracle is the program that was never interrupted. State goes the way that it goes between ranks: as JSON.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import lr_scheduler

from remesh.elasticity.training_state import CarriedState
from remesh.elasticity.typed_values import decode, encode, find_difference
from remesh.foundation.errors import ConfigError

Build = Callable[[], dict[str, Any]]
STEPS, LOST_AT = 12, 4


def carry_over(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Fill new objects with what the old ones hold, as a new generation does."""
    before, after = CarriedState(old), CarriedState(new)
    held = before.hold(LOST_AT, LOST_AT, 0)
    after.allocate(held.pieces.keys())
    assert after.tensors().keys() == held.pieces.keys()
    for name, tensor in after.tensors().items():
        tensor.copy_(before.tensors()[name])
    after.set_values(json.loads(json.dumps(held.values)))


def train(objects: dict[str, Any], steps: range) -> list[float]:
    """A loop of steps; the loss of each, and the rate."""
    model, optim = objects["model"], objects["optim"]
    told = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if (scheduler := objects.get("scheduler")) is not None:
            takes_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss.item()) if takes_metric else scheduler.step()
        told += [loss.item(), float(optim.param_groups[0]["lr"]), float(optim.param_groups[0].get("momentum", 0))]
    return told


def goes_on_as_before(build: Build) -> None:
    calm, hurt = build(), build()
    train(calm, range(LOST_AT))
    train(hurt, range(LOST_AT))
    new = build()
    carry_over(hurt, new)
    assert train(new, range(LOST_AT, STEPS)) == train(calm, range(LOST_AT, STEPS))


def make(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    return {"model": model, "optim": optimizer(model.parameters(), **options)}


def chain(optim: torch.optim.Optimizer, kind: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optim, 0.5, 3), lr_scheduler.MultiStepLR(optim, [2, 4], 0.5)]
    return kind(parts) if kind is lr_scheduler.ChainedScheduler else kind(optim, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optim: lr_scheduler.LambdaLR(optim, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda optim: lr_scheduler.MultiplicativeLR(optim, lambda epoch: 0.9),
    "StepLR": lambda optim: lr_scheduler.StepLR(optim, 3),
    "MultiStepLR": lambda optim: lr_scheduler.MultiStepLR(optim, [2, 6, 6, 9]),
    "ConstantLR": lambda optim: lr_scheduler.ConstantLR(optim, 0.3, 6),
    "LinearLR": lambda optim: lr_scheduler.LinearLR(optim, 0.1),
    "ExponentialLR": lambda optim: lr_scheduler.ExponentialLR(optim, 0.8),
    "SequentialLR": lambda optim: chain(optim, lr_scheduler.SequentialLR),
    "PolynomialLR": lambda optim: lr_scheduler.PolynomialLR(optim, 9, 2.0),
    "CosineAnnealingLR": lambda optim: lr_scheduler.CosineAnnealingLR(optim, 7),
    "ChainedScheduler": lambda optim: chain(optim, lr_scheduler.ChainedScheduler),
    "ReduceLROnPlateau": lambda optim: lr_scheduler.ReduceLROnPlateau(optim, patience=1, threshold=0.5),
    "CyclicLR": lambda optim: lr_scheduler.CyclicLR(optim, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda optim: lr_scheduler.CosineAnnealingWarmRestarts(optim, 3),
    "OneCycleLR": lambda optim: lr_scheduler.OneCycleLR(optim, 0.2, total_steps=20),
    "SWALR": lambda optim: torch.optim.swa_utils.SWALR(optim, 0.05, anneal_epochs=6),
}
RATE = {"lr": 0.02}
OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
REFUSED = {"LBFGS": "missing 1 required positional argument: 'closure'", "SparseAdam": "does not support dense"}


def test_the_lists_of_this_file_have_all_that_torch_has() -> None:
    schedulers = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler)
    }
    assert schedulers - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()
    optimizers = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    assert optimizers - {"Optimizer"} == {*OPTIMIZERS, *REFUSED}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(kind: str, rate: str) -> None:
    def build() -> dict[str, Any]:
        objects = make(torch.optim.SGD, lr=0.1 if rate == "number" else torch.tensor(0.1), momentum=0.9)
        return {**objects, "scheduler": SCHEDULERS[kind](objects["optim"])}

    goes_on_as_before(build)
    CarriedState(build()).prove()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(kind: str) -> None:
    def build() -> dict[str, Any]:
        return make(getattr(torch.optim, kind), **RATE)

    goes_on_as_before(build)
    fresh = build()
    weights = copy.deepcopy(fresh["model"].state_dict())
    CarriedState(fresh).prove()
    assert bool(fresh["optim"].state) == (kind == "Adagrad")  # which makes them itself
    assert fresh["optim"].param_groups[0]["lr"] == RATE["lr"]
    assert all(torch.equal(one, weights[name]) for name, one in fresh["model"].state_dict().items())


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_whose_moments_cannot_be_made_is_refused_before_the_first_step(kind: str) -> None:
    objects = make(getattr(torch.optim, kind), lr=0.02)
    with pytest.raises(ConfigError, match=f"{kind} cannot make its moments .*{REFUSED[kind]}"):
        CarriedState(objects).prove()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as those that shard or average keep."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class OwnLists(torch.optim.Optimizer):
    """Momentum by hand, in a list beside the parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.momenta: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        self.momenta = self.momenta or [torch.zeros_like(one) for one in parameters]
        for one, momentum in zip(parameters, self.momenta, strict=True):
            if one.grad is not None:
                one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=self.param_groups[0]["lr"])


class OwnCount(torch.optim.SGD):
    """A counter that only its own state_dict has."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


class LateMoments(torch.optim.SGD):
    """A moment that comes at the second step only, so that no empty step makes it."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if state.get("momentum_buffer") is not None and parameter.grad is not None:
                state["slow"] = torch.ones_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Wrapper, "keeps the state of another optimizer, Adam, in its attribute 'inner'"),
        (OwnLists, r"keeps a tensor of shape \(6, 6\), as large as a parameter, in its attribute 'momenta'"),
        (OwnCount, "keeps 'count' in its state_dict as well"),
    ],
)
def test_an_optimizer_that_keeps_state_elsewhere_is_refused_by_name(kind: Any, words: str) -> None:
    objects = make(kind, lr=0.1)
    state = CarriedState(objects)
    with pytest.raises(ConfigError, match=f"carrying optimizer 'optim': {kind.__name__} {words}"):
        state.prove()
        train(objects, range(1))
        state.check_kept()


def test_a_moment_that_an_empty_step_does_not_make_is_missed() -> None:
    old, new = make(LateMoments, lr=0.1, momentum=0.9), make(LateMoments, lr=0.1, momentum=0.9)
    train(old, range(2))
    names = CarriedState(old).tensors().keys()
    after = CarriedState(new)
    after.allocate(names)
    with pytest.raises(ConfigError, match=r"LateMoments made .* expected 'optim.state.model.0.weight.slow' as well"):
        after.check_made(names)


class WithExtra(nn.Linear):
    """A layer with a counter and a table beside its tensors, as those that quantise have."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.amax = {1: (0.5, torch.ones(2))}

    def get_extra_state(self) -> Any:
        return {"amax": self.amax}

    def set_extra_state(self, state: Any) -> None:
        self.amax = state["amax"]


def test_extra_state_of_modules_is_carried() -> None:
    old, new = nn.Sequential(WithExtra(), WithExtra()), nn.Sequential(WithExtra(), WithExtra())
    old[1].amax = {2: (0.25, torch.tensor([3.0, 4.0])), 3: (1, torch.zeros(0))}
    carry_over({"model": old}, {"model": new})
    assert new[1].amax.keys() == {2, 3} and new[1].amax[2][0] == 0.25
    assert torch.equal(new[1].amax[2][1], old[1].amax[2][1]) and type(new[1].amax[3][0]) is int
    assert torch.equal(new[0].weight, old[0].weight)


class Metric:
    """As those of torchmetrics: sums in tensors, and what was seen in lists."""

    def __init__(self) -> None:
        self.state = {"total": torch.tensor(0.0), "count": torch.tensor(0), "seen": [torch.ones(2)], "best": None}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_with_small_tensors_in_its_state_is_carried() -> None:
    old, new = Metric(), Metric()
    old.state = {"total": torch.tensor(1.5), "count": torch.tensor(3), "seen": [torch.ones(2)] * 3, "best": (1, {2})}
    carry_over({"metric": old}, {"metric": new})
    assert torch.equal(new.state["total"], torch.tensor(1.5)) and new.state["count"].dtype == torch.int64
    assert len(new.state["seen"]) == 3 and new.state["best"] == (1, {2})


class MetricModule(nn.Module):
    """As torchmetrics has them: a module whose sums are plain attributes, in its state_dict only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.is_persistent = torch.tensor(0.0), False

    def persistent(self, mode: bool) -> None:
        self.is_persistent = mode

    def state_dict(self, *given: Any, prefix: str = "", **options: Any) -> Any:  # type: ignore[override]
        told = super().state_dict(*given, prefix=prefix, **options)
        if self.is_persistent:
            told[f"{prefix}total"] = self.total
        return told

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        if self.is_persistent:
            self.total = state.pop(f"{prefix}total")


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_metric_that_is_a_module_is_carried_or_refused_and_never_lost(is_nested: bool) -> None:
    old, new = MetricModule(), MetricModule()
    with pytest.raises(ConfigError, match=r"carrying 'metric': its state_dict is empty.*persistent"):
        CarriedState({"metric": old}).prove()
    for one in (old, new):
        one.persistent(True)
    old.total = torch.tensor(2.5)
    carry_over(
        {"metric": nn.ModuleDict({"a": old}) if is_nested else old},
        {"metric": nn.ModuleDict({"a": new}) if is_nested else new},
    )
    assert torch.equal(new.total, torch.tensor(2.5))


class Forgetful(Metric):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {**state, "best": None}


def test_an_object_that_does_not_take_what_it_gives_is_refused_by_name() -> None:
    old = Forgetful()
    CarriedState({"metric": old}).prove()
    old.state["best"] = 3
    with pytest.raises(ConfigError, match=r"carrying 'metric': .*\['best'\] is 3 and None"):
        CarriedState({"metric": Forgetful()}).set_values(CarriedState({"metric": old}).values())


class Converted(nn.Linear):
    """Its state_dict has another tensor than its parameter."""

    def state_dict(self, *given: Any, **options: Any) -> Any:
        return {name: one.half() for name, one in super().state_dict(*given, **options).items()}


def test_a_module_whose_state_dict_is_not_its_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="carrying 'model': its state_dict has 'weight'"):
        CarriedState({"model": Converted(2, 2)}).tensors()


# --- values ---

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
NUMBERS = st.sampled_from(
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.arange(3), np.zeros((2, 0)), np.array(2.5)]
)
TENSORS = st.sampled_from(
    [torch.tensor(1.5), torch.zeros(0, 3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([True]), torch.float16]
)
VALUES = st.recursive(
    SCALARS | NUMBERS | TENSORS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda one: defaultdict(list, one)),
        st.lists(inner, max_size=3).map(lambda one: deque(one, 5)),
        st.sets(KEYS, max_size=3),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return [*map(repr, one)] == [*map(repr, other)] and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) or one == other


@given(VALUES)
def test_values_come_back_equal_and_of_their_types(value: Any) -> None:
    text = encode("x", value)
    assert text.isascii()
    assert same(decode(json.loads(json.dumps(text))), value)
    assert encode("x", decode(text)) == text


class Level(int):
    """Its numbers would come back as plain ones."""


@pytest.mark.parametrize("strange", [lambda: 0, Level(3), nn.Linear(1, 1), object(), torch.zeros(1 << 19), {1: print}])
def test_what_would_not_come_back_is_refused_with_its_place(strange: Any) -> None:
    with pytest.raises(ConfigError, match=r"carrying thing\['deep'\]\[1\]"):
        encode("thing", {"deep": [1, strange]})
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(ConfigError, match="refer to themselves"):
        encode("thing", deep)


def test_the_difference_of_two_values_is_named_by_its_place() -> None:
    one, other = {"a": [1, {"b": (2, 3)}]}, {"a": [1, {"b": (2, 4)}]}
    assert "['b']" in find_difference(encode("x", one), encode("x", other))
