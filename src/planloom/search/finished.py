"""From a solution to a plan, and from a plan back to the choice that gives its estimate."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

import numpy as np

from planloom.blocks import BlockGraph
from planloom.blocks.rings import CONTEXT_DIM
from planloom.cluster import Cluster, cluster_to_yaml
from planloom.errors import PlanError
from planloom.graph import fingerprint
from planloom.graph.fingerprint import summary
from planloom.layout import Axis, Mesh, Placement
from planloom.plan import Plan, Storage
from planloom.search.figures import Choice, block_figures, exchange_seconds, with_best_junctions
from planloom.search.network import Network
from planloom.search.parameters import StorageOption
from planloom.search.schedules import schedule_of
from planloom.search.solutions import Solution
from planloom.search.space import STAGES, Candidate, Shape, Wishes
from planloom.search.stages import Estimate, estimate_stages
from planloom.search.tables import Tables
from planloom.search.work import WorkPrices

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]


def plan_of(solution: Solution, tables: Tables, cluster: Cluster, batch: BatchSpec) -> Plan:
    """The plan of a solution."""
    network, shape, num_micro = tables.network, solution.candidate.shape, solution.candidate.num_micro
    graph = network.blocks.graph
    edges, schedule = np.array(solution.first_blocks), solution.candidate.schedule
    stages = np.searchsorted(edges, np.arange(len(network.blocks.blocks)), side="right") - 1
    return Plan(
        name=_name(solution.candidate),
        model=fingerprint(graph),
        summary=summary(graph),
        batch=dict(batch),
        meshes=stage_meshes(solution.candidate.placement) * schedule.stages_per_group,
        stages=tuple(int(s) for s in stages),
        strategies=tuple(_strategies(tables, solution.choice)),
        storage=_storage(tables, solution.choice),
        num_micro_batches=num_micro,
        schedule=schedule.name,
        orders=schedule.orders(shape.num_stages, num_micro),
        recompute=tuple(int(s) for s in np.flatnonzero(solution.choice.recomputed)),
        cluster=cluster_to_yaml(cluster),
    )


def _name(candidate: Candidate) -> str:
    parts = [str(candidate.shape), *([f"micro={candidate.num_micro}"] if candidate.num_micro > 1 else [])]
    return ",".join([*parts, *([str(candidate.schedule)] if candidate.schedule.name != "1f1b" else [])])


def _strategies(tables: Tables, choice: Choice) -> list[dict[str, tuple[str, ...]]]:
    network, names, found = tables.network, tables.shape.names, []
    for block in network.blocks.blocks:
        number = network.of_block[block.index]
        row = tables.strategies[network.variables[number].key].dims[choice.variables[number]]
        strategy: dict[str, tuple[str, ...]] = {}
        for name, d in zip(names, row, strict=True):
            if d >= 0:
                strategy[block.dims[d].name] = (*strategy.get(block.dims[d].name, ()), name)
        found.append(strategy)
    return found


def _storage(tables: Tables, choice: Choice) -> dict[str, Storage]:
    """By the first block that reads a parameter: where it is at home."""
    network, found = tables.network, dict[str, Storage]()
    for block in network.blocks.blocks:
        way = choice.storage[network.of_block[block.index]]
        if way < 0:
            continue
        option = tables.options[int(way)]
        for name in block.parameters:
            is_home = network.blocks.consumers[name] == (block.index,)
            if option.kind != "replicated" and is_home:
                found[name] = Storage(kind=option.kind, over=tables.shape.names[option.axis])
    return found


@lru_cache(maxsize=64)
def stage_meshes(placement: Placement) -> tuple[Mesh, ...]:
    """One mesh a stage: the devices of a placement, sliced along the axis of the stages."""
    rows = dict(zip(placement.axes, placement.matrix, strict=True))
    names, num_levels = placement.axes, len(placement.matrix[0])
    if names[0] != STAGES:
        raise PlanError("the stages must be the first axis of a placement", given=str(placement), required="pp first")
    counts = [prod(row[level] for row in placement.matrix) for level in range(num_levels)]
    numbers = np.zeros((), dtype=np.int64)
    for i, name in enumerate(names):
        for level, size in enumerate(rows[name]):
            stride = prod(rows[inside][level] for inside in names[i + 1 :]) * prod(counts[level + 1 :])
            numbers = np.add.outer(numbers, np.arange(size) * stride)
    axes = tuple(Axis(name=name, sizes=rows[name]) for name in names[1:])
    table = numbers.reshape(prod(rows[STAGES]), -1)
    return tuple(Mesh(axes=axes, devices=tuple(int(d) for d in row)) for row in table)


# -- and back


def candidate_of(plan: Plan, cluster: Cluster) -> Candidate:
    """The candidate that a plan is a solution of: all stages on equal meshes, digits on the cluster's levels."""
    axes, num_levels = plan.meshes[0].axes, len(cluster.levels)
    if plan.times or len(plan.groups) > len(plan.roles) or any(CONTEXT_DIM in own for own in plan.strategies):
        raise PlanError(
            f"plan {plan.name!r} has no estimate",
            given="blocks in pieces of time, attention round a ring, or stages that device groups share",
            required="a plan of the space that the search proves a bound of",
            todo="use planloom simulate",
        )
    if any(mesh.axes != axes for mesh in plan.meshes) or any(len(axis.sizes) != num_levels for axis in axes):
        raise PlanError(
            f"plan {plan.name!r} has no estimate",
            given="stages with different meshes, or axes that do not say on which levels they lie",
            required="a plan that the search made, or one on a placement of this cluster",
            todo="use planloom simulate",
        )
    used = [int(np.prod([axis.sizes[level] for axis in axes])) for level in range(num_levels)]
    stages = tuple(count // own for count, own in zip(cluster.level_counts, used, strict=True))
    names, sizes = tuple(axis.name for axis in axes), tuple(axis.size for axis in axes)
    kinds = tuple("data" if name == "dp" else "free" for name in names)
    num_groups = len(plan.groups)
    shape = Shape(num_stages=num_groups, names=names, kinds=kinds, sizes=sizes)  # type: ignore[arg-type]
    placement = Placement(axes=(STAGES, *names), matrix=(stages, *(axis.sizes for axis in axes)))
    schedule = schedule_of(plan.schedule, len(plan.meshes), num_groups)
    return Candidate(shape=shape, placement=placement, num_micro=plan.num_micro_batches, schedule=schedule)


def choice_of(plan: Plan, tables: Tables) -> Choice:
    """The choice that a plan stands for, in tables of its candidate alone."""
    network = tables.network
    count = len(network.variables)
    fixed = np.zeros(count, dtype=np.intp)
    storage = np.full(count, -1)
    for block in network.blocks.blocks:
        number = network.of_block[block.index]
        strategies = tables.strategies[network.variables[number].key]
        places = {dim.name: d for d, dim in enumerate(block.dims)}
        wanted = np.full(len(tables.shape.names), -1)
        for dim, axes in plan.strategies[block.index].items():
            for axis in axes:
                wanted[tables.shape.names.index(axis)] = places[dim]
        found = np.flatnonzero((strategies.dims == wanted).all(axis=1))
        if not len(found):
            raise PlanError(
                f"block {block.name} has a strategy outside the space of the search",
                given=str(plan.strategies[block.index]),
                required=f"a data axis on batch or experts, even splits of {[d.name for d in block.dims]}",
            )
        fixed[number] = found[0]
        if block.parameters:
            storage[number] = tables.options.index(_option(plan, tables, block.parameters, network.blocks))
    recomputed = np.zeros(len(network.chain), dtype=bool)
    recomputed[list(plan.recompute)] = True
    return Choice(variables=with_best_junctions(tables, 0, fixed), storage=storage, recomputed=recomputed)


def _option(plan: Plan, tables: Tables, parameters: Sequence[str], blocks: BlockGraph) -> StorageOption:
    own = [plan.storage[name] for name in parameters if name in plan.storage and len(blocks.consumers[name]) == 1]
    own = [storage for storage in own if storage.kind != "replicated"]
    if not own:
        return StorageOption("replicated")
    return StorageOption(own[0].kind, tables.shape.names.index(own[0].over))


def estimate_plan(plan: Plan, network: Network, works: WorkPrices, cluster: Cluster) -> Estimate:
    """The estimate of a finished plan, from the plan alone; equal to what the search reports of it."""
    candidate = candidate_of(plan, cluster)
    tables = Tables(network, works, cluster, candidate.shape, [candidate], Wishes())
    choice = choice_of(plan, tables)
    figures = block_figures(tables, 0, choice)
    stages = np.array(plan.stages)
    first = tuple(int(np.flatnonzero(stages == s)[0]) for s in range(len(plan.meshes)))
    exchange = exchange_seconds(tables, 0, choice, first)
    return estimate_stages(figures, first, plan.num_micro_batches, exchange, candidate.schedule)
