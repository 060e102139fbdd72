"""vLLM's own weight transfer, with the moves of Remesh: shards of any trainer into the parameters that engines hold.

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="remesh"))

Every trainer rank sends what it holds, to the ranks that want it, and no rank has a whole tensor. Where each element
belongs in an engine's fused and sharded parameters is what the model's own ``load_weights`` does, which is run on
numbers once (`remesh.record`).

    trainer ranks 0 .. T-1, ranks of the engines T .. T+N-1: one group beside the default groups of all
    trainer_init -> init_transfer_engine on every worker: meet, record; what does not fit is raised on all
    send_weights -> start_weight_update, update_weights (all move at the same time), finish_weight_update

When engines join or leave, ``trainer_init`` is called again, with a client of those that are there. An update brings
what the source yields: with `ShardedModule.only`, adapted layers alone or what has changed; the rest stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from remesh.comm.gather import step_together
from remesh.foundation.errors import ConfigError, Error
from remesh.groups.beside import join_beside, leave_beside
from remesh.integrations.host_programs import check_host
from remesh.integrations.store_meeting import act_while_asking, store_at
from remesh.layout.from_torch import Piece, dtype_name, torch_dtype
from remesh.layout.recorded import BoundWeights, Recorded, record
from remesh.resharding import Resharder

check_host("vllm", (0, 33))

from vllm.distributed.weight_transfer.base import (  # noqa: E402 - what is missing is reported first
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from remesh.integrations.vllm_layers import (  # noqa: E402
    laid_open,
    layers_to_open,
    packs_once,
    parameters_of,
    processed_layers,
    recompute_attention,
    standing_in,
)
from remesh.integrations.vllm_source import ShardedModule, held_by  # noqa: E402

__all__ = ["RemeshTrainerEngine", "RemeshTrainerInitInfo", "RemeshWorkerEngine", "ShardedModule"]

BACKEND = "remesh"
_MEETING = "meeting trainers and engines of vLLM"
_UPDATING = "updating weights"


@dataclass
class RemeshTrainerInitInfo(TrainerInitInfo):
    """What every trainer rank gives to vLLM's ``WeightTransferTrainerFactory.trainer_init``."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    """The address at which the other ranks and all engines reach trainer rank 0."""
    master_port: int
    num_trainers: int
    num_workers: int
    """Ranks of all engines: tensor parallelism times data parallelism, summed over the engines of the client."""
    timeout_s: float = field(default=600.0, kw_only=True)
    """How long any rank is waited for."""


@dataclass
class RemeshWorkerInitInfo(WeightTransferInitInfo):
    """What the sender sends to every engine, in plain JSON."""

    master_address: str
    master_port: int
    num_trainers: int
    num_workers: int
    timeout_s: float
    meeting: int
    """Number of this meeting at that place."""
    shapes: dict[str, list[int]]
    """Whole shapes of the trainer's tensors."""
    dtypes: dict[str, str]
    """Their dtypes."""
    first_worker: int = 0
    """Number of this engine's first rank, for clients of several engines."""


@dataclass
class RemeshUpdateInfo(WeightTransferUpdateInfo):
    """An update needs no information besides the weights."""


