"""Opening of a step with new shapes: the first forward of each stage, and the plans of the values that it shows.

What a stage makes is known once it has made it. So the stages do their first micro-batch one after the other, in the
order of the graph, as they would have to anyway: each needs what those before have made. What came out is kept for the
step; no module is called for the sake of a plan.

For each stage, with two gathers over the whole group, so that whatever is wrong is raised on all ranks alike:

1. All ranks plan the routes into it, from what the stages before have made, and compare them.
2. The values of the micro-batch cross.
3. The ranks of the stage run its forward, and tell what it made.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from remesh.comm.gather import Group, gather_from
from remesh.pipeline.graph import StageGraph
from remesh.pipeline.pipeline_error import PipelineError
from remesh.pipeline.running.edges import StageRoute
from remesh.pipeline.running.meeting import DOING, Places
from remesh.pipeline.running.stage import StageRules
from remesh.pipeline.running.step_runner import StepRun
from remesh.pipeline.running.values import Described, EdgeEnd, StageMesh, made_end, taken_end

PlanRoute = Callable[[tuple[int, int], Mapping[str, EdgeEnd], Mapping[str, EdgeEnd]], StageRoute]


@dataclass(frozen=True)
class Opened:
    """What the first micro-batch has shown; the same for all steps of the same shapes."""

    routes: tuple[StageRoute, ...]
    rules: Mapping[int, StageRules]
    """Of each stage of this rank."""
    taken: Mapping[str, EdgeEnd]
    """Values that the last stage takes."""


class StepOpening:
    """The opening of one step, on one rank."""

    def __init__(self, run: StepRun, graph: StageGraph, places: Places, group: Group) -> None:
        self._run = run
        self._graph = graph
        self._places = places
        self._group = group
        self._made: list[dict[str, Described]] = []
        """Of each stage that is done."""

    def run(self, mine: Collection[int], plan: PlanRoute) -> Opened:
        """Open the step for all stages; ``mine`` are this rank's. Called by every rank."""
        routes: list[StageRoute] = []
        rules: dict[int, StageRules] = {}
        taken: Mapping[str, EdgeEnd] = {}
        for index in range(self._graph.num_stages):
            coming = self._coming(index)
            taken = {name: self._taken_end(index, name, made) for name, made in coming.items()}
            into = self._plan_into(index, taken, plan)
            self._run.add_routes(into)
            self._run.cross_first(into)
            if index in mine:
                rules[index] = StageRules(self._seen_by_others(index, coming))
            tell = functools.partial(self._tell, index, rules.get(index))
            told = [each for each in gather_from(tell, self._group, DOING) if each is not None]
            self._made.append(self._read(index, told))
            routes += into
        return Opened(tuple(routes), rules, taken)

    def _coming(self, stage: int) -> dict[str, Described]:
        """What a stage takes, by name."""
        coming: dict[str, Described] = {}
        for edge in self._graph.edges_into(stage):
            if edge.name in coming:
                raise PipelineError(
                    f"{DOING}: stage {stage} takes two values named {edge.name!r}, expected names of their own, "
                    "because its module gets them by name; rename one"
                )
            coming[edge.name] = self._made[edge.source][edge.name]
        return coming

    def _taken_end(self, stage: int, name: str, made: Described) -> EdgeEnd:
        spec = self._places.spec_taken(stage, name, len(made.shape))
        return taken_end(spec, made, self._places.meshes[stage])

    def _plan_into(self, stage: int, taken: Mapping[str, EdgeEnd], plan: PlanRoute) -> list[StageRoute]:
        routes: list[StageRoute] = []

        def tell() -> list[str]:
            for source in sorted({edge.source for edge in self._graph.edges_into(stage)}):
                names = [edge.name for edge in self._graph.edges_into(stage) if edge.source == source]
                at = self._places.meshes[source]
                made = {name: made_end(self._made[source][name], at) for name in names}
                routes.append(plan((source, stage), made, {name: taken[name] for name in names}))
            return [way.transfer.digest for each in routes for way in (each.forward, each.backward) if way]

        if taken:
            digests = gather_from(tell, self._group, DOING)
            other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
            if other is not None:
                raise PipelineError(
                    f"{DOING}: expected the same routes between stages on all {len(digests)} ranks, found others on "
                    f"rank {other} than on rank 0; give all ranks the same options"
                )
        return routes

    def _tell(self, stage: int, rules: StageRules | None) -> Any:
        if rules is None:  # a stage of others
            return None
        made = self._run.run_first(stage, self._places.meshes[stage], rules)
        return {name: astuple(each) for name, each in made.items()}

    def _read(self, stage: int, told: Sequence[Any]) -> dict[str, Described]:
        if any(each != told[0] for each in told):
            raise PipelineError(
                f"{DOING}: the ranks of stage {stage} have values of different shapes, found {told}; cut values evenly"
            )
        return {
            name: Described(spec, tuple(shape), dtype, tuple(axes), reduction, aliases)
            for name, (spec, shape, dtype, axes, reduction, aliases) in told[0].items()
        }

    def _seen_by_others(self, stage: int, coming: Mapping[str, Described]) -> list[str]:
        """Values into whose memory the stage must not write: in one process a stage that comes later would see it."""
        found = []
        for edge in self._graph.edges_into(stage):
            aliases = coming[edge.name].aliases
            later = [other for other in self._graph.edges_out_of(edge.source) if other.target >= stage]
            if edge.name in aliases or any(
                other.name in aliases or (other.name == edge.name and other.target > stage) for other in later
            ):
                found.append(edge.name)
        return found


def share_of_loss(at: StageMesh, told: Sequence[Any], taken: Mapping[str, EdgeEnd], rank: int) -> float:
    """What the loss of a rank of the last stage counts beside those of other data-parallel ranks; 1 on average.

    A loss is a mean over what its rank was given: it counts by the elements of its target, or of its batch and of what
    it takes. ``told`` are the shapes of batch and target on every rank, ``taken`` the values that the last stage takes.
    """
    given = Counter[tuple[int, ...]]()
    for other in at.mesh.world_ranks:
        batch, target = ([math.prod(shape) for *_, shape in each] for each in told[other])
        own = sum(shard.box.size for end in taken.values() for shard in end.value.shards_of(other))
        given[at.place_of(other)] += sum(target) if target else sum(batch) + own
    return at.width * given[at.place_of(rank)] / given.total() if given.total() else 1.0
