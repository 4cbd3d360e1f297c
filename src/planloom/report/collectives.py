"""Collective programs in words: which collective over how many members of which levels, in which order."""

from collections import Counter
from collections.abc import Sequence

from planloom.cluster import Cluster
from planloom.collective import Step
from planloom.collective.geometry import geometry_of_groups
from planloom.program import Program, collectives_in


def steps_words(cluster: Cluster, steps: Sequence[Step]) -> str:
    """`reduce-scatter device×2 → all-reduce node×2 → all-gather device×2`; steps that send nothing are left out."""
    return " → ".join(_step_words(cluster, step) for step in steps if not step.is_local)


def _step_words(cluster: Cluster, step: Step) -> str:
    name = step.kind.replace("_", "-")
    geometry = geometry_of_groups(cluster, step.groups)
    if geometry is None:
        return f"{name} among {step.group_size}"
    over = (f"{cluster.levels[c.level].name}×{c.members}" for c in geometry.crossings)
    return f"{name} {'·'.join(over)}"


def collectives_of(cluster: Cluster, program: Program) -> Counter[str]:
    """How often every collective program is started in the bodies of a program; coalesced ones count once."""
    return Counter(
        words
        for stage in program.stages
        for body in stage.bodies.values()
        for instruction in body
        for collective in collectives_in(instruction)[:1]
        if (words := steps_words(cluster, collective.steps))
    )
