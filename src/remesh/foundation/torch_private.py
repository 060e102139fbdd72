"""Private names of torch that Remesh uses; no other module names one.

A release of torch may move or drop any of them. Each is looked up when a module of Remesh is imported that uses it, and
what is not there is an error that names it and the torch that was found: a name that is imported from here is looked up
then, members of classes and modules are when this module is imported, those of modules that are slow to load when their
user calls `check_members`. `missing_names` lists all at once.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from remesh.foundation.errors import ConfigError

if TYPE_CHECKING:  # it loads half of torch's distributed side, which a launcher does not need
    from torch.distributed.fsdp import FSDPModule

Verb = TypeVar("Verb", bound=Callable[..., Any])

_HOMES: Final = {
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "DistWrapper": "torch.distributed.checkpoint.utils._DistWrapper",
    "FakeProcessGroup": "torch._C._distributed_c10d.FakeProcessGroup",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "GroupThatCompares": "torch._C._distributed_c10d._ProcessGroupWrapper",
    "StorageInfo": "torch.distributed.checkpoint.filesystem._StorageInfo",
    "StridedShard": "torch.distributed.tensor.placement_types._StridedShard",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "foreach_copy": "torch._foreach_copy_",
    "init_optimizer_state": "torch.distributed.checkpoint.state_dict._init_optim_state",
    "make_group": "torch.distributed.distributed_c10d._new_process_group_helper",
    "matches_machine_hostname": "torch.distributed.elastic.rendezvous.utils._matches_machine_hostname",
    "without_fake_tensors": "torch._subclasses.fake_tensor.unset_fake_temporarily",
}
"""Our name to torch's."""
_MEMBERS: Final = {
    "torch._C._autograd.SavedTensor": ("unpack_hook",),
    "torch._C._dynamo.eval_frame": ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"),
    "torch.distributed.Backend": ("_plugins",),
    "torch.distributed.ProcessGroup": ("_get_backend",),
    "torch.distributed.distributed_c10d": ("_world",),
}
"""What is used of a class or a module by attribute."""
FSDP_MODULE: Final = "torch.distributed.fsdp.FSDPModule"
_SLOW_MEMBERS: Final = {
    FSDP_MODULE: ("_get_fsdp_state",),
}
"""The same of what a launcher does not load."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_missing([_HOMES[name]])
    return _look_up(_HOMES[name])


def missing_names() -> list[str]:
    """Every private name that Remesh uses and this torch lacks."""
    return [dotted for dotted in (*_HOMES.values(), *_members_of(*_MEMBERS, *_SLOW_MEMBERS)) if not _is_there(dotted)]


def check_members(home: str) -> None:
    """Raise `ConfigError` for what this torch lacks of a class that is slow to load. Called before its use."""
    _refuse_missing(_members_of(home))


def _members_of(*homes: str) -> list[str]:
    return [f"{home}.{name}" for home in homes for name in {**_MEMBERS, **_SLOW_MEMBERS}[home]]


def _refuse_missing(needed: Sequence[str]) -> None:
    if lacking := [dotted for dotted in needed if not _is_there(dotted)]:
        raise ConfigError(
            f"using torch {torch.__version__}: it has no {', '.join(lacking)}, which Remesh needs; install a release "
            "of torch that Remesh was tested with"
        )


def _is_there(dotted: str) -> bool:
    try:
        _look_up(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def _look_up(dotted: str) -> Any:
    """The object of a dotted name, whose first parts are modules, some of which may be being imported right now."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for length, part in enumerate(parts[1:], 2):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            found = getattr(found, part)
    return found


def num_groups_named() -> int:
    """How many groups torch has named: it counts up, and names the next one by that."""
    return int(dist.distributed_c10d._world.group_count)


def name_groups_from_the_start() -> None:
    """Let torch name the next group as the first one."""
    dist.distributed_c10d._world.group_count = 0


def number_ranks(group: dist.ProcessGroup) -> None:
    """Let torch know the ranks of a group that was not made of the default group's by their numbers in it."""
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}


def all_groups() -> list[dist.ProcessGroup]:
    """Every group that torch knows of in this process."""
    return list(dist.distributed_c10d._world.pg_map)


_apart: WeakKeyDictionary[dist.ProcessGroup, tuple[str, list[int]]] = WeakKeyDictionary()
"""Backends, and world ranks of the members, of groups that torch does not know of."""


