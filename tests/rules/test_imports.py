"""The walls of the house: which room may import which, which modules are pure, what costs no torch."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.rules.source_tree import Module, imports_of_all, module_names, modules

# What every room may import; a name a line.
_FOUNDATION = {
    "callable_package",
    "checksums",
    "collector",
    "device_streams",
    "errors",
    "exit_codes",
    "files",
    "first_use",
    "linux",
    "options",
    "torch_private",
    "retention",
}
_MOVES = _FOUNDATION | {"comm", "layout", "reshard"}
_ALL_ROOMS = {module.room for module in modules()} - {""}

# What each room may import besides itself. The arrow of docs/architecture.md, row by row.
ARROW: dict[str, set[str]] = {
    "errors": set(),
    "callable_package": {"first_use"},
    "first_use": {"errors"},
    "torch_private": {"errors"},
    "checksums": set(),
    "collector": set(),
    "device_streams": set(),
    "exit_codes": set(),
    "files": set(),
    "linux": {"errors"},
    "options": {"errors"},
    "retention": {"errors"},
    "layout": _FOUNDATION,
    "comm": _FOUNDATION,
    "reshard": _FOUNDATION | {"comm", "layout"},
    "checkpoint": _MOVES,
    # Names for users of Megatron Core: imported by nobody.
    "dist_checkpointing": _MOVES | {"checkpoint"},
    "pipeline": _MOVES,
    "elastic": _MOVES | {"checkpoint", "pipeline"},
    "images": _FOUNDATION,
    "rounds": _FOUNDATION | {"comm"},
    # Where a stay happens knows testbeds as one kind of hosts.
    "ranks": _FOUNDATION | {"comm", "images", "rounds", "testbed"},
    # Imported by programs that have torch; what stands beside them imports none.
    "torch_programs": _FOUNDATION | {"comm", "images", "ranks", "rounds", "testbed"},
    "mpi": _FOUNDATION | {"comm", "images", "ranks", "rounds", "testbed"},
    # Ranks come from the pool of `testing`, through a door.
    "testbed": _FOUNDATION | {"testing"},
    "dashboard": _FOUNDATION,
    "testing": _MOVES | {"elastic"},
    # Plug-ins of programs that others wrote: imported by who asks for one, here by the verb that converts alone.
    "integrations": _MOVES | {"checkpoint", "elastic"},
    "cli": _ALL_ROOMS | {"remesh"},
    "__main__": {"cli"},
    "run": {"cli"},
}


def _layers(*layers: str) -> dict[str, set[str]]:
    """Rows of a room in layers, the lowest first: each of a layer's modules and rooms may import those below it."""
    below: set[str] = set()
    rows: dict[str, set[str]] = {}
    for layer in layers:
        rows |= {name: set(below) for name in layer.split()}
        below |= set(layer.split())
    return rows


