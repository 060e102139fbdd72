"""Stand-ins for torch's gloo and NCCL constructors, which make our process groups instead.

torch makes a group by calling ``ProcessGroupGloo`` or ``ProcessGroupNCCL`` of `torch.distributed.distributed_c10d`, and
asserts that an instance came of it. Stand-ins under those names make a `CarriedGroup`, and pass that check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torch.distributed import Backend, BackendConfig, PrefixStore, ProcessGroup, Store

from remesh.carried.torch.cut import GroupsAtCut
from remesh.carried.torch.gate import Gate
from remesh.carried.torch.groups import CarriedGroup, GroupPlace, Groups, Recipe
from remesh.carried.torch.program_store import CarriedStore, StoreLink
from remesh.device.nccl_settings import let_groups_be_aborted, settings_here, why_it_would_end
from remesh.foundation.errors import ConfigError
from remesh.foundation.torch_private import GroupThatCompares
from remesh.groups.gloo_sockets import descriptors_of_loops

_CARRIED: Final = {"gloo": ("ProcessGroupGloo", "GLOO", "cpu"), "nccl": ("ProcessGroupNCCL", "NCCL", "cuda")}
"""For each backend, by torch's name: the constructor, the kind, the device."""
_NOTHING_REAL: Final = "fake"
"""A backend that sends nothing."""
_MADE_PREFIX: Final = "made/"
"""The prefix of what real groups send each other when the program makes a group, within the store of that."""
_COMPARED_PREFIX: Final = "compared/"
"""The prefix of what the groups send each other over which members compare their calls."""
PROGRAM_PREFIX: Final = "program/"
"""The prefix of the program's keys in the job's store."""


@dataclass(frozen=True, slots=True)
class _Making:
    """The group that a thread is about to make."""

    name: str
    members: tuple[int, ...]


