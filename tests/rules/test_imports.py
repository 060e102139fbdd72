"""The walls of the house: which room may import which, which modules are pure, what costs no torch."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.rules.source_tree import Module, imports_of_all, module_names, modules


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


# What each room may import besides itself. The arrow of docs/architecture.md, row by row.
ARROW: dict[str, str] = {
    "foundation": "",
    "version": "",
    "wire": "foundation",
    "device": "foundation",
    "layout": "foundation",
    "groups": "device foundation",
    "comm": "device foundation",
    "resharding": "comm device foundation layout",
    "checkpoint": "comm device foundation layout resharding",
    # Names for users of Megatron Core: imported by nobody.
    "dist_checkpointing": "checkpoint comm device foundation layout resharding",
    "pipeline": "comm device foundation groups layout resharding",
    "elasticity": "checkpoint comm device foundation groups layout resharding wire",
    "testbed": "elasticity foundation wire",
    "dashboard": "foundation",
    # Unmodified programs, a wing of its own: see the wall below.
    "carried": "device foundation groups testbed wire",
    # Plug-ins of programs that others wrote: imported by who asks for one.
    "integrations": "checkpoint comm elasticity foundation groups layout resharding",
    "cli": "carried checkpoint dashboard elasticity foundation layout pipeline resharding testbed version wire",
    "__main__": "cli",
    "run": "cli",
}

# The same between the folders of a package: a row for each, with what it may import of the package besides itself.
# Modules beside the folders may import all folders, unless there is a row "".
_VALUES = "checkpoint_errors plan storage values"
INNER_ARROW: dict[str, dict[str, str]] = {
    "checkpoint": {
        "values": "checkpoint_errors",
        "storage": "checkpoint_errors",
        "plan": "checkpoint_errors values",
        "formats": _VALUES,
        "background": f"formats {_VALUES}",
        "run": f"background formats {_VALUES}",
        "foreign": f"formats run {_VALUES}",
    },
    "resharding": {
        "model": "",
        "schedule": "model",
        "planning": "model schedule",
        "pictures": "model planning schedule",
        "running": "model planning schedule",
    },
    # The schedules are pure, and know nothing of how they are run.
    "pipeline": {"": "", "running": "*"},
    "elasticity": {
        "model": "",
        "telemetry": "",
        "membership": "model",
        "store": "model",
        "snapshots": "training_state",
        "health": "membership model store telemetry",
        "training": "gradients health link model snapshots store telemetry training_state typed_values",
        "node": "health link membership model own_folder snapshots store telemetry",
        "launch": "membership model node store telemetry",
    },
    "carried": {
        "rounds": "",
        "images": "",
        "hosts": "images rounds",
        "mpi": "hosts images rounds",
        "torch": "hosts images rounds",
    },
    "carried.images": {"form": "", "look": "form", "write": "form look", "restore": "form look"},
    "carried.mpi": {
        "library": "",
        "calls": "",
        "in_place": "library",
        "lower": "arena calls channel extension library mpis native program_environment together",
    },
}
# What programs that are carried share with the rest: a reader who trains models never opens that wing. Hosts that are
# made on this machine (``--testbed``) come from the testbed's face.
_ROOMS_THROUGH_THE_WALL = {"device", "foundation", "groups", "wire"}
_MODULES_THROUGH_THE_WALL = {"remesh.testbed", "remesh.testbed.inside"}

# Rooms that are pure but for these modules ...
_SHELLS = {
    "layout": {f"remesh.layout.{name}" for name in ("from_torch", "numbers", "recorded", "torch_memory")},
    "resharding": {
        "remesh.resharding.reshard_api",
        "remesh.resharding.faces",
        "remesh.resharding.refit",
        "remesh.resharding.target",
        "remesh.resharding.windows",
        *(m.name for m in modules() if m.name.startswith("remesh.resharding.running.") and "telemetry" not in m.name),
    },
    "pipeline": {m.name for m in modules() if _is_within(m.name, "remesh.pipeline.running")},
}
# ... and pure modules in rooms that are not.
_PURE_ELSEWHERE = {
    "remesh.checkpoint.checkpoint_errors",
    "remesh.checkpoint.plan.flattened",
    "remesh.checkpoint.plan.manifest",
    "remesh.checkpoint.plan.reads",
    "remesh.checkpoint.plan.writes",
    "remesh.checkpoint.storage.joined_checksums",
    "remesh.checkpoint.values.description_checks",
    "remesh.checkpoint.values.outline",
    "remesh.checkpoint.values.state_split",
    "remesh.foundation.checksums",
    "remesh.foundation.collector",
    "remesh.dashboard.curve",
    "remesh.dashboard.story",
    "remesh.checkpoint.values.nests",
    "remesh.checkpoint.values.entities",
    "remesh.groups.blame",
    "remesh.elasticity.model.alike",
    "remesh.elasticity.model.failover",
    "remesh.elasticity.model.generation",
    "remesh.elasticity.health.health_machine",
    "remesh.elasticity.health.straggler_pace",
    "remesh.elasticity.health.verdicts",
    "remesh.elasticity.launch.flags",
    "remesh.elasticity.membership.exclusion",
    "remesh.elasticity.membership.instructions",
    "remesh.elasticity.membership.membership_machine",
    "remesh.elasticity.membership.rendezvous_state",
    "remesh.elasticity.membership.phases",
    "remesh.elasticity.membership.roster",
    "remesh.elasticity.membership.rules",
    "remesh.elasticity.membership.phase_state",
    "remesh.elasticity.membership.view",
    "remesh.elasticity.model.mesh_policy",
    "remesh.elasticity.telemetry.metrics",
    "remesh.elasticity.model.outcome",
    "remesh.elasticity.model.rank_assignment",
    "remesh.elasticity.snapshots.choice",
    "remesh.elasticity.snapshots.form",
    "remesh.elasticity.snapshots.snapshot_header",
    "remesh.elasticity.snapshots.shelves",
    "remesh.elasticity.store.card",
    "remesh.elasticity.store.endpoint",
    "remesh.wire.token",
    "remesh.elasticity.training.position",
    "remesh.foundation.errors",
    "remesh.foundation.exit_codes",
    "remesh.carried.images.form.family",
    "remesh.carried.images.form.format",
    "remesh.carried.images.form.increment",
    "remesh.carried.images.form.kinds",
    "remesh.carried.images.form.layers",
    "remesh.foundation.linux.proc_text",
    "remesh.carried.images.form.ranges",
    "remesh.carried.images.form.records",
    "remesh.carried.images.form.tree_format",
    "remesh.carried.mpi.calls.error_classes",
    "remesh.carried.mpi.calls.table",
    "remesh.carried.mpi.calls.wire_messages",
    "remesh.carried.mpi.calls.words",
    "remesh.carried.mpi.lower.accesses",
    "remesh.carried.mpi.lower.exchange_pattern",
    "remesh.carried.mpi.lower.exposure",
    "remesh.carried.mpi.lower.matching",
    "remesh.carried.mpi.together",
    "remesh.foundation.options",
    "remesh.carried.hosts.host_list",
    "remesh.carried.hosts.process_ids",
    "remesh.carried.hosts.slurm",
    "remesh.foundation.retention",
    "remesh.carried.rounds.answers",
    "remesh.carried.rounds.clock",
    "remesh.carried.rounds.drain",
    "remesh.carried.rounds.round_machine",
    "remesh.carried.rounds.members",
    "remesh.carried.rounds.status",
    "remesh.testbed.commands",
    "remesh.testbed.testbed_spec",
    "remesh.testbed.samples",
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
_NUMPY_ONLY_ROOMS = {"layout", "resharding"}
# Classes of Megatron Core keep their names.
_NAMES_OF_OTHERS = ("remesh.dist_checkpointing",)


def test_imports_follow_the_arrow() -> None:
    wrong = []
    for module in modules():
        if module.room == "":
            continue
        assert module.room in ARROW, f"room {module.room!r} has no row in the arrow: add one, say why it stands there"
        rooms = {[*name.split("."), "remesh"][1] for name in module.imports if _is_within(name, "remesh")}
        if others := rooms - {*ARROW[module.room].split(), module.room}:
            wrong.append(f"{module.name} imports {sorted(others)}; it may import {ARROW[module.room]}")
    assert not wrong, "\n".join(wrong)


def test_the_arrow_has_no_circle() -> None:
    TopologicalSorter({room: row.split() for room, row in ARROW.items()}).prepare()


def test_carried_programs_stand_behind_a_wall() -> None:
    wrong = []
    for module in modules():
        for name in sorted(module.mentions & module_names() - {"remesh"}):
            room = name.split(".")[1]
            if module.room == "carried":
                may = room in {"carried", *_ROOMS_THROUGH_THE_WALL} or name in _MODULES_THROUGH_THE_WALL
            else:
                may = room != "carried" or module.room == "cli"
            if not may:
                wrong.append(f"{module.name} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", INNER_ARROW)
def test_imports_between_the_folders_of_a_package_follow_its_own_arrow(package: str) -> None:
    wrong, rows, prefix = [], INNER_ARROW[package], f"remesh.{package}."
    assert _folders_of(package) == {*rows} - {""}, "a folder without a row, or a row without a folder"
    for module in modules():
        if not module.name.startswith(prefix):
            continue
        own = module.name[len(prefix) :].split(".")[0]
        row = rows.get(own, rows.get("", "*"))
        inside = {name[len(prefix) :].split(".")[0] for name in module.imports if name.startswith(prefix)}
        others = inside & {*rows} if own not in rows else inside
        if row != "*" and (others := others - {own, *row.split()}):
            wrong.append(f"{module.name} imports from {sorted(others)}; it may import from {row or 'nothing'}")
        # The face of a package hands out everything; inside, a module is named by its home.
        if f"remesh.{package}" in module.imports:
            wrong.append(f"{module.name} imports the face of its own package")
    assert not wrong, "\n".join(wrong)


def test_every_package_with_folders_has_an_inner_arrow() -> None:
    packages = {
        name.removeprefix("remesh.") for name in module_names() if len(_folders_of(name.removeprefix("remesh."))) > 1
    }
    assert packages - {"remesh"} == {*INNER_ARROW} - {"pipeline"}


def _folders_of(package: str) -> set[str]:
    """Names of the packages within a package."""
    found = {m.name for m in modules() if m.path.name == "__init__.py" and m.name.startswith(f"remesh.{package}.")}
    return {name.split(".")[-1] for name in found if name.count(".") == package.count(".") + 2}


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


def test_a_file_name_stands_for_one_thing() -> None:
    """So that a name in a stack trace tells its place. Verbs of the command line are files; others' names are
    theirs."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        if module.path.stem.startswith("__") or module.room in ("cli", "run", "dist_checkpointing"):
            continue
        if not _is_within(module.name, "remesh.carried.mpi.lower"):
            homes[module.path.stem].append(module.name)
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert not twice, "\n".join(f"{name}.py: {', '.join(found)}" for name, found in twice.items())


