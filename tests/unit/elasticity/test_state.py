import json
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remesh
from remesh.elasticity.gradients import find_unlike
from remesh.elasticity.training_state import CarriedState
from remesh.foundation.errors import ConfigError


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9))


def take_step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).square().sum().backward()
    optim.step()
    optim.zero_grad()


def test_allocating_moments_moves_no_parameter_and_keeps_rates() -> None:
    model, optim = make(0)
    before = [parameter.clone() for parameter in model.parameters()]
    CarriedState({"model": model, "optim": optim}).allocate({"optim.state.model.0.weight.exp_avg": None})
    assert optim.state
    assert optim.param_groups[0]["lr"] == 0.1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("is_some", [False, True])
@pytest.mark.parametrize("fails", ["gradients", "moments"])
def test_an_optimizer_without_memory_for_its_moments_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, fails: str, is_some: bool
) -> None:
    """What is made last is refused: the rate must not stay 0, nor gradients of zeros, nor a part of the moments."""
    model, optim = make(0)
    gradients = [torch.full_like(parameter, 2.0) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    state, real, left = CarriedState({"model": model, "optim": optim}), torch.zeros_like, [3]

    def refuse(like: torch.Tensor, **options: Any) -> torch.Tensor:
        is_counted = ("memory_format" in options) == (fails == "moments")
        left[0] -= is_counted
        if is_counted and left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(like, **options)

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "zeros_like", refuse)
        wanted = {f"optim.state.{name}.exp_avg" for name in state.tensors()}
        state.make({state.unit_of(name) for name in wanted}) if is_some else state.allocate(wanted)
    assert optim.param_groups[0]["lr"] == 0.1 and not optim.state
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_state_put_into_fresh_objects_makes_them_go_on_as_the_old_ones() -> None:
    old_model, old_optim = make(0)
    for _ in range(3):
        take_step(old_model, old_optim)
    old_optim.param_groups[0]["lr"] = 0.05
    old = CarriedState({"model": old_model, "optim": old_optim})
    new_model, new_optim = make(1)
    new = CarriedState({"model": new_model, "optim": new_optim})
    new.allocate(old.tensors())
    assert new.tensors().keys() == old.tensors().keys()
    for name, tensor in new.tensors().items():
        tensor.copy_(old.tensors()[name])
    new.set_values(old.values())
    assert new_optim.param_groups[0]["betas"] == (0.8, 0.9)
    for model, optim in ((old_model, old_optim), (new_model, new_optim)):
        torch.manual_seed(5)
        take_step(model, optim)
    for name, tensor in new.tensors().items():
        assert torch.equal(tensor, old.tensors()[name]), name


def test_buffers_are_carried_and_names_follow_the_parameters() -> None:
    model, optim = make(0)
    take_step(model, optim)
    names = CarriedState({"model": model, "optim": optim}).tensors().keys()
    assert {"model.1.running_mean", "optim.state.model.0.weight.exp_avg", "optim.state.model.1.bias.step"} <= names


def test_optimizer_without_its_model_is_refused() -> None:
    _, optim = make(0)
    with pytest.raises(ConfigError, match="carry its model in the same call"):
        CarriedState({"optim": optim}).values()
        CarriedState({"optim": optim}).tensors()


def test_objects_without_state_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="carrying 'thing'.*found int"):
        CarriedState({"thing": 3})


def add_up(model: nn.Module) -> None:
    model(torch.randn(4, 3)).square().sum().backward()


