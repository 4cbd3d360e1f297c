"""The loss: summed over micro-batches where it is made, completed once a step, told to all device groups."""

from collections.abc import Iterable, Sequence

from planloom.program.bodies import StageBodies
from planloom.program.connect import Connections
from planloom.program.values import Buffer, Free, Slot, Sum, Wait

LOSS = Buffer(name="loss")
LOSS_TOTAL = Buffer(name="loss:total")


def complete_loss(
    connections: Connections, stages: Sequence[StageBodies], slot: Slot, makers: Iterable[int], told: Iterable[int]
) -> None:
    """In the exits. `makers`: the loss's own group, then those with copies of its stage; `told`: those that need it."""
    home, *copies = makers
    whole, parts = slot.layout.completed(), []
    for group in (home, *copies):
        body, name = stages[group].exit, "loss:here" if copies else LOSS.name
        complete = connections.change(body, group, slot, LOSS_TOTAL, slot.layout, whole, name)
        if group != home:
            received = Buffer(name=f"loss:from{group}")
            connections.exchange(slot, (group, body, complete, whole), (home, stages[home].exit, received, whole))
            body.append(Wait(buffer=complete, free=True))
            body += [Free(buffer=LOSS_TOTAL)] if complete != LOSS_TOTAL else []
            complete = received
        parts.append(complete)
    body = stages[home].exit
    if parts != [LOSS]:
        body.append(Sum(tensor=slot.tensor, target=LOSS, sources=tuple(parts)))
    body += [Free(buffer=part) for part in dict.fromkeys((*parts, LOSS_TOTAL)) if part != LOSS]
    others = list(told)
    for s in others:
        connections.exchange(slot, (home, body, LOSS, whole), (s, stages[s].exit, LOSS, whole))
    if others:
        body.append(Wait(buffer=LOSS))
