"""vLLM's engines with our backend: a trainer under FSDP2 x TP, engines under another TP that join and leave.

The engines' experts are processed behind their load, as kernels of vLLM want them. What vLLM publishes stands in
``tests/hosts/published``; calls come in the order of its own worker. What arrives is compared with what a loader of
whole tensors cuts.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from remesh.foundation.errors import ConfigError, Error, PeerError
from remesh.integrations import store_meeting
from remesh.testbed.pool import RankPool
from remesh.wire.free_ports import free_port

PUBLISHED = Path(__file__).resolve().parents[2] / "hosts" / "published"
WIDTH, HEADS, HEAD, INNER, VOCABULARY, EXPERTS = 16, 4, 4, 8, 24, 2
LAYER = "model.layers.0"
TRAINERS = 4


@contextmanager
def _published() -> Iterator[Any]:
    """vLLM's published interface on the path, and our modules over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PUBLISHED))
        before = set(sys.modules)
        # By their names: the package would hand out the modules of a test before, which it still holds.
        vllm, vllm_plugin = (importlib.import_module(f"remesh.integrations.{name}") for name in ("vllm", "vllm_plugin"))
        vllm_plugin.register()
        vllm_plugin.register()
        try:
            yield vllm
        finally:
            for name in set(sys.modules) - before:
                del sys.modules[name]


def _module_source() -> Any:
    """vLLM's own source."""
    return importlib.import_module("vllm.distributed.weight_transfer.base").ModuleSource


def _shapes(num_kv: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    rows = {"q": HEADS, "k": num_kv, "v": num_kv}
    return {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        f"{LAYER}.input_layernorm.weight": (WIDTH,),
        **{f"{attention}.{name}_proj.weight": (number * HEAD, WIDTH) for name, number in rows.items()},
        f"{attention}.o_proj.weight": (WIDTH, HEADS * HEAD),
        **{f"{mlp}.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        f"{mlp}.down_proj.weight": (WIDTH, INNER),
        f"{mlp}.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
        f"{mlp}.experts.down_proj": (EXPERTS, WIDTH, INNER),
        **({} if tied else {"lm_head.weight": (VOCABULARY, WIDTH)}),
    }


def _whole(num_kv: int, version: int, *, tied: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in _shapes(num_kv, tied=tied).items()}


class _Box(nn.Module):
    """A module with children and parameters of any names."""


class _EngineModel(_Box):
    """A model as vLLM's are: one parameter after the other takes what its rank has of a tensor."""

    rank, size, num_kv, is_tied = 0, 1, 1, False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, one in weights:
            stem, _, last = name.rpartition(".")
            if stem.endswith(".experts"):
                self._load_experts(parameters, f"{stem}.routed_experts", last, one)
            elif match := re.fullmatch(r"(.*)\.(q|k|v|gate|up)_proj\.weight", name):
                self._load_fused(parameters, match[1], match[2], one)
            elif "norm" in name:
                parameters[name].data.copy_(one)
            else:
                is_row = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameters[name].data.copy_(one.chunk(self.size, int(is_row))[self.rank])
                if self.is_tied and name == "model.embed_tokens.weight":
                    parameters["lm_head.weight"].data.copy_(one.chunk(self.size)[self.rank])

    def _load_fused(self, parameters: dict[str, nn.Parameter], stem: str, part: str, one: torch.Tensor) -> None:
        if part in ("gate", "up"):
            parameters[f"{stem}.gate_up_proj.weight"].data.chunk(2)[part == "up"].copy_(one.chunk(self.size)[self.rank])
            return
        q_rows, kv_rows = HEADS // self.size * HEAD, max(1, self.num_kv // self.size) * HEAD
        start = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}[part]
        rows = q_rows if part == "q" else kv_rows
        rank = self.rank if part == "q" else self.rank // max(1, self.size // self.num_kv)
        to = parameters[f"{stem}.qkv_proj.weight"].data.narrow(0, start, rows)
        to.copy_(one.narrow(0, rank * rows, rows))

    def _load_experts(self, parameters: dict[str, nn.Parameter], stem: str, part: str, one: torch.Tensor) -> None:
        for expert, matrix in enumerate(one):
            if part == "down_proj":
                parameters[f"{stem}.w2_weight"].data[expert].copy_(matrix.chunk(self.size, 1)[self.rank])
            else:
                mine = [each.chunk(self.size)[self.rank] for each in matrix.chunk(2)]
                parameters[f"{stem}.w13_weight"].data[expert].copy_(torch.cat(mine))


def _module_of(tensors: dict[str, torch.Tensor], root: nn.Module | None = None) -> nn.Module:
    root = _Box() if root is None else root
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        at = root
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, _Box())
            at = getattr(at, part)
        if path and not hasattr(at, path[-1]):
            is_linear = last == "weight" and path[-1].endswith("_proj")
            made = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False) if is_linear else _Box()
            at.add_module(path[-1], made)
        setattr(getattr(at, path[-1]) if path else at, last, nn.Parameter(tensor.clone()))
    return root


