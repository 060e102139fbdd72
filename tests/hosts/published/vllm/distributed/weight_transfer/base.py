"""What trainers and workers of vLLM 0.33 subclass to move weights, as its sources publish it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")
TTrainerInitInfo = TypeVar("TTrainerInitInfo")


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Replicate | Shard, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class ModuleSource(WeightSource):
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [self._meta_of(name, each) for name, each in self._module.named_parameters()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._module.named_parameters():
            yield name, each.full_tensor() if isinstance(each, DTensor) else each

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._module.named_parameters():
            is_told = not isinstance(each, DTensor) or self._meta_of(name, each).placements is not None
            local = each.to_local() if isinstance(each, DTensor) else each
            yield name, local if is_told else each.full_tensor()

    @staticmethod
    def _meta_of(name: str, each: torch.Tensor) -> ParamMeta:
        if not isinstance(each, DTensor):
            return ParamMeta(name, each.dtype, tuple(each.shape))
        grid = each.device_mesh.mesh
        told: tuple[Replicate | Shard, ...] | None = tuple(
            Shard(one.dim) if type(one) is TorchShard else Replicate() for one in each.placements
        )
        if any(type(one) not in (TorchShard, TorchReplicate) for one in each.placements):
            told = None
        owners = tuple(grid.flatten().tolist())
        return ParamMeta(
            name, each.dtype, tuple(each.shape), owners=owners, mesh_shape=tuple(grid.shape), placements=told
        )


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024 - as published
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024 - as published
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} must set a class-level `backend` string")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]
    supports_draft_weight_update: bool = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as e:
            raise ValueError(f"Invalid init_info for {self.__class__.__name__}: {e}") from e

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    init_info_cls: type[TTrainerInitInfo]

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.is_sender = is_sender
        self.rank = rank
        self.client = client
        self.source = source

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: TTrainerInitInfo, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...