# The same inside every room of more than a dozen modules: a row for each module and each room in it.
INNER_ARROW: dict[str, dict[str, set[str]]] = {
    "layout": _layers(
        "box dtypes mesh",
        "box_array cover flat intervals shard",
        "atoms places",
        "layout",
        "blocks json_form overlap placement spec",
        "from_torch",
        "torch_memory",
    ),
    "comm": _layers(
        "aborts beside blame free_ports gloo_sockets listening nccl_settings reception tls token tree",
        "nccl store_line",
        "gather lower messages",
        "agreement server",
    ),
    "integrations": _layers(
        "dcp_index first_rank fused_weights hosts meeting moments random_numbers stand_ins torchrun",
        "accelerate dcp deepspeed deepspeed_universal launcher lightning megatron_core megatron_legacy torchrun_entry "
        "transformers verl vllm_layers vllm_plugin vllm_source",
        "megatron_parts torchtitan verl_shards vllm",
    ),
    "images": _layers(
        "clocks family hash_table held kinds platforms ptrace ranges records turns",
        "layers locks namespaces pagemap reaper seat standing starter tree",
        "format frozen upper",
        "identity increment machine pages store track tree_format",
        "carried criu polls scan sockets stored",
        "compaction inspection open_files",
        "capture restore_member survey",
        "ahead dump_member restore",
        "comeback dump",
        "doctor init",
    ),
    "mpi": _layers(
        "calls extension input_file library mpis program_environment rsh together",
        "native",
        "arena channel",
        "lower",
        "launch",
        "stay",
    ),
    "rounds": _layers(
        "answers control job_folder members ranks",
        "journal status",
        "clock drain",
        "machine",
        "checkpointing",
        "leader",
        "returns signals",
    ),
    "torch_programs": _layers(
        "callers children driver environment gate hook host notice reach short store_server",
        "anew control devices store",
        "works",
        "queued",
        "groups",
        "reunion",
        "cut",
        "backends keeper stay",
        "program",
    ),
    "dist_checkpointing": _layers(
        "core dict_utils distribution_file gpt_checkpoint_interop mapping model_entities optimizer safe_globals utils",
        "exchange_utils state_dict_utils",
        "state_dict_transformation strategies tensor_aware_state_dict",
        "serialization validation",
    ),
    "cli": _layers(
        "ckpt_foreign ckpt_forms events_folder files quiet shown",
        "job_options job_verbs",
        "ckpt dashboard group mpi net pipeline plan run testbed top torch",
    ),
    "checkpoint": {
        "errors": set(),
        "values": {"errors"},
        "storage": {"errors"},
        "plan": {"errors", "values"},
        "formats": {"errors", "plan", "storage", "values"},
        "background": {"errors", "formats", "plan", "storage", "values"},
        "run": {"background", "errors", "formats", "plan", "storage", "values"},
        "plain": {"background", "errors", "formats", "plan", "run", "storage", "values"},
        "manager": {"background", "errors", "plain", "plan", "run", "storage"},
    },
    "reshard": {
        "model": set(),
        "schedule": {"model"},
        "planning": {"model", "schedule"},
        "pictures": {"model", "schedule", "planning"},
        "running": {"model", "schedule", "planning"},
        **{name: {"model", "planning", "running", "schedule"} for name in ("refit", "target")},
        "api": {"model", "planning", "running", "schedule", "target"},
        "faces": {"api", "model", "planning", "running", "schedule", "target"},
        "windows": {"api", "planning", "running", "target"},
    },
    "pipeline": {
        "pipeline_error": set(),
        "actions": {"pipeline_error"},
        "graph": {"pipeline_error"},
        "costs": {"graph", "pipeline_error"},
        "schedule": {"actions", "pipeline_error"},
        "values": {"actions", "graph"},
        "bound": {"costs", "graph"},
        "check": {"actions", "graph", "pipeline_error", "schedule", "values"},
        "peaks": {"actions", "costs", "pipeline_error", "schedule"},
        "player": {"actions", "costs", "graph", "values"},
        "schedules": {"actions", "pipeline_error", "schedule"},
        "csv_text": {"actions", "check", "graph", "pipeline_error", "schedule"},
        "exchange": {"actions", "player", "values"},
        "search": {"actions", "bound", "costs", "graph", "peaks", "pipeline_error", "player", "schedule", "schedules"},
        "simulate": {
            "actions",
            "check",
            "costs",
            "exchange",
            "graph",
            "pipeline_error",
            "player",
            "schedule",
            "values",
        },
        "draw": {"actions", "simulate", "values"},
        "backward": set(),
        "edges": {"pipeline_error"},
        "split": {"graph", "pipeline_error"},
        "stage": {"backward", "pipeline_error"},
        "survey": {"edges", "graph", "pipeline_error", "stage"},
        "queues": {"actions", "costs", "graph", "pipeline_error", "schedule", "simulate", "values"},
        "queued_edges": {"edges"},
        "step": {"actions", "edges", "graph", "queued_edges", "queues", "stage", "survey", "values"},
        "runtime": {
            "actions",
            "check",
            "edges",
            "graph",
            "pipeline_error",
            "queues",
            "schedule",
            "simulate",
            "stage",
            "step",
            "survey",
        },
        "tuning": {"actions", "costs", "pipeline_error", "runtime", "step"},
    },
    "elastic": {
        **{name: set() for name in ("alike", "events", "failover", "gradients", "mesh_policy")},
        **{name: set() for name in ("metrics", "outcome", "own_folder", "seats")},
        "link": {"outcome"},
        "state": {"gradients"},
        "generation": {"alike", "failover", "mesh_policy", "outcome", "seats"},
        "metrics_server": {"metrics"},
        "membership": {"failover", "generation", "mesh_policy", "outcome"},
        "store": {"failover", "generation", "seats"},
        "snapshots": {"state"},
        "health": {"events", "generation", "membership", "store"},
        "training": {
            *("alike", "events", "generation", "gradients", "health", "link", "mesh_policy", "snapshots", "state"),
        },
        "node": {
            *("events", "failover", "generation", "health", "link", "membership", "outcome", "own_folder"),
            *("snapshots", "store"),
        },
        "launch": {"events", "generation", "membership", "node", "outcome", "store"},
        "api": {"link", "mesh_policy", "training"},
    },
}