class RemeshTrainerEngine(TrainerWeightTransferEngine[RemeshTrainerInitInfo]):
    """The trainer's side, on every trainer rank."""

    init_info_cls = RemeshTrainerInitInfo
    _group: dist.ProcessGroup | None = None
    _resharder: Resharder | None = None

    @classmethod
    def trainer_init(cls, init_info: RemeshTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Meet the engines; on every trainer rank. Raises on all ranks alike what any of them cannot map."""
        if source is None or not source.implements_iter_local():
            raise ConfigError(
                f"setting up weight transfer: a source {type(source).__name__} has no iter_local, expected one that "
                "yields what each rank holds; take vLLM's ModuleSource, or ShardedModule of this module"
            )
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        # The store of the first meeting is kept, so that no process takes an old one for the next.
        store = store_at(init_info.master_address, init_info.master_port, is_server=init_info.rank == 0)
        info = RemeshWorkerInitInfo(
            **{key: value for key, value in asdict(init_info).items() if key != "rank"},
            meeting=store.add(f"meetings of {init_info.rank}", 1),
            shapes={meta.name: list(meta.shape) for meta in source.metadata},
            dtypes={meta.name: dtype_name(meta.dtype) for meta in source.metadata},
        )

        def meet() -> None:
            engine._group = _meet(info, store, init_info.rank)
            step_together(lambda: None, engine._group, _MEETING)

        if engine.is_sender:
            act_while_asking(meet, partial(client.init_weight_transfer_engine, asdict(info)))
        else:
            meet()
        engine._resharder = Resharder(engine._group)
        return engine

    def send_weights(self) -> None:
        """Move what the source holds now into all engines; on every trainer rank, blocks until they have it."""
        assert self._resharder is not None, "vLLM sends after trainer_init"
        resharder = self._resharder

        def move() -> None:
            given = step_together(self._given, self._group, _UPDATING, tell=sorted).mine
            step_together(lambda: None, self._group, _UPDATING)  # in which engines make room
            resharder.reshard(given, {})

        if not self.is_sender:
            move()
            return
        self.client.start_weight_update()
        act_while_asking(move, partial(self.client.update_weights, {}))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the engines."""
        if self._group is not None:
            leave_beside(self._group)
            self._group = None

    def _given(self) -> dict[str, torch.Tensor | Piece]:
        metas = {meta.name: meta for meta in self.source.metadata}
        return {name: held_by(tensor, metas[name], self.rank) for name, tensor in self.source.iter_local()}


class RemeshWorkerEngine(WeightTransferEngine[RemeshWorkerInitInfo, RemeshUpdateInfo]):
    """The engines' side, on every worker."""

    init_info_cls = RemeshWorkerInitInfo
    update_info_cls = RemeshUpdateInfo
    supports_draft_weight_update = False
    _group: dist.ProcessGroup | None = None
    _resharder: Resharder | None = None
    _recorded: Recorded | None = None
    _processed: Mapping[str, torch.nn.Module]

    def init_transfer_engine(self, init_info: RemeshWorkerInitInfo) -> None:
        """Meet the trainers, and find where each of their tensors belongs; called again when members have changed."""
        self.shutdown()
        parallel = self.parallel_config
        number = init_info.first_worker + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(init_info.master_address, init_info.master_port, is_master=False)
        self._group = _meet(init_info, store, init_info.num_trainers + number)
        self._recorded = step_together(partial(self._check_and_record, init_info), self._group, _MEETING).mine
        self._resharder = Resharder(self._group)

    def start_weight_update(self) -> None:
        """Do nothing: an update is one call, which receives and processes."""

    def finish_weight_update(self) -> None:
        """Do nothing: an update is complete when its weights are received and processed."""

    def receive_weights(self, update_info: RemeshUpdateInfo) -> None:
        """Fill the model's parameters. All ranks raise alike; values of parameters filled in place are then unknown."""
        if self._resharder is None or self._recorded is None:
            raise ConfigError(
                "receiving weights: this worker is not connected to a trainer; call init_weight_transfer_engine first"
            )
        sent = {name for names in step_together(dict, self._group, _UPDATING, tell=sorted).told for name in names}
        with ExitStack() as stack:
            bound = step_together(lambda: self._make_room(sent, stack), self._group, _UPDATING).mine
            self._resharder.reshard({}, dict(bound.pieces))
            bound.copy()
        recompute_attention(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the trainers; the model stays as it is."""
        if self._group is not None:
            leave_beside(self._group)
        self._group = self._resharder = self._recorded = None
        self._processed = {}

    def _check_and_record(self, info: RemeshWorkerInitInfo) -> Recorded:
        processed = processed_layers(self.model)
        cannot = {
            "quantization": getattr(self.model_config, "quantization", None) is not None,
            "experts on a CPU": packs_once(processed.values()),
        }
        if any(cannot.values()):
            raise ConfigError(
                f"recording how an engine of vLLM loads: found {[name for name, is_on in cannot.items() if is_on]}, "
                "expected plain weights, which vLLM processes at every load; take vLLM's nccl backend there"
            )
        self._processed = processed

        def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
            with standing_in(self.model, processed, into):
                try:
                    self.model.load_weights(given.items())
                except Error:
                    raise
                except Exception as raised:
                    words = f"{type(raised).__name__}: {raised}"
                    raise ConfigError(
                        f"recording how an engine of vLLM loads: its model's load_weights raised {words}, expected it "
                        "to take every tensor of the trainer; give the source names and shapes of Hugging Face"
                    ) from raised

        dtypes = {name: torch_dtype(one) for name, one in info.dtypes.items()}
        parameters = parameters_of(self.model, processed)
        return record(load, info.shapes, parameters, dtypes=dtypes, groups=_by_layer(info.shapes))

    def _make_room(self, sent: Collection[str], stack: ExitStack) -> BoundWeights:
        """Lay layers open that have to process what is sent, until the end of ``stack``; where all goes then."""
        recorded = self._recorded
        assert recorded is not None
        touched = layers_to_open(self._processed, recorded, sent)
        if touched:
            stack.enter_context(laid_open(touched, self.model_config))
        found = parameters_of(self.model, self._processed)
        wanted = {name: one for name, one in found.items() if not recorded.made_of(name).isdisjoint(sent)}
        return recorded.bind(wanted, sent)


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Names that have the same number first, as those of one layer do, in the order of the trainer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".*?\.\d+\.", name)
        groups.setdefault(match[0] if match else "", []).append(name)
    return list(groups.values())


def _meet(info: RemeshWorkerInitInfo, store: dist.Store, rank: int) -> dist.ProcessGroup:
    size = info.num_trainers + info.num_workers
    return join_beside(store, rank, size, meeting=str(info.meeting), timeout_s=info.timeout_s)
