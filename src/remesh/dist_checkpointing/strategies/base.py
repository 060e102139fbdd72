"""Which code reads and writes a format? Base classes of strategies, and the registry of the default ones.

A *strategy* is how one of four things is done: saving or loading, sharded or common data. A save strategy writes one
``(backend, version)``, a load strategy may read several; for a given pair every save strategy goes with every load
strategy. Strategies change how a checkpoint is made, never what is in it.

`save` and `load` call a strategy on every rank of the group, after all ranks have agreed that the request fits
together. A program may pass its own: a child of these classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from remesh.checkpoint.background.callers import AsyncRequest
from remesh.checkpoint.background.queue import AsyncCallsQueue
from remesh.checkpoint.errors import CheckpointFormatError, CheckpointingException, CheckpointMismatchError
from remesh.checkpoint.formats.directory import maybe_load_config
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.storage import Directory, Location
from remesh.checkpoint.values.entities import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.comm.agreement import Agreements
from remesh.comm.gather import Group, step_together

T = TypeVar("T")


class StrategyAction(Enum):
    """What a strategy does."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class LoadStrategyBase(ABC):
    """A strategy that reads."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise `CheckpointingException` when this strategy cannot read that backend."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise `CheckpointingException` when this strategy cannot read that version."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether `ShardedObject` is read here too; otherwise by the strategy for common data."""
        return False


class SaveStrategyBase(ABC):  # noqa: B024 - its children have the abstract methods
    """A strategy that writes one version of one backend."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    def _check_writes_only(self, backend: str, version: int) -> None:
        """Raise `CheckpointingException` unless this strategy was made for the one format that it writes."""
        if (self.backend, self.version) != (backend, version):
            raise CheckpointingException(
                f"making a save strategy: found backend {self.backend!r} version {self.version}, expected {backend!r} "
                f"version {version}; this strategy writes nothing else"
            )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether `ShardedObject` is written here too; otherwise by the strategy for common data."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class HandlesObjects:
    """For strategies that handle objects, too, and raise what goes wrong on one rank on all of them."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    @property
    def raises_everywhere(self) -> bool:
        return True


class ReadsOneFormat(LoadStrategyBase):
    """A strategy that reads one version of one backend."""

    _backend: str
    _version: int

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != self._backend:
            raise CheckpointingException(
                f"choosing how to load: found backend {loaded_backend!r}, expected {self._backend!r}"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != self._version:
            raise CheckpointingException(
                f"choosing how to load: found version {loaded_version} of {self._backend!r}, expected {self._version}"
            )


class LoadCommonStrategy(LoadStrategyBase):
    """Reads common data."""

    @abstractmethod
    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        """The common data."""

    @abstractmethod
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory
    ) -> StateDict:
        """The nest with the value of each object in its place."""

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedObject]:
        """Every stored object without data, by unique key."""
        raise NotImplementedError(f"{type(self).__name__} does not list objects")


class LoadShardedStrategy(LoadStrategyBase):
    """Reads sharded data."""

    @property
    def raises_everywhere(self) -> bool:
        """Whether what goes wrong on one rank is raised on all; otherwise the caller tells the others."""
        return False

    def for_one_load(self) -> LoadShardedStrategy:
        """What does one load by this strategy where it was registered and not given."""
        return self

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> StateDict:
        """The nest with the loaded value in the place of each entity. Called by every rank."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedTensor]:
        """Every stored tensor as one shard without data, by key."""

    def load_sharded_metadata(self, checkpoint_dir: Directory) -> dict[str, ShardedTensor | ShardedObject]:
        """`load_tensors_metadata`, and every stored object by its unique key."""
        if not self.can_handle_sharded_objects:
            return {**self.load_tensors_metadata(checkpoint_dir)}
        raise NotImplementedError(f"{type(self).__name__} reads objects but does not list them")

    def remove_sharded_tensors(self, checkpoint_dir: Directory, key_prefix: str) -> None:
        """Remove every tensor whose key starts with the prefix."""
        raise NotImplementedError(f"{type(self).__name__} does not remove tensors")


class SaveCommonStrategy(SaveStrategyBase):
    """Writes common data."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Directory) -> None:
        """Write the common data; called by one rank."""

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Write the objects of this rank that are main replicas."""
        raise NotImplementedError(f"{type(self).__name__} does not write objects")


class SaveShardedStrategy(SaveStrategyBase):
    """Writes sharded data."""

    @property
    def raises_everywhere(self) -> bool:
        """Whether what goes wrong on one rank is raised on all; otherwise the caller tells the others."""
        return False

    @property
    def plans(self) -> Agreements:
        """The cache of what ranks have agreed on; None by default."""
        return Agreements(max_kept=0)

    def check_can_save(self, sharded_state_dict: ShardedStateDict) -> None:
        """Raise `CheckpointingException` for what could not be stored; called before anything is written."""

    def abandon(self) -> None:
        """Forget what `check_can_save` has prepared: the save does not come."""

    def ask_for_sums(self) -> None:
        """Let the next save compute the SHA-256 of the files that it writes, while it writes them, if it can."""

    def take_sums(self) -> dict[str, str]:
        """The sums of all ranks' files by name, as far as the save that was finished last was asked for them."""
        return {}

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        """Write the entities of this rank that are main replicas. Called by every rank."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Writes sharded data in the background."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> AsyncRequest:
        """What is left to do for the save, to be scheduled. Values changed after this returns are not written."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Directory) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