# Rooms that are pure but for these modules ...
_SHELLS = {
    "layout": {"remesh.layout.from_torch", "remesh.layout.torch_memory"},
    "reshard": {
        "remesh.reshard.api",
        "remesh.reshard.faces",
        "remesh.reshard.refit",
        "remesh.reshard.target",
        "remesh.reshard.windows",
        *(m.name for m in modules() if m.name.startswith("remesh.reshard.running.") and "telemetry" not in m.name),
    },
    "pipeline": {
        *("remesh.pipeline.backward", "remesh.pipeline.edges", "remesh.pipeline.queued_edges"),
        *("remesh.pipeline.runtime", "remesh.pipeline.split"),
        *("remesh.pipeline.stage", "remesh.pipeline.step", "remesh.pipeline.survey", "remesh.pipeline.tuning"),
    },
}
# ... and pure modules in rooms that are not.
_PURE_ELSEWHERE = {
    "remesh.checkpoint.errors",
    "remesh.checkpoint.plan.flattened",
    "remesh.checkpoint.plan.manifest",
    "remesh.checkpoint.plan.reads",
    "remesh.checkpoint.plan.writes",
    "remesh.checkpoint.storage.joined_checksums",
    "remesh.checkpoint.values.checks",
    "remesh.checkpoint.values.description",
    "remesh.checkpoint.values.outline",
    "remesh.checkpoint.values.state_split",
    "remesh.checksums",
    "remesh.collector",
    "remesh.dashboard.curve",
    "remesh.dashboard.story",
    "remesh.checkpoint.values.nests",
    "remesh.checkpoint.values.entities",
    "remesh.comm.blame",
    "remesh.elastic.alike",
    "remesh.elastic.failover",
    "remesh.elastic.generation",
    "remesh.elastic.health.machine",
    "remesh.elastic.health.pace",
    "remesh.elastic.health.verdicts",
    "remesh.elastic.launch.flags",
    "remesh.elastic.launch.forkable",
    "remesh.elastic.launch.mode",
    "remesh.elastic.membership.exclusion",
    "remesh.elastic.membership.instructions",
    "remesh.elastic.membership.machine",
    "remesh.elastic.membership.meeting",
    "remesh.elastic.membership.phases",
    "remesh.elastic.membership.roster",
    "remesh.elastic.membership.rules",
    "remesh.elastic.membership.stay",
    "remesh.elastic.membership.view",
    "remesh.elastic.mesh_policy",
    "remesh.elastic.metrics",
    "remesh.elastic.outcome",
    "remesh.elastic.seats",
    "remesh.elastic.snapshots.choice",
    "remesh.elastic.snapshots.form",
    "remesh.elastic.snapshots.header",
    "remesh.elastic.snapshots.shelves",
    "remesh.elastic.store.card",
    "remesh.elastic.store.endpoint",
    "remesh.comm.token",
    "remesh.elastic.training.position",
    "remesh.errors",
    "remesh.exit_codes",
    "remesh.images.family",
    "remesh.images.format",
    "remesh.images.increment",
    "remesh.images.kinds",
    "remesh.images.layers",
    "remesh.linux.proc_text",
    "remesh.images.ranges",
    "remesh.images.records",
    "remesh.images.tree_format",
    "remesh.mpi.calls.error_classes",
    "remesh.mpi.calls.table",
    "remesh.mpi.calls.wire_messages",
    "remesh.mpi.calls.words",
    "remesh.mpi.lower.accesses",
    "remesh.mpi.lower.exchange_pattern",
    "remesh.mpi.lower.exposure",
    "remesh.mpi.lower.matching",
    "remesh.mpi.together",
    "remesh.options",
    "remesh.ranks.hosts",
    "remesh.ranks.process_ids",
    "remesh.ranks.slurm",
    "remesh.retention",
    "remesh.rounds.answers",
    "remesh.rounds.clock",
    "remesh.rounds.drain",
    "remesh.rounds.machine",
    "remesh.rounds.members",
    "remesh.rounds.status",
    "remesh.testbed.commands",
    "remesh.testbed.spec",
    "remesh.testing.samples",
}
# Translates torch's values (dtypes, placements) and acts on nothing: open to pure modules that may see torch.
_ADAPTERS = {"remesh.layout.from_torch"}
PURE = {m.name for m in modules() if m.room in _SHELLS and m.name not in _SHELLS[m.room]} | _PURE_ELSEWHERE