def _trainer(num_kv: int, *, tied: bool) -> nn.Module:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    root = _module_of(_whole(num_kv, 0, tied=tied))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {f"{LAYER}.{name}": ColwiseParallel() for name in columns}
    plan |= {f"{LAYER}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    parallelize_module(root, mesh["tp"], plan)
    fully_shard(root, mesh=mesh["dp"])
    return root


def _set(module: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            given = torch.distributed.tensor.distribute_tensor(
                whole[name], parameter.device_mesh, [torch.distributed.tensor.Replicate()] * parameter.device_mesh.ndim
            )
            parameter.copy_(given.redistribute(placements=parameter.placements))


def _engine_tensors(whole: dict[str, torch.Tensor], rank: int, size: int, num_kv: int) -> dict[str, torch.Tensor]:
    """The parameters of one of vLLM's ranks, as its loaders cut them out of whole tensors."""

    def cut(name: str, dim: int = 0) -> torch.Tensor:
        return whole[f"{LAYER}.{name}"].chunk(size, dim)[rank]

    def cut_kv(name: str) -> torch.Tensor:
        heads = whole[f"{LAYER}.self_attn.{name}_proj.weight"].unflatten(0, (num_kv, HEAD))
        return heads.repeat_interleave(max(1, size // num_kv), 0).chunk(size)[rank].flatten(0, 1)

    embed = whole["model.embed_tokens.weight"].chunk(size)[rank]
    head = whole["lm_head.weight"].chunk(size)[rank] if "lm_head.weight" in whole else embed
    gate, up = whole[f"{LAYER}.mlp.experts.gate_up_proj"].chunk(2, 1)
    w13 = torch.cat([up.chunk(size, 1)[rank], gate.chunk(size, 1)[rank]], 1)  # as their kernel wants them
    return {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        f"{LAYER}.input_layernorm.weight": whole[f"{LAYER}.input_layernorm.weight"],
        f"{LAYER}.self_attn.qkv_proj.weight": torch.cat([cut("self_attn.q_proj.weight"), cut_kv("k"), cut_kv("v")]),
        f"{LAYER}.self_attn.o_proj.weight": cut("self_attn.o_proj.weight", 1),
        f"{LAYER}.mlp.gate_up_proj.weight": torch.cat([cut("mlp.gate_proj.weight"), cut("mlp.up_proj.weight")]),
        f"{LAYER}.mlp.down_proj.weight": cut("mlp.down_proj.weight", 1),
        f"{LAYER}.mlp.experts.routed_experts.w13_weight": w13,
        f"{LAYER}.mlp.experts.routed_experts.w2_weight": cut("mlp.experts.down_proj", 2),
    }


class _Client:
    """vLLM's control plane over a store: each call is made by every worker of the round, and answered by it."""

    def __init__(self, store: dist.Store, num_workers: int) -> None:
        self.store = store
        self.num_workers = num_workers

    def _call(self, name: str, *args: Any) -> None:
        number = self.store.add("calls", 1)
        self.store.set(f"call/{number}", json.dumps([name, self.num_workers, *args]))
        answers = [self.store.get(f"answer/{number}/{worker}").decode() for worker in range(self.num_workers)]
        if wrong := [answer for answer in answers if answer]:
            raise RuntimeError(wrong[0])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update", update_info)

    def finish_weight_update(self) -> None:
        self._call("finish")

    def end(self) -> None:
        self._call("end")


def _serve(store: dist.Store, number: int, engine: Any) -> None:
    """A worker of vLLM: does what it is told until the end, unless the round is of fewer workers."""
    call = 0
    while True:
        call += 1
        name, num_workers, *args = json.loads(store.get(f"call/{call}"))
        if number >= num_workers:
            continue
        answer = ""
        try:
            if name == "init":
                engine.parallel_config.tensor_parallel_size = num_workers
                engine.model = engine.make(number, num_workers)
                _process_experts(engine.model)
                engine.init_transfer_engine(engine.parse_init_info(args[0]))
            elif name == "update":
                engine.update_weights(args[0])
            elif name != "end":
                getattr(engine, f"{name}_weight_update")()
        except Exception as raised:
            answer = f"{type(raised).__name__}: {raised}"
        store.set(f"answer/{call}/{number}", answer)
        if name == "end":
            return


def _process_experts(model: nn.Module) -> None:
    """Experts as a kernel wants them: up before gate, in a tensor of the same shape. As vLLM does behind a load."""
    base, layerwise = (
        importlib.import_module(f"vllm.model_executor.{name}")
        for name in ("layers.quantization.base_config", "model_loader.reload.layerwise")
    )

    class Swapped(base.QuantizeMethodBase):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            gate, up = layer.w13_weight.data.chunk(2, 1)
            layer.w13_weight = nn.Parameter(torch.cat([up, gate], 1), requires_grad=False)

    layer = model.get_submodule(f"{LAYER}.mlp.experts.routed_experts")
    layer.quant_method = Swapped()
    layerwise.record_metadata_for_reloading(layer)
    layer.quant_method.process_weights_after_loading(layer)


def _engine(vllm: Any, number: int, num_kv: int, *, tied: bool, extra: tuple[str, ...] = ()) -> Any:
    parallel = SimpleNamespace(
        rank=number,
        world_size=8,
        data_parallel_index=0,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(quantization=None, get_total_num_kv_heads=lambda: num_kv),
    )
    factory = __import__("vllm.distributed.weight_transfer.factory", fromlist=["_"])
    backend = SimpleNamespace(backend="remesh")
    engine = factory.WeightTransferEngineFactory.create_engine(backend, config, torch.device("cpu"), nn.Module())
    assert type(engine) is vllm.RemeshWorkerEngine

    def make(rank: int, size: int) -> nn.Module:
        like = _engine_tensors(_whole(num_kv, 0, tied=tied), rank, size, num_kv)
        model = _EngineModel()
        model.rank, model.size, model.num_kv, model.is_tied = rank, size, num_kv, tied
        blank = {name: torch.zeros(tensor.shape) for name, tensor in like.items()}
        return _module_of(blank | {name: torch.zeros(2) for name in extra}, model)

    engine.make = make
    return engine


def _train_and_serve(ports: tuple[int, int], rounds: list[int], num_kv: int, tied: bool, sharded: bool) -> bool:
    """Rounds of ``rounds[n]`` workers each, two syncs a round; each worker compares what it has at the end."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=rank == 0, wait_for_workers=False)
    with _published() as vllm:
        if rank >= TRAINERS:
            engine = _engine(vllm, rank - TRAINERS, num_kv, tied=tied)
            _serve(store, rank - TRAINERS, engine)
            engine.shutdown()
            last = max(at for at, number in enumerate(rounds) if rank - TRAINERS < number)
            whole = _whole(num_kv, 2 * last + 2, tied=tied)
            expected = _engine_tensors(whole, rank - TRAINERS, rounds[last], num_kv)
            found = dict(engine.model.named_parameters())
            return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)
        factory = __import__("vllm.distributed.weight_transfer.factory", fromlist=["_"])
        trainer = _trainer(num_kv, tied=tied)
        source = (vllm.ShardedModule if sharded else _module_source())(trainer)
        version = 0
        for num_workers in rounds:
            client = _Client(store, num_workers)
            info = vllm.RemeshTrainerInitInfo("127.0.0.1", ports[1], TRAINERS, num_workers, rank=rank, timeout_s=60)
            engine = factory.WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            for _ in range(2):
                version += 1
                _set(trainer, _whole(num_kv, version, tied=tied))
                engine.send_weights()
            engine.shutdown()
        if rank == 0:
            _Client(store, max(rounds)).end()
        return True


@pytest.mark.parametrize(
    ("num_kv", "tied", "sharded", "rounds"),
    [
        (2, False, True, [2, 1]),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False, True, [2]), (2, True, False, [1, 2]))),
    ],
)
def test_engines_that_join_and_leave_get_what_their_loaders_would_have_cut(
    ranks: RankPool, num_kv: int, tied: bool, sharded: bool, rounds: list[int]
) -> None:
    told = ranks.run(
        _train_and_serve, TRAINERS + max(rounds), ((free_port(), free_port()), rounds, num_kv, tied, sharded)
    )
    assert all(told)


def _update_in_part(ports: tuple[int, int], names: list[str]) -> bool:
    """All weights once, then those of some names, then nothing; each worker compares what it has at the end."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=rank == 0, wait_for_workers=False)
    with _published() as vllm:
        if rank >= TRAINERS:
            engine = _engine(vllm, rank - TRAINERS, 2, tied=False)
            _serve(store, rank - TRAINERS, engine)
            old, new = _whole(2, 1, tied=False), _whole(2, 2, tied=False)
            mixed = {name: new[name] if name in names else old[name] for name in old}
            expected = _engine_tensors(mixed, rank - TRAINERS, 2, 2)
            found = dict(engine.model.named_parameters())
            return all(found[name].equal(expected[name]) for name in expected)
        trainer = _trainer(2, tied=False)
        source, client = vllm.ShardedModule(trainer), _Client(store, 2)
        info = vllm.RemeshTrainerInitInfo("127.0.0.1", ports[1], TRAINERS, 2, rank=rank, timeout_s=60)
        engine = vllm.RemeshTrainerEngine.trainer_init(info, client=client, source=source)
        for version, only in ((1, None), (2, set(names)), (3, ())):
            _set(trainer, _whole(2, version, tied=False))
            source.only = only
            engine.send_weights()
        source.only = {f"{LAYER}.mlp.experts.down_proj"}
        with pytest.raises(ConfigError, match=rf"1 tensors that are not sent(.|\n)*{LAYER}.mlp.experts.gate_up_proj"):
            engine.send_weights()
        if rank == 0:
            client.end()
        source.only = ("model.strange",)
        with pytest.raises(ConfigError, match=r"no parameters \['model.strange'\]"):
            list(source.iter_local())
        return True


def test_an_update_brings_what_the_source_names_and_leaves_all_else(ranks: RankPool) -> None:
    names = [f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.down_proj.weight"]
    names += [f"{LAYER}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert all(ranks.run(_update_in_part, TRAINERS + 2, ((free_port(), free_port()), names)))


def _meet_a_strange_model(ports: tuple[int, int], extra: tuple[str, ...], more: dict[str, torch.Tensor]) -> str:
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", ports[0], is_master=rank == 0, wait_for_workers=False)
    with _published() as vllm:
        if rank >= 1:
            _serve(store, rank - 1, _engine(vllm, rank - 1, 1, tied=True, extra=extra))
            return ""
        client = _Client(store, dist.get_world_size() - 1)
        whole = _whole(1, 0, tied=True) | more
        info = vllm.RemeshTrainerInitInfo("127.0.0.1", ports[1], 1, client.num_workers, rank=0, timeout_s=100)
        with pytest.raises(Error) as raised:
            vllm.RemeshTrainerEngine.trainer_init(info, client=client, source=_module_source()(_module_of(whole)))
        client.end()
        with pytest.raises(ConfigError, match="no iter_local"):
            vllm.RemeshTrainerEngine.trainer_init(info, client=client, source=None)
        return str(raised.value)


def test_parameters_that_no_tensor_fills_are_told_all_at_once_to_trainer_and_engines(ranks: RankPool) -> None:
    told = ranks.run(_meet_a_strange_model, 3, ((free_port(), free_port()), ("model.odd", "model.strange"), {}))[0]
    assert "'model.odd' of shape (2,)" in told and "'model.strange'" in told, told


def test_what_the_engines_own_loader_raises_is_told_to_trainer_and_engines(ranks: RankPool) -> None:
    more = {"model.more": torch.zeros(1)}
    told = ranks.run(_meet_a_strange_model, 3, ((free_port(), free_port()), (), more))[0]
    assert "load_weights raised KeyError: 'model.more'" in told, told


class _AnsweredAtOnce:
    """An executor whose call has ended before it returns: of two who race, the engines come in first."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, ask: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(ask())
        except RuntimeError as raised:
            future.set_exception(raised)
        return future

    def shutdown(self, *, wait: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("met", "told"),
    [(ConfigError("told to all ranks"), "told to all ranks"), (PeerError("an engine stayed away"), "the server")],
)
def test_engines_that_answer_first_hide_no_error_that_all_ranks_raise(met: Error, told: str) -> None:
    def ask() -> None:
        raise RuntimeError("what the server made of it")

    def act() -> None:
        raise met

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_meeting, "PooledExecutor", _AnsweredAtOnce)
        with pytest.raises((ConfigError, RuntimeError), match=told):
            store_meeting.act_while_asking(act, ask)


def test_quantised_engines_are_refused_by_name() -> None:
    with _published() as vllm:
        engine = _engine(vllm, 0, 2, tied=False)
        engine.model_config.quantization = "fp8"
        with pytest.raises(ConfigError, match=r"found \['quantization'\]"):
            engine._check_and_record(None)
        with pytest.raises(ConfigError, match="is not connected to a trainer"):
            engine.receive_weights(vllm.RemeshUpdateInfo())