def test_private_names_of_torch_stand_in_one_module() -> None:
    found = []
    for module in modules():
        if module.name == "remesh.foundation.torch_private":
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
            "remesh.resharding",
            "remesh.pipeline",
            "remesh.testbed",
            "remesh.testbed.pool",
            "remesh.wire.messages",
        ),
        *(
            "remesh.carried.images",
            "remesh.carried.rounds.leader",
            "remesh.carried.mpi.mpi_job",
            "remesh.carried.mpi.lower.half",
            "remesh.dashboard.serve",
        ),
        *(
            "remesh.cli",
            *(f"remesh.cli.{verb}" for verb in ("ckpt", "mpi", "plan", "pipeline", "testbed", "dashboard", "top")),
        ),
    ],
)
def test_importing_it_does_not_import_torch(name: str) -> None:
    assert not {i for i in imports_of_all({name}) if _is_within(i, "torch")}


def test_the_launcher_loads_no_more_of_torch_than_torchruns_does() -> None:
    """An agent looks at no tensor: what it does load costs seconds on every node, before a flag is read."""
    heavy = (
        *("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.nn.parallel"),
        *("torch._inductor", "torch._dynamo", "torch.utils.data", "numpy", "remesh.layout", "remesh.resharding"),
        "remesh.elasticity.node.agent",  # of in-process jobs alone
    )
    loaded = imports_of_all({"remesh.run", "remesh.cli.run"})
    assert not sorted(name for name in loaded if any(_is_within(name, one) for one in heavy))