# A pure module opens nothing, reads no clock, environment or global setting, logs nothing, talks to nobody.
FORBIDDEN_IN_PURE = (
    *("asyncio", "concurrent", "ctypes", "datetime", "glob", "io", "logging", "mmap", "multiprocessing", "os"),
    *("pathlib", "queue", "select", "selectors", "shutil", "socket", "subprocess", "sys", "tempfile"),
    *("threading", "time", "warnings", "mpi4py", "torch.distributed", "fsspec"),
)
# ``signal`` may be imported for the names of signals.
_FORBIDDEN_CALLS = {
    "open",
    "print",
    "input",
    "signal.signal",
    "signal.alarm",
    "signal.setitimer",
    "signal.raise_signal",
}
_NUMPY_ONLY_ROOMS = {"layout", "reshard"}
# More modules than this in a room need an order of their own.
_LARGE_ROOM = 12
# Classes of Megatron Core keep their names.
_NAMES_OF_OTHERS = ("remesh.dist_checkpointing",)


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_imports_follow_the_arrow() -> None:
    wrong = []
    for module in modules():
        if module.room == "":
            continue
        assert module.room in ARROW, f"room {module.room!r} has no row in the arrow: add one, say why it stands there"
        rooms = {[*name.split("."), "remesh"][1] for name in module.imports if _is_within(name, "remesh")}
        if others := rooms - ARROW[module.room] - {module.room}:
            wrong.append(f"{module.name} imports {sorted(others)}; it may import {sorted(ARROW[module.room])}")
    assert not wrong, "\n".join(wrong)


def test_imports_inside_a_room_follow_its_own_arrow() -> None:
    wrong = []
    for module in modules():
        arrow = INNER_ARROW.get(module.room, {})
        inner = [*module.name.split("."), "", ""][2]
        if inner not in arrow:
            continue
        inside = {name.split(".")[2] for name in module.imports if name.startswith(f"remesh.{module.room}.")}
        if others := inside - arrow[inner] - {inner}:
            wrong.append(f"{module.name} imports from {sorted(others)}; it may import from {sorted(arrow[inner])}")
        # The room's own face hands out everything; inside, a module is named by its home.
        if f"remesh.{module.room}" in module.imports:
            wrong.append(f"{module.name} imports the face of its own room")
    assert not wrong, "\n".join(wrong)