def call_on_all(
    strategy: LoadShardedStrategy | SaveShardedStrategy, act: Callable[[], T], group: Group, doing: str
) -> T:
    """The value of ``act``, which uses the strategy, on every rank; if it raised on any, all raise that error."""
    if strategy.raises_everywhere:
        return act()
    return step_together(act, group, doing).mine


AnyStrategy = LoadStrategyBase | SaveStrategyBase

default_strategies: dict[str, dict[tuple[str, int], Any]] = defaultdict(dict)
"""By value of the action and ``(backend, version)``."""
async_calls = AsyncCallsQueue()
"""A queue for programs that keep none of their own."""


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """The strategy registered for the action; `CheckpointingException` when there is none."""
    try:
        return default_strategies[action.value][backend, version]
    except KeyError:
        known = ", ".join(map(repr, default_strategies[action.value])) or "none"
        raise CheckpointingException(
            f"Cannot find a default strategy for: {(action.value, backend, version)}; expected one of the registered, "
            f"{known}; register it with register_default_strategy or pass a strategy object"
        ) from None


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: AnyStrategy) -> None:
    """Make ``strategy`` the one for ``(backend, version)``; the last one registered counts."""
    default_strategies[action.value][backend, version] = strategy


def find_save_strategy(given: Any) -> Any:
    """The strategy that was given, or is registered; what is wrong with it `check_save_strategy` tells."""
    if given is None or isinstance(given, tuple):
        return default_strategies[StrategyAction.SAVE_SHARDED.value].get(given or (BACKEND, BACKEND_VERSION))
    return given


def check_save_strategy(strategy: Any, given: Any, is_async: bool) -> None:
    """Raise `CheckpointingException` unless what `find_save_strategy` found can do the save."""
    if strategy is None:
        get_default_strategy(StrategyAction.SAVE_SHARDED, *(given or (BACKEND, BACKEND_VERSION)))
    if not isinstance(strategy, SaveShardedStrategy):
        raise CheckpointMismatchError(
            f"choosing how to save: found {given!r}, expected a SaveShardedStrategy, (backend, version) or None"
        )
    if is_async and not isinstance(strategy, AsyncSaveShardedStrategy):
        raise CheckpointingException(
            f"Cannot apply async_save to non-async strategy {strategy}; save synchronously, or with an "
            "AsyncSaveShardedStrategy"
        )
    if not strategy.can_handle_sharded_objects:
        raise CheckpointingException(
            f"choosing how to save: {strategy} does not write objects (can_handle_sharded_objects), expected one that "
            "does; let it write them too"
        )


def choose_load_strategy(given: Any, directory: Location) -> LoadShardedStrategy:
    """The strategy that was given, or is registered for it or for the format of the checkpoint."""
    if isinstance(given, tuple):
        given = get_default_strategy(StrategyAction.LOAD_SHARDED, *given)
    config = maybe_load_config(directory)
    if given is None:
        backend = (config.sharded_backend, config.sharded_backend_version) if config else (BACKEND, BACKEND_VERSION)
        try:
            given = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
        except CheckpointingException as raised:
            raise CheckpointFormatError(
                "unknown-backend",
                f"loading checkpoint {directory}: its tensors are in format {backend[0]!r} version {backend[1]}, "
                f"expected {BACKEND!r} version {BACKEND_VERSION} or a registered one; register a strategy that reads "
                "it, or convert it first",
            ) from raised
        given = given.for_one_load()
    if not isinstance(given, LoadShardedStrategy):
        raise CheckpointMismatchError(
            f"choosing how to load: found {given!r}, expected a LoadShardedStrategy, (backend, version) or None"
        )
    if config is not None:
        given.check_backend_compatibility(config.sharded_backend)
        given.check_version_compatibility(config.sharded_backend_version)
    return given


def check_common_strategy(given: Any, kind: type) -> None:
    """Raise `CheckpointingException` unless it is a strategy of that kind, names one, or is None."""
    if isinstance(given, tuple):
        action = StrategyAction.SAVE_COMMON if kind is SaveCommonStrategy else StrategyAction.LOAD_COMMON
        get_default_strategy(action, *given)
    elif given is not None and not isinstance(given, kind):
        raise CheckpointMismatchError(
            f"choosing how common data is kept: found common_strategy={given!r}, expected a {kind.__name__}, "
            "(backend, version) or None"
        )
