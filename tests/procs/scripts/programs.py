"""Small stand-ins for programs that people train with, converted as the documentation of elastic jobs says."""

import argparse
from typing import Any

import torch
import torch._dynamo  # for seconds, at the first step of any optimizer: nobody is to wait for that in a collective
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR
from torch.utils.data import TensorDataset

import remesh
from tests.support.hold import wait_if_held

VOCABULARY, CONTEXT = 11, 6
PLACES = {
    "language": ("forward", "clipped", "committed", "stepped", "evaluation"),
    "adversarial": ("critic", "generator", "committed", "evaluation"),
    "policy": ("rollout", "forward", "committed", "evaluation", "behind"),
}


class Places:
    """Where a program may be killed: rank 1 waits there at the step that a test holds."""

    def __init__(self, job: remesh.Job, place: str | None, hold: str | None) -> None:
        self._job, self._place, self._hold = job, place, hold

    def reach(self, place: str) -> None:
        if place == self._place and self._job.rank == 1:
            wait_if_held(self._job, self._hold)


class Memory:
    """Plain values of a program, carried."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def mean_over_ranks(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def language(job: remesh.Job, places: Places) -> list[nn.Module]:
    """In the manner of nanoGPT: text, warm-up, clipping, an evaluation every few steps and the best of it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, VOCABULARY, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.head(self.block(self.embedding(tokens), src_mask=mask, is_causal=True))

    text = torch.randint(VOCABULARY, (40, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    model, best = Model(), Memory(loss=None)
    forward = DistributedDataParallel(model, process_group=job.mesh["dp"].get_group())
    decayed = [one for one in model.parameters() if one.dim() >= 2]
    others = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    job.carry(model=model, optimizer=optimizer, scheduler=scheduler, best=best)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    for (tokens,) in job.batches(TensorDataset(text), 8, max_steps=12):
        if job.step % 3 == 0:  # before the step: it is done anew with its batch
            places.reach("evaluation")
            with torch.no_grad():
                loss = mean_over_ranks(loss_of(text[:8]).detach())
            best.values = {"loss": loss if best.values["loss"] is None else min(best.values["loss"], loss)}
        places.reach("forward")
        (loss_of(tokens) * job.batch_weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        places.reach("clipped")
        if job.commit():
            places.reach("committed")
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        places.reach("stepped")
        dist.all_reduce(torch.zeros(1))  # what is printed
    job.log("best", loss=best.values["loss"])
    return [model]


def adversarial(job: remesh.Job, places: Places) -> list[nn.Module]:
    """Two models that train against each other, each with its optimizer; an evaluation after every step."""
    samples = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    generator, critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 1)
    optim_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    optim_d = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    job.carry(generator=generator, critic=critic, optim_g=optim_g, optim_d=optim_d)
    for (real,) in job.batches(TensorDataset(samples), 8, epochs=2):
        fake = generator(real[:, :2].sin())
        places.reach("critic")
        # Each model's gradients alone: the critic has no part of the generator's pass.
        loss_d = (critic(fake.detach()).mean() - critic(real).mean()) * job.batch_weight
        loss_g = -critic(fake).mean() * job.batch_weight
        for model, loss in ((critic, loss_d), (generator, loss_g)):
            parameters = list(model.parameters())
            for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                dist.all_reduce(gradient)
                one.grad = gradient / dist.get_world_size()
            places.reach("generator")
        if job.commit():
            places.reach("committed")
            optim_d.step()
            optim_g.step()
        optim_d.zero_grad()
        optim_g.zero_grad()
        places.reach("evaluation")
        mean_over_ranks(critic(generator(samples[:, :2])).mean().detach())
    return [generator, critic]


def policy(job: remesh.Job, places: Places) -> list[nn.Module]:
    """Iterations of experience, some passes over it, an evaluation and a schedule; what was experienced is state."""
    actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.05, momentum=0.9)
    scheduler = MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)
    buffer = Memory(of=None, seen=torch.zeros(12, 3), returns=torch.zeros(12, 1))
    job.carry(actor=actor, optimizer=optimizer, scheduler=scheduler, buffer=buffer)
    for iteration in job.epochs(4):
        if buffer.values["of"] != iteration:
            places.reach("rollout")
            seen = torch.randn(12, 3, generator=torch.Generator().manual_seed(iteration))
            with torch.no_grad():
                returns = actor(seen).tanh() + 1
            buffer.values = {"of": iteration, "seen": seen, "returns": returns}
        experience = TensorDataset(buffer.values["seen"], buffer.values["returns"])
        for seen, returns in job.batches(experience, 6, epochs=2):
            places.reach("forward")
            loss = (actor(seen) - returns).square().mean() * job.batch_weight
            parameters = list(actor.parameters())
            for one, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                dist.all_reduce(gradient)
                one.grad = gradient / dist.get_world_size()
            if job.commit():
                places.reach("committed")
                optimizer.step()
            optimizer.zero_grad()
        places.reach("evaluation")
        mean_over_ranks(actor(torch.ones(1, 3)).mean().detach())
        scheduler.step()
        places.reach("behind")
        dist.all_reduce(torch.zeros(1))
    return [actor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PLACES)
    parser.add_argument("--at", help="where rank 1 waits")
    parser.add_argument("--hold", help="STEP:FILE: at which step, and until the file is there")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)

    def train(job: remesh.Job) -> None:
        torch.manual_seed(0)
        models = globals()[options.program](job, Places(job, options.at, options.hold))
        total = sum(float(one.detach().square().sum()) for model in models for one in model.parameters())
        job.log("end", checksum=total)

    remesh.elastic(train, {"dp": -1}, seed=5, timeout_s=30.0)


if __name__ == "__main__":
    main()