class Backends:
    """Answers for torch's backends in one process."""

    def __init__(self, gate: Gate, link: StoreLink, rank: int, size: int) -> None:
        self.groups = Groups(gate)
        self.cut = GroupsAtCut(self.groups, link, rank, size)
        self._gate, self._link = gate, link
        self._rank, self._size = rank, size
        self._num_worlds = 0
        self._now = threading.local()

    def install(self, *modules: ModuleType) -> None:
        """Put stand-ins into the modules of torch that have the constructors."""
        for backend, (constructor, kind, device) in _CARRIED.items():
            if (real := getattr(modules[0], constructor, None)) is not None:
                stand_in = self._stand_in(real, backend, kind, device)
                for module in modules:
                    setattr(module, constructor, stand_in)

    def descriptors(self) -> list[int]:
        """Return the descriptors of all connections of the groups and the store."""
        return [*self._link.descriptors(), *descriptors_of_loops()]

    def rendezvous(self, rank: int, size: int) -> Iterator[tuple[Store, int, int]]:
        """What torch's rendezvous yields: the job's store."""
        if (rank, size) != (self._rank, self._size):
            raise self._other_place(rank, size)
        yield CarriedStore(self._link, PROGRAM_PREFIX), rank, size

    def _other_place(self, rank: int, size: int) -> ConfigError:
        return ConfigError(
            f"starting torch.distributed as rank {rank} of {size}: the launcher made this process rank "
            f"{self._rank} of {self._size}; take RANK and WORLD_SIZE from the environment"
        )

    def make_by(
        self, original: Callable[..., Any], size: int, rank: int, members: Sequence[int], backend: Any, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Call torch's function that makes every group; without ``members`` the group has all ranks of the world."""
        store, name, *others = rest
        self._refuse_unknown(name, str(backend))
        if not members:
            self._num_worlds += 1
        self._now.making = _Making(name, tuple(members or range(self._size)))
        try:
            return original(size, rank, members, backend, store, name, *others, **options)
        finally:
            self._now.making = None

    def _refuse_unknown(self, name: str, backend: str) -> None:
        words = set(BackendConfig(Backend(backend)).get_device_backend_map().values())
        unknown = sorted(words - set(_CARRIED) - {_NOTHING_REAL})
        if _compares_calls() and "nccl" in words:
            raise ConfigError(
                f"making process group {name} over NCCL with TORCH_DISTRIBUTED_DEBUG=DETAIL: Remesh could not end its "
                "communicators at a checkpoint, through the group that compares calls; choose INFO or OFF"
            )
        mixed = torch.cuda.is_available() and len(words) > 1
        if unknown or mixed:
            raise ConfigError(
                f"making process group {name} with backend {backend}: Remesh can checkpoint gloo and nccl only, "
                f"found {', '.join(sorted(words))}; name one of them in init_process_group and new_group"
            )

    def _stand_in(self, real: Any, backend: str, kind: str, device: str) -> type:
        answers = self

        class Meta(type):
            def __call__(cls, store: Store, rank: int, size: int, *args: Any, **options: Any) -> CarriedGroup:
                if device == "cuda":
                    _let_communicators_be_aborted(backend)

                def make(over: Store) -> Any:
                    return real(over, rank, size, *args, **options)

                way = _comparing(make) if _compares_calls() else make
                recipe = Recipe(backend, getattr(ProcessGroup.BackendType, kind), device, way)
                return answers._make(recipe, store, rank, size)

            def __instancecheck__(cls, one: object) -> bool:
                return isinstance(one, (CarriedGroup, real))

            def __getattr__(cls, name: str) -> Any:
                return getattr(real, name)

        return Meta(real.__name__, (), {"__doc__": f"Makes carried groups over {backend}."})

    def _make(self, recipe: Recipe, store: Store, rank: int, size: int) -> CarriedGroup:
        making: _Making | None = getattr(self._now, "making", None)
        if making is None:
            raise ConfigError(
                f"making a {recipe.backend} group by its constructor, as torch.distributed.rpc does: Remesh carries "
                "the groups that init_process_group and new_group make; use those"
            )
        if size != len(making.members) or making.members[rank] != self._rank:
            # The program has a store of its own for the default group, and other numbers with it.
            raise self._other_place(rank, size)
        key = self.groups.key_of(f"{self._num_worlds}/{making.name}")
        self.groups.members[key] = making.members
        # The store outlasts the program's groups: under their names stand addresses of those that it has destroyed.
        fresh = PrefixStore(f"{_MADE_PREFIX}{key}", store)
        group = CarriedGroup(self._gate, GroupPlace(key, making.members, rank), recipe, fresh)
        self.groups.all.append(group)
        return group


def post_batch(c10d: Any, original: Callable[..., list[Any]], operations: Sequence[Any]) -> list[Any]:
    """What torch's ``batch_isend_irecv`` does: in a block if the group has blocks, else one by one.

    torch asks whether the group is of its own type. Over NCCL two ranks that send to each other one by one may wait for
    each other for ever.
    """
    if not operations or not hasattr(operations[0], "group"):
        return original(operations)  # raises, in torch's words
    group = operations[0].group or c10d._get_default_group()
    if not (isinstance(group, CarriedGroup) and group.supports_coalescing):
        return original(operations)
    try:
        with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as manager:
            original(operations)
    except BaseException:
        group.drop_block()
        c10d._world.pg_coalesce_state.pop(group, None)
        raise
    works: list[Any] = manager.works
    return works


def _compares_calls() -> bool:
    """Whether the members of a group that is made now compare what they call, as the program or its user chose."""
    return bool(torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL)


def _comparing(make: Callable[[Store], Any]) -> Callable[[Store], Any]:
    """Make what torch puts around a group at the level DETAIL, with a second group to compare calls over.

    torch itself does not put it around a group that is written in Python.
    """
    return lambda over: GroupThatCompares(make(over), make(PrefixStore(_COMPARED_PREFIX, over)))


def _let_communicators_be_aborted(backend: str) -> None:
    """Have torch outlive the end of communicators; `ConfigError` where the user has set otherwise."""
    let_groups_be_aborted()
    if (why := why_it_would_end(settings_here())) is not None:
        raise ConfigError(f"making a group over {backend}, whose communicators end at a checkpoint: {why}")
