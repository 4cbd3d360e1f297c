"""Connect: collectives inside a stage, and exchanges between stages, that bring a tensor from layout to layout."""

from collections.abc import Callable

from planloom.collective import DigitsPrice, Synthesized, change_layout, synthesize
from planloom.errors import LayoutError, PlanError
from planloom.graph import Tensor
from planloom.layout import Layout
from planloom.program.exchange import plan_transfers
from planloom.program.overlap import coalesce
from planloom.program.transform import Splits
from planloom.program.values import Buffer, Collective, Instruction, Receive, Send, Slot, Wait

_NUM_WAYS = 32  # programs among which one that the wire can carry out on rows is looked for

MaskBuffer = Callable[[int, Slot], Buffer]
"""From a stage and the slot of a mask to the buffer that holds it in that layout."""


class Connections:
    """Changes of layout of device groups; `mask_buffer` finds the masks that rows of experts are moved with."""

    def __init__(self, splits: Splits, price: DigitsPrice, mask_buffer: MaskBuffer) -> None:
        self.graph, self.meshes, self.price = splits.blocks.graph, splits.plan.groups, price
        self._mask_buffer = mask_buffer

    def change(
        self, body: list[Instruction], stage: int, slot: Slot, source: Buffer, before: Layout, after: Layout, name: str
    ) -> Buffer:
        """Bring a buffer into another layout; the same buffer if nothing changes."""
        for collective in self.collectives(stage, slot, source, before, after, name):
            body += [collective, Wait(buffer=collective.target)]
            source = collective.target
        return source

    def collectives(
        self, stage: int, slot: Slot, source: Buffer, before: Layout, after: Layout, name: str
    ) -> list[Collective]:
        """The collectives, one after another, that bring a buffer into another layout, in a buffer of this name."""
        parts = self._programs(stage, slot, before, after)
        rows = self._rows(stage, slot, before) if parts else None
        if rows is not None:
            parts = (self._movable(stage, slot, before, after),)
        num_row_factors = len(self._mask(slot).sizes) if rows is not None else 0
        found = []
        for i, part in enumerate(parts):
            target = Buffer(name=f"{name}:{i}" if i + 1 < len(parts) else name, indexed=source.indexed)
            found.append(
                Collective(
                    tensor=slot.tensor,
                    source=source,
                    target=target,
                    steps=part.program(self.meshes[stage]).steps,
                    factors=part.factors,
                    sizes=part.local_sizes,
                    rows=rows,
                    num_row_dims=sum(len(subs) for subs in part.factors[:num_row_factors]),
                )
            )
            source = target
        return found

    def together(self, collectives: list[list[Collective]], *, takes_sources: bool = False) -> list[Instruction]:
        """Independent changes of layout, each of one collective or more, started together and awaited."""
        alone = [found[0] for found in collectives if len(found) == 1]
        body: list[Instruction] = list(coalesce(self.graph, alone, takes_sources=takes_sources))
        body += [Wait(buffer=collective.target) for collective in alone]
        for found in collectives:
            for collective in found if len(found) > 1 else ():
                body += [collective, Wait(buffer=collective.target)]
        return body

    def exchange(
        self,
        slot: Slot,
        sender: tuple[int, list[Instruction], Buffer, Layout],
        receiver: tuple[int, list[Instruction], Buffer, Layout],
    ) -> None:
        """A send in one stage's body and the receive with its wait in another's."""
        source_stage, source_body, source, before = sender
        target_stage, target_body, target, after = receiver
        channel = f"{target.name}:{source_stage}>{target_stage}"
        transfers = plan_transfers(slot.sizes, before, self.meshes[source_stage], after, self.meshes[target_stage])
        sizes, new_sizes = before.local_sizes(slot.sizes), after.local_sizes(slot.sizes)
        tensor = slot.tensor
        source_body.append(Send(tensor=tensor, channel=channel, source=source, transfers=transfers, sizes=sizes))
        target_body.append(Receive(tensor=tensor, channel=channel, target=target, transfers=transfers, sizes=new_sizes))
        target_body.append(Wait(buffer=target))

    def _programs(self, stage: int, slot: Slot, before: Layout, after: Layout) -> tuple[Synthesized, ...]:
        """What changes one layout into the other, cheapest; none if they are equal."""
        try:
            item_bytes = self.graph.tensors[slot.tensor].item_bytes
            parts = change_layout(before, after, self.meshes[stage], slot.sizes, self.price, item_bytes)
        except LayoutError as error:
            raise PlanError(
                f"{slot.tensor} cannot be brought from its producer to its consumer",
                given=f"layout {before}",
                required=f"layout {after}",
                todo="split the blocks on both sides alike, or over axes that divide the tensor",
            ) from error
        if len(parts) > 1 and self.graph.tensors[slot.tensor].rows:
            raise PlanError(
                f"the rows of experts {slot.tensor} would change their layout in {len(parts)} steps",
                given=f"layout {before}",
                required=f"layout {after}, in one step",
                todo="split experts and tokens over whole axes, in the same order",
            )
        return parts

    # -- rows of experts

    def _mask(self, slot: Slot) -> Tensor:
        return self.graph.tensors[self.graph.tensors[slot.tensor].rows]

    def _rows(self, s: int, slot: Slot, layout: Layout) -> Buffer | None:
        """The mask of a ragged tensor in the tensor's own layout, brought there in the forward."""
        if not self.graph.tensors[slot.tensor].rows:
            return None
        mask = self._mask(slot)
        count = len(mask.sizes)
        own = Layout(splits=layout.splits[:count])
        return self._mask_buffer(s, Slot(tensor=mask.name, layout=own, cotangent=None, sizes=slot.sizes[:count]))

    def _movable(self, s: int, slot: Slot, before: Layout, after: Layout) -> Synthesized:
        """The cheapest program that moves the rows of experts as rows, or as features of the same rows."""
        item_bytes, num_row_factors = self.graph.tensors[slot.tensor].item_bytes, len(self._mask(slot).sizes)
        ways = synthesize(
            before, after, self.meshes[s], slot.sizes, price=self.price, item_bytes=item_bytes, num_best=_NUM_WAYS
        )
        movable = []
        for way in ways:
            count = sum(len(subs) for subs in way.factors[:num_row_factors])
            steps = way.program(self.meshes[s]).steps
            mixed = any(len({dim < count for dim in (*step.along, *step.into)}) > 1 for step in steps)
            if not mixed and not any(step.kind in ("broadcast", "reduce", "scatter", "gather") for step in steps):
                movable.append((any(dim < count for step in steps for dim in (*step.along, *step.into)), way))
        if movable:  # rows that stay where they are need no counting, and are sent as any other array is
            return min(movable, key=lambda found: found[0])[1]
        raise PlanError(
            f"the rows of experts {slot.tensor} cannot be brought from one layout to the other",
            given=f"layout {before}",
            required=f"layout {after}, by collectives of rows or of features",
            todo="split experts and tokens over whole axes, and features alike on both sides",
        )