def keep_apart(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Take a group of these world ranks out of torch's books, so that no ``destroy_process_group`` ends it.

    It ends when nobody refers to it any more.
    """
    world = dist.distributed_c10d._world
    _apart[group] = dist.get_backend_config(group), ranks
    for of_groups in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        of_groups.pop(group, None)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [one for one in tagged if one is not group]


def world_rank_of(rank: int, group: dist.ProcessGroup) -> int:
    """The world rank of a member of a group."""
    return _apart[group][1][rank] if group in _apart else dist.get_global_rank(group, rank)


def is_known_group(group: object) -> bool:
    """Whether a group is there in this process: it was made, and not destroyed since."""
    return group in dist.distributed_c10d._world.pg_map or group in _apart


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The store over which the members of a group met; its keys are the group's own."""
    store: dist.Store = dist.distributed_c10d._world.pg_map[group][1]
    return store


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The name of a group's backend for each type of device: ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = _apart[group][0] if group is not None and group in _apart else dist.get_backend_config(group)
    return dict(entry.split(":", 1) for entry in config.split(","))


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long what a group does may take; None where its backend has no timeout."""
    backend = group._get_backend(torch.device(next(iter(backends_of(group)))))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def nccl_of(group: dist.ProcessGroup) -> Any | None:
    """What the group has for tensors of CUDA devices, if that is one of torch's ``ProcessGroupNCCL``; else None."""
    return group._get_backend(torch.device("cuda")) if backends_of(group).get("cuda") == "nccl" else None


def nccl_error(group: dist.ProcessGroup) -> str | None:
    """What became of the operations that a group has queued over NCCL: ``"TIMEOUT"``, ``"COMM_ERROR"``; None if all is
    well. It is noted before what hangs is aborted."""
    backend = nccl_of(group)
    if backend is None:
        return None
    if not hasattr(backend, "get_error"):
        raise ConfigError(
            f"using torch {torch.__version__}: {type(backend).__name__} has no get_error, by which Remesh learns of "
            "operations that were aborted; install a release of torch that Remesh was tested with"
        )
    name: str = backend.get_error().name
    return None if name == "SUCCESS" else name


def abort_nccl(group: dist.ProcessGroup) -> None:
    """Abort the communicators of a group, which ends what spins on a device; torch goes on knowing the group."""
    backend = nccl_of(group)
    if backend is not None:
        backend.abort()


def is_known_backend(name: str) -> bool:
    """Whether a backend of this name was registered."""
    return name.upper() in dist.Backend._plugins


def is_saved_by_hooks(node: Any) -> bool:
    """Whether a tensor that a node of an autograd graph keeps was packed by a hook, as in activation checkpointing."""
    for name in _names_of_saved(node.__class__):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            if each is not None and each.unpack_hook is not None:
                return True
    return False


@functools.cache
def _names_of_saved(kind: type[Any]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def holds_unreduced_gradients(module: FSDPModule) -> bool:
    """Whether a module of FSDP has gradients that it has not added up over its ranks yet."""
    group = module._get_fsdp_state()._fsdp_param_group
    for one in () if group is None else group.fsdp_params:
        unsharded = getattr(one, "_unsharded_param", None)
        if one.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
            return True
    return False


def ranks_that_average(module: FSDPModule) -> int | None:
    """Over how many ranks a module of FSDP averages gradients; None for one without parameters of its own."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    mesh: Any = group.mesh_info
    return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))


def never_compiled(verb: Verb) -> Verb:
    """Have torch.compile leave a function alone, or a class with all its own functions; returns it, the same object.

    A compiled caller is cut at the call, as where one of ``torch.compiler.disable`` is called, whose import of Dynamo
    would take seconds of every start. What the function calls is not compiled either, but what is compiled by itself.
    """
    left_alone = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in functions_of(verb):
        called: Any = inspect.unwrap(function)
        eval_frame.set_code_exec_strategy(called.__code__, left_alone)
        for met in (function, called):
            met._torchdynamo_disable = True
            met._torchdynamo_disable_msg = "Remesh moves values between ranks and files, which no graph can hold"
    return verb


def functions_of(verb: Callable[..., Any]) -> list[Any]:
    """The function, or those that a class has itself, behind class methods, static methods and properties too."""
    own = vars(verb).values() if isinstance(verb, type) else [verb]
    inner = (getattr(one, "fget", None) or getattr(one, "__func__", one) for one in own)
    return [one for one in inner if isinstance(one, FunctionType)]


_refuse_missing(_members_of(*_MEMBERS))