def test_every_large_room_has_an_inner_arrow_and_every_module_in_it_a_row() -> None:
    sizes = Counter(module.room for module in modules())
    large = {room for room, size in sizes.items() if size > _LARGE_ROOM}
    assert large == set(INNER_ARROW), f"large: {sorted(large)}, with an arrow: {sorted(INNER_ARROW)}"
    inside = {(module.room, module.name.split(".")[2]) for module in modules() if module.name.count(".") >= 2}
    rows = {(room, name) for room, arrow in INNER_ARROW.items() for name in arrow}
    assert {pair for pair in inside if pair[0] in large} == rows


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Neither at run time, nor below ``TYPE_CHECKING``, in a function, or by the name of a module in a string."""
    graph = {module.name: (module.mentions & module_names()) - {module.name} for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_table_of_pure_modules_names_modules_that_exist() -> None:
    named = _PURE_ELSEWHERE.union(*_SHELLS.values())
    assert named <= module_names(), sorted(named - module_names())


def test_pure_modules_touch_nothing_outside() -> None:
    wrong = [complaint for module in modules() if module.name in PURE for complaint in _complaints_of_pure(module)]
    assert not wrong, "\n".join(wrong)


def _complaints_of_pure(module: Module) -> Iterator[str]:
    name = module.name
    if foreign := sorted(i for i in module.imports if any(_is_within(i, f) for f in FORBIDDEN_IN_PURE)):
        yield f"{name} is pure but imports {foreign}"
    # A package's __init__ may hand out its shells too; a pure module that imports one is no longer pure.
    ours = {i for i in module.imports if _is_within(i, "remesh") and module.path.name != "__init__.py"}
    allowed = PURE if module.room in _NUMPY_ONLY_ROOMS else PURE | _ADAPTERS
    if not ours <= allowed:
        yield f"{name} is pure but imports {sorted(ours - allowed)}, which are not"
    calls = {ast.unparse(node.func) for node in module.nodes if isinstance(node, ast.Call)}
    if forbidden := sorted(calls & _FORBIDDEN_CALLS):
        yield f"{name} is pure but calls {forbidden}"
    if module.room in _NUMPY_ONLY_ROOMS:
        tops = {i.split(".")[0] for i in module.imports}
        if foreign := sorted(tops - set(sys.stdlib_module_names) - {"numpy", "remesh"}):
            yield f"{name} needs NumPy only, but imports {foreign}"


def test_a_class_name_stands_for_one_thing() -> None:
    """So that a name in a stack trace or in a search tells its room. Names that other libraries gave are theirs."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        if not any(_is_within(module.name, room) for room in _NAMES_OF_OTHERS):
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    homes[node.name.lstrip("_")].append(module.name)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(found)}" for name, found in twice.items())


def test_private_names_of_torch_stand_in_one_module() -> None:
    found = []
    for module in modules():
        if module.name == "remesh.torch_private":
            continue
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and re.match(r"(torch\w*|dist|distributed_c10d)\.", ast.unparse(node)):
                names = ast.unparse(node).split(".")
            else:
                continue
            if any(name.startswith("_") and not name.startswith("__") for name in names):
                found.append(f"{module.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "remesh",
            "remesh.layout",
            "remesh.reshard",
            "remesh.pipeline",
            "remesh.testbed",
            "remesh.testing.pool",
            "remesh.comm.messages",
        ),
        *(
            "remesh.images",
            "remesh.rounds.leader",
            "remesh.mpi.stay",
            "remesh.mpi.lower.half",
            "remesh.dashboard.serve",
        ),
        *("remesh.cli", *(f"remesh.cli.{verb}" for verb in ("mpi", "plan", "pipeline", "testbed", "dashboard", "top"))),
    ],
)
def test_importing_it_does_not_import_torch(name: str) -> None:
    assert not {i for i in imports_of_all({name}) if _is_within(i, "torch")}


def test_the_launcher_loads_no_more_of_torch_than_torchruns_does() -> None:
    """An agent looks at no tensor: what it does load costs seconds on every node, before a flag is read."""
    heavy = (
        *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.nn.parallel"),
        *("torch._inductor", "torch._dynamo", "torch.utils.data", "numpy", "remesh.layout", "remesh.reshard"),
        "remesh.elastic.node.agent",  # of in-process jobs alone
    )
    loaded = imports_of_all({"remesh.run", "remesh.cli.run"})
    assert not sorted(name for name in loaded if any(_is_within(name, one) for one in heavy))
