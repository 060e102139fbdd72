"""Base classes of strategies, and the registry of the default ones.

A *strategy* is how one of four things is done: saving or loading, sharded or common data. A save strategy writes one
``(backend, version)``, a load strategy may read several; for a given pair every save strategy goes with every load
strategy. Strategies change how a checkpoint is made, never what is in it.

`save` and `load` call a strategy on every rank of the group, after all ranks have agreed that the request fits
together. A program may pass its own: a child of these classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from remesh.checkpoint.background.queue import AsyncCallsQueue
from remesh.checkpoint.background.writers import AsyncRequest
from remesh.checkpoint.checkpoint_errors import CheckpointFormatError, CheckpointingException, CheckpointMismatchError
from remesh.checkpoint.formats.directory import maybe_load_config
from remesh.checkpoint.formats.torch_format import BACKEND, BACKEND_VERSION
from remesh.checkpoint.storage import Directory, location_of
from remesh.checkpoint.values.entities import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from remesh.comm.gather import Group, step_together

T = TypeVar("T")
Backend = tuple[str, int]
"""Name and version of a format."""


class StrategyAction(Enum):
    """What a strategy does."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class _Strategy(ABC):  # noqa: B024 - its children have the abstract methods
    can_handle_sharded_objects = False
    """Whether `ShardedObject` is dealt with here, too."""
    raises_everywhere = False
    """Whether what goes wrong on one rank is raised on all; otherwise the caller sends it to the others."""


class LoadStrategyBase(_Strategy):
    """A strategy that reads. One that reads a single format names it as ``_reads``."""

    _reads: Backend | None = None

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise `CheckpointingException` when this strategy cannot read that backend."""
        if self._reads is not None and loaded_backend != self._reads[0]:
            raise CheckpointingException(
                f"choosing how to load: found backend {loaded_backend!r}, expected {self._reads[0]!r}"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise `CheckpointingException` when this strategy cannot read that version."""
        if self._reads is not None and loaded_version != self._reads[1]:
            raise CheckpointingException(
                f"choosing how to load: found version {loaded_version} of {self._reads[0]!r}, expected {self._reads[1]}"
            )


class SaveStrategyBase(_Strategy):
    """A strategy that writes one version of one backend. One that can write nothing else names it as ``_writes``."""

    _writes: Backend | None = None

    def __init__(self, backend: str, version: int) -> None:
        if self._writes not in (None, (backend, version)):
            raise CheckpointingException(
                f"making a save strategy: found backend {backend!r} version {version}, expected {self._writes}; "
                "this strategy writes nothing else"
            )
        self.backend, self.version = backend, version

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase):
    """Reads common data."""

    @abstractmethod
    def load_common(self, checkpoint_dir: Directory) -> StateDict:
        """The common data."""


class LoadShardedStrategy(LoadStrategyBase):
    """Reads sharded data."""

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


class SaveShardedStrategy(SaveStrategyBase):
    """Writes sharded data."""

    def check_can_save(self, sharded_state_dict: ShardedStateDict) -> Mapping[str, bytes]:
        """The objects, serialised, by unique key, if that is done now; called before anything is written.

        Raises `CheckpointingException` for what could not be stored.
        """
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


def call_on_all(strategy: LoadStrategyBase | SaveStrategyBase, act: Callable[[], T], group: Group, doing: str) -> T:
    """The value of ``act``, which uses the strategy, on every rank; if it raised on any, all raise that error."""
    return act() if strategy.raises_everywhere else step_together(act, group, doing).mine


default_strategies: dict[str, dict[Backend, Any]] = defaultdict(dict)
"""By value of the action and ``(backend, version)``."""
async_calls = AsyncCallsQueue()
"""A queue for programs that keep none of their own."""
_DEFAULT: Backend = (BACKEND, BACKEND_VERSION)
_KINDS: dict[StrategyAction, type] = {
    StrategyAction.LOAD_COMMON: LoadCommonStrategy,
    StrategyAction.LOAD_SHARDED: LoadShardedStrategy,
    StrategyAction.SAVE_COMMON: SaveCommonStrategy,
    StrategyAction.SAVE_SHARDED: SaveShardedStrategy,
}


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


def register_default_strategy(
    action: StrategyAction, backend: str, version: int, strategy: LoadStrategyBase | SaveStrategyBase
) -> None:
    """Make ``strategy`` the one for ``(backend, version)``; the last one registered counts."""
    default_strategies[action.value][backend, version] = strategy


def strategy_of(action: StrategyAction, given: Any) -> Any:
    """The strategy that was given as an object or as ``(backend, version)``; None where none was.

    Raises `CheckpointingException` for what is no strategy of the action.
    """
    found = get_default_strategy(action, *given) if isinstance(given, tuple) else given
    if found is not None and not isinstance(found, _KINDS[action]):
        what, kind = action.value.partition("_")[2], _KINDS[action].__name__
        raise CheckpointMismatchError(
            f"choosing a strategy: found {what}_strategy={given!r}, expected a {kind}, (backend, version) or None"
        )
    return found


def choose_save_strategy(given: Any, is_async: bool) -> SaveShardedStrategy:
    """The strategy that was given, or is registered; `CheckpointingException` for one that cannot do the save."""
    chosen: SaveShardedStrategy = strategy_of(StrategyAction.SAVE_SHARDED, given or _DEFAULT)
    if is_async and not isinstance(chosen, AsyncSaveShardedStrategy):
        raise CheckpointingException(
            f"Cannot apply async_save to non-async strategy {chosen}; save synchronously, or with an "
            "AsyncSaveShardedStrategy"
        )
    if not chosen.can_handle_sharded_objects:
        raise CheckpointingException(
            f"choosing how to save: {chosen} does not write objects (can_handle_sharded_objects), expected one that "
            "does; let it write them too"
        )
    return chosen


def choose_load_strategy(given: Any, checkpoint_dir: Directory) -> LoadShardedStrategy:
    """The strategy that was given, or is registered for it or for the format of the checkpoint."""
    directory = location_of(checkpoint_dir)
    chosen: LoadShardedStrategy | None = strategy_of(StrategyAction.LOAD_SHARDED, given)
    config = maybe_load_config(directory)
    if chosen is None:
        backend = (config.sharded_backend, config.sharded_backend_version) if config else _DEFAULT
        try:
            registered: LoadShardedStrategy = get_default_strategy(StrategyAction.LOAD_SHARDED, *backend)
        except CheckpointingException as raised:
            raise CheckpointFormatError(
                "unknown-backend",
                f"loading checkpoint {directory}: its tensors are in format {backend[0]!r} version {backend[1]}, "
                f"expected {BACKEND!r} version {BACKEND_VERSION} or a registered one; register a strategy that reads "
                "it, or convert it first",
            ) from raised
        chosen = registered.for_one_load()
    if config is not None:
        chosen.check_backend_compatibility(config.sharded_backend)
        chosen.check_version_compatibility(config.sharded_backend_version)
    return chosen
