"""Bytes that one device hands to the network in a step, by axis: what `execute.wire` gives to `torch.distributed`.

| step            | whole, by the library's own collective | by rings of messages              |
|-----------------|----------------------------------------|-----------------------------------|
| all_reduce      | the array                              |                                   |
| all_gather      | the array                              | the array, (members − 1) times    |
| reduce_scatter  | the array                              | the array less the own piece      |
| all_to_all      | the array                              |                                   |
| broadcast, …    | the array, by those who take part      |                                   |
| exchange        | what a device sends                    |                                   |

Rows of experts are counted as a balanced routing gives them.
"""

from math import prod

from planloom.collective import Step, rings_from_bytes
from planloom.graph import Graph
from planloom.program import Program, Send, collectives_in
from planloom.program.sizes import sizes_of_steps
from planloom.simulate.engine import PIPELINE
from planloom.simulate.script import axis_of


def payload_bytes(graph: Graph, program: Program, device: int, *, library: str) -> dict[str, int]:
    """Bytes by axis; those between stages under "pp"."""
    stage = program.stages[program.stage_of(device)]
    found: dict[str, int] = {}
    for call in stage.calls:
        for instruction in stage.bodies[call.body]:
            if isinstance(instruction, Send):
                item_bytes = graph.tensors[instruction.tensor].item_bytes
                for transfer in instruction.transfers:
                    if transfer.source == device != transfer.target:
                        count = prod(stop - start for start, stop in transfer.source_box)
                        found[PIPELINE] = found.get(PIPELINE, 0) + item_bytes * count
            collectives = collectives_in(instruction)
            if not collectives:
                continue
            columns = zip(*(sizes_of_steps(graph, collective) for collective in collectives), strict=True)
            for step, sizes in zip(collectives[0].steps, columns, strict=False):
                if not step.is_local and step.group_of(device) is not None:
                    axis = axis_of(program.mesh_at(program.stage_of(device), collectives[0].target), step.groups)
                    found[axis] = found.get(axis, 0) + _handed_over(step, sum(sizes), library)
    return found


def _handed_over(step: Step, num_bytes: int, library: str) -> int:
    start = rings_from_bytes(library, step.kind, step.group_size)
    if start is None or num_bytes < start:
        return num_bytes
    others = step.group_size - 1
    return num_bytes * others if step.kind == "all_gather" else num_bytes * others // step.group_size