def test_gradients_that_wait_for_more_are_state_and_those_used_up_are_not() -> None:
    model, optim = make(0)
    state = CarriedState({"model": model, "optim": optim})
    add_up(model)
    state.gradients.keep()
    assert "model.0.weight.grad" in state.tensors()
    kept = state.tensors()["model.0.weight.grad"].clone()
    add_up(model)  # the batch after: it may come to nothing
    assert torch.equal(state.tensors()["model.0.weight.grad"], kept)
    optim.step()
    state.gradients.keep()  # used up, and set to zero only when the next batch begins
    assert not any(name.endswith(".grad") for name in state.tensors())
    for fused in (False, True):  # a fused step tells nobody that it writes
        optim = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        state = CarriedState({"model": model, "optim": optim})
        add_up(model)
        optim.step()
        state.gradients.keep()
        assert not state.gradients.is_accumulating
    state = CarriedState({"model": model})  # a step by hand
    add_up(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    state.gradients.keep()
    assert not state.gradients.is_accumulating


@pytest.mark.parametrize("seed", range(20))
def test_each_gradient_waits_until_an_optimizer_of_its_own_parameter_steps(seed: int) -> None:
    """Optimizers of several layers with periods of their own, weights clipped in place; what was kept is added to."""
    chance = random.Random(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(chance.randint(2, 4))))
    optims = {f"optim{at}": torch.optim.SGD(layer.parameters(), lr=0.1) for at, layer in enumerate(model)}
    periods = {name: chance.randint(1, 5) for name in optims}
    zeroes_at_once = {name: chance.random() < 0.5 for name in optims}
    state = CarriedState({"model": model, **optims})
    added: dict[str, torch.Tensor] = {}
    for commit in range(1, 13):
        for at, (name, period) in enumerate(periods.items()):
            if (commit - 1) % period == 0:
                optims[name].zero_grad()
                for key in [key for key in added if key.startswith(f"model.{at}.")]:
                    del added[key]
        for path, parameter in model.named_parameters():
            new = torch.rand_like(parameter)
            parameter.grad = new if parameter.grad is None else parameter.grad + new
            added[f"model.{path}.grad"] = added.get(f"model.{path}.grad", torch.zeros_like(new)) + new
        used = {at for at, period in enumerate(periods.values()) if commit % period == 0}
        for at, (name, optim) in enumerate(optims.items()):
            if at in used:
                optim.step()
                if zeroes_at_once[name]:
                    optim.zero_grad()
        if chance.random() < 0.5:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-1, 1)
        state.gradients.keep()
        kept = state.gradients.tensors()
        waiting = {key for key in added if int(key.split(".")[1]) not in used}
        assert kept.keys() == waiting, (commit, periods)
        assert all(torch.equal(kept[key], added[key]) for key in waiting)


def test_gradients_are_made_as_wanted_and_go_on_from_there() -> None:
    model, optim = make(0)
    state = CarriedState({"model": model, "optim": optim})
    add_up(model)
    state.gradients.drop()
    state.allocate({"model.0.weight.grad": None})
    state.tensors()["model.0.weight.grad"].fill_(2.0)
    state.gradients.settle()
    assert model[0].weight.grad is not None and bool((model[0].weight.grad == 2).all())
    assert model[0].bias.grad is None
    state.gradients.keep()
    assert bool((state.tensors()["model.0.weight.grad"] == 2).all())
    state.allocate({})
    assert model[0].weight.grad is None and not state.gradients.is_accumulating


def test_gradients_that_ranks_have_not_added_up_are_found() -> None:
    told = []
    for seed in (1, 1, 2):
        model, _ = make(0)
        state = CarriedState({"model": model})
        torch.manual_seed(seed)
        add_up(model)
        state.gradients.keep()
        told.append(json.loads(json.dumps(state.gradients.describe())))
    assert find_unlike(told[:2]) is None
    found = find_unlike(told)
    assert found is not None and found[1:] == (0, 2)
    assert find_unlike([told[0], {}]) is None


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    **{
        kind.__name__: partial(kind, lr=0.01)
        for kind in (
            *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam),
            *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
        )
    },
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "rate in a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), amsgrad=True),
}


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_any_optimizer_of_a_model_with_a_frozen_layer_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """From memory, and from a checkpoint: all later steps are the same bits."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        model[0].requires_grad_(False)
        return model, _OPTIMIZERS[kind](model.parameters())

    def train(model: nn.Module, optim: torch.optim.Optimizer, *seeds: int) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            take_step(model, optim)

    old = build()
    train(*old, 0, 1, 2)
    before = CarriedState({"model": old[0], "optim": old[1]})
    held = before.hold(3, 30, 0)
    remesh.save({"model": old[0], "optim": old[1]}, tmp_path)
    carried = build()
    after = CarriedState({"model": carried[0], "optim": carried[1]})
    after.allocate(held.pieces.keys())
    assert after.tensors().keys() == held.pieces.keys()
    for name, tensor in after.tensors().items():
        tensor.copy_(before.tensors()[name])
    after.set_values(held.values)
    loaded = build()
    train(*loaded, 9)  # makes its moments
    remesh.load({"model": loaded[0], "optim": loaded[1]}, tmp_path)
    for one in (old, carried, loaded):
        train(*one, 3, 4, 5)
    for one in (carried, loaded):
        assert all(torch.equal(a, b) for a, b in zip(old[0].parameters(), one[0].parameters(), strict=True))


def test_an_optimizer_that_takes_no_empty_step_is_refused_by_name() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    optim = torch.optim.SparseAdam(model.parameters(), lr=0.5)
    state = CarriedState({"model": model, "optim": optim})
    with pytest.raises(ConfigError, match="SparseAdam cannot make its moments .*does not support dense gradients"):
        state.allocate({"optim.state.model.weight.exp_avg"})
    assert model.weight.grad is None and optim.param_groups[0]["lr"] == 0.5
