"""FSDP2 as in torch's tutorial, which saves by torch's own checkpoints, aside and whole, and goes on. STEPS FOLDER"""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

steps, folder = int(sys.argv[1]), sys.argv[2]
EACH = 6
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_ONE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def build():
    """On the meta device first, as the tutorial does."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.LayerNorm)):
            layer.reset_parameters()
    assert isinstance(model, FSDPModule)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def digest_of(state):
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor):
            found.update(name.encode() + value.detach().numpy().tobytes())
    return found.hexdigest()


dist.init_process_group("cpu:gloo,cuda:gloo" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
model, optimizer = build()
torch.manual_seed(30 + rank)
aside, being_saved = dist.new_group(), None
for step in range(1, steps + 1):
    loss = model(torch.randn(4, 24)).square().sum()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    told = norm.full_tensor().item().hex()
    print(rank, step, loss.item().hex(), told, flush=True)
    if step % EACH == 0:
        if being_saved is not None:
            being_saved.result()
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        being_saved = dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=aside)
        whole = get_model_state_dict(model, options=WHOLE)
        print(rank, "whole", step, digest_of(whole), flush=True)
    elif step % EACH == 3:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
if being_saved is not None:
    being_saved.result()
again, its_optimizer = build()
again(torch.ones(1, 24)).sum().backward()
its_optimizer.step()
weights, moments = get_state_dict(again, its_optimizer)
state = {"model": weights, "optimizer": moments}
dcp.load(state, checkpoint_id=f"{folder}/{steps // EACH * EACH}")
set_state_dict(again, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print("loaded", rank, digest_of(get_model_state_dict(again)), flush=True)
set_model_state_dict(again, get_model_state_dict(model, options=WHOLE), options=FROM_ONE)
print("end", rank, digest_of(get_model_state_dict(again)), digest_of(get_model_state_dict(model)), flush=True)
dist.destroy_process_group()
