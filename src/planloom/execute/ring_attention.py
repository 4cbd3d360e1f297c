"""Attention in the turns of a ring: results over some keys and over others combine by their logarithms of sums.

A turn computes attention of the device's queries with the keys and values at hand: o' and l' = log Σ exp(scores). With
o and l of the turns before,

    l'' = log(exp(l) + exp(l'))        o'' = o exp(l − l'') + o' exp(l' − l'')

an associative combination of pairs (o, l), whose order does not matter; where it ends, a sink adds its own logit to l.
Its vjp needs no intermediate pair: with the final o and l, the backward of flash attention gives for each turn's keys
and values their exact cotangents, and that turn's part of the queries' (`capture.flash`).

The pair is kept in float32 at least, and rounded once at the end. Between forward and backward a ring keeps queries,
results, logarithms and what autograd saves of the operators before attention; keys and values come again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from planloom.blocks import BlockGraph
from planloom.blocks.rings import Ring
from planloom.capture.flash import Sight, attend, attend_backward
from planloom.capture.sinks import TARGET as SINKS
from planloom.capture.sinks import sinks_cotangent
from planloom.execute.local import At, Key, LocalRun, Step, fill
from planloom.execute.vjp import Enter
from planloom.layout import Digit
from planloom.program import Run, Turn

_SCALE_ARGUMENT = 7
"""The place of the scale among the arguments of attention with sinks."""


class LocalTurn:
    """A turn of a ring at the given coordinates of its mesh, or what opens it."""

    def __init__(self, blocks: BlockGraph, run: Run, coordinates: Mapping[Digit, int], *, num_micro: int) -> None:
        part, turn = run.blocks[0], run.turn
        ring = blocks.blocks[part.block].ring
        assert turn is not None
        assert ring is not None
        self.run, self.turn, self.ring, self.block = run, turn, ring, part.block
        self.place = turn.position(coordinates)
        self.outputs = blocks.blocks[part.block].outputs
        whole = replace(run, blocks=(replace(part, turn=None),), outputs=())
        self.whole = LocalRun(blocks, whole, coordinates, num_micro=num_micro) if turn.opens else None
        """The block with all its operators, for the opening."""


class Rings:
    """The rings that are open on a device."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], RingVjp] = {}

    def forward(
        self, local: LocalTurn, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int, *, saves: bool
    ) -> tuple[Tensor, ...]:
        """What a turn makes; `saves`: a backward comes, for which the ring stays open behind its last turn."""
        key = (local.block, micro)
        if local.turn.opens:
            self._open[key] = RingVjp(local, inputs, given, micro)
        else:
            self._find(key).forward(local, *inputs)
        outputs = self._open[key].take_outputs()
        if local.turn.is_last and not saves:
            del self._open[key]
        return outputs

    def backward(
        self, local: LocalTurn, cotangents: Sequence[Tensor | None], again: Sequence[Tensor], micro: int
    ) -> list[Tensor | None]:
        """The cotangents of what a turn reads; `again`: its keys and values."""
        key = (local.block, micro)
        ring = self._find(key)
        if not local.turn.opens:
            return ring.backward(local, cotangents, *again)
        del self._open[key]
        return ring.close(cotangents)

    def _find(self, key: tuple[int, int]) -> "RingVjp":
        if key not in self._open:
            raise RuntimeError(f"the ring of block {key[0]} is not open in micro-batch {key[1]}")
        return self._open[key]


class RingVjp:
    """A ring on one device for one micro-batch, from its opening to the end of its backward."""

    def __init__(self, local: LocalTurn, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> None:
        """Open it: carry out what comes before attention."""
        whole = local.whole
        assert whole is not None
        self._ring, self._micro, self._names = local.ring, micro, local.outputs
        self._slots = local.run.inputs
        self._shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        anchor = torch.zeros((), requires_grad=True)
        before, self._attention, self._after = _parts(whole.steps, self._ring)
        table: dict[Key, Tensor] = dict(whole.given_tensors(given, micro))
        entered: list[Tensor] = []
        with torch.enable_grad():
            for i, (slot, tensor) in enumerate(zip(self._slots, inputs, strict=True)):
                entered.append(Enter.apply(anchor, tensor) if slot.cotangent is not None else tensor)
                table["slot", str(i)] = entered[-1]
            for step in before:
                table[step.result] = _called(step, table, micro)
        self._edges_in = [
            None if slot.cotangent is None else get_gradient_edge(tensor)
            for slot, tensor in zip(self._slots, entered, strict=True)
        ]
        places = [arg.key for arg in self._attention.args if isinstance(arg, At)]
        made = [table[place] for place in places[:3]]
        self._edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in made]
        self._query = made[0].detach().transpose(1, 2).contiguous().transpose(1, 2)  # apart from what it was part of
        self._sinks_at: Key | None = places[3] if whole.graph.ops[self._ring.op].target == SINKS else None
        self._sinks = None if self._sinks_at is None else table[self._sinks_at].detach()
        self._of_sinks: Tensor | None = None
        self._scale = self._find_scale()
        self._result: Tensor | None = None
        self._sums: Tensor | None = None
        self._state: list[Tensor] = []
        self._cotangent: Tensor | None = None
        self._of_query: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = tuple(tensor.detach().contiguous() for tensor in made[1:3])

    def take_outputs(self) -> tuple[Tensor, ...]:
        """What the last of its runs has made, which this object then forgets."""
        outputs, self._outputs = self._outputs, ()
        return outputs

    # -- turns

    def forward(self, local: LocalTurn, keys: Tensor, values: Tensor) -> None:
        """One turn."""
        sight, query = self._sight(local.turn, local.place, keys), self._query
        if not sight.sees_nothing(query.shape[2], keys.shape[2]):
            result, sums, self._state = attend(query, keys, values, None, sight, self._scale)
            self._combine(result, sums)
        if local.turn.is_last:
            self._outputs = self._finish()

    def backward(
        self, local: LocalTurn, cotangents: Sequence[Tensor | None], keys: Tensor, values: Tensor
    ) -> list[Tensor | None]:
        """The cotangents of a turn's keys and values; the last turn comes first."""
        if local.turn.is_last:
            self._begin_backward(cotangents)
        if self._cotangent is None or self._result is None or self._sums is None:
            raise RuntimeError("a ring goes back before it has a cotangent")
        sight, query = self._sight(local.turn, local.place, keys), self._query
        if sight.sees_nothing(query.shape[2], keys.shape[2]):
            return [torch.zeros_like(keys), torch.zeros_like(values)]
        of_query, of_keys, of_values = attend_backward(
            self._cotangent, query, keys, values, None, self._result, self._sums, self._state, sight, self._scale
        )
        wide = of_query.to(_wide(of_query.dtype))
        self._of_query = wide if self._of_query is None else self._of_query.add_(wide)
        return [of_keys.contiguous(), of_values.contiguous()]

    def close(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The cotangents of what the opening run read, from those of its keys and values."""
        assert self._of_query is not None
        given = [self._of_query.to(self._query.dtype), *cotangents]
        pairs = [
            (edge, value)
            for edge, value in zip(self._edges, given, strict=True)
            if edge is not None and value is not None
        ]
        targets = [edge for edge in self._edges_in if edge is not None]
        found = iter(
            torch.autograd.grad([edge for edge, _ in pairs], targets, [value for _, value in pairs], allow_unused=True)
            if pairs and targets
            else [None] * len(targets)
        )
        results: list[Tensor | None] = []
        for i, (edge, (shape, dtype, device)) in enumerate(zip(self._edges_in, self._shapes, strict=True)):
            gradient = next(found) if edge is not None else None
            if self._sinks_at == ("slot", str(i)):
                gradient = self._of_sinks
            if edge is not None and gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            results.append(None if gradient is None else gradient.contiguous())
        return results

    # -- inside

    def _sight(self, turn: Turn, place: int, keys: Tensor) -> Sight:
        other = (place - turn.number) % turn.count
        offset = (place - other) * keys.shape[2]
        return Sight(is_causal=self._ring.is_causal, window=self._ring.window, offset=offset)

    def _combine(self, result: Tensor, sums: Tensor) -> None:
        result = result.to(_wide(result.dtype))
        if self._result is None or self._sums is None:
            self._result, self._sums = result, sums
            return
        both = torch.logaddexp(self._sums, sums)
        for part, own in ((self._result, self._sums), (result, sums)):  # both are this ring's own: in place
            part.mul_((own - both).exp_().unsqueeze(-1))
        self._result, self._sums = self._result.add_(result), both

    def _finish(self) -> tuple[Tensor, ...]:
        """The results with all keys, and what comes behind attention."""
        if self._result is None or self._sums is None:
            raise RuntimeError("a ring ends before any query has met a key")
        if self._sinks is not None:
            whole = torch.logaddexp(self._sums, self._sinks.to(self._sums.dtype).view(1, -1, 1))
            self._result = self._result.mul_((self._sums - whole).exp_().unsqueeze(-1))
            self._sums = whole
        self._result = self._result.to(self._query.dtype)
        table: dict[Key, Tensor] = {}
        with torch.enable_grad():
            entered = Enter.apply(torch.zeros((), requires_grad=True), self._result)
            table[self._attention.result] = entered
            for step in self._after:
                table[step.result] = _called(step, table, self._micro)
            outputs = [table["made", tensor] for tensor in self._names]
        self._edge_behind = get_gradient_edge(entered)
        self._edges_out = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
        return tuple(tensor.detach() for tensor in outputs)

    def _begin_backward(self, cotangents: Sequence[Tensor | None]) -> None:
        pairs = [
            (edge, value)
            for edge, value in zip(self._edges_out, cotangents, strict=True)
            if edge is not None and value is not None
        ]
        (found,) = torch.autograd.grad([edge for edge, _ in pairs], [self._edge_behind], [value for _, value in pairs])
        self._cotangent = found
        if self._sinks is not None:
            assert self._result is not None and self._sums is not None
            self._of_sinks = sinks_cotangent(found, self._sinks, self._result, self._sums)

    def _find_scale(self) -> float:
        if self._sinks is not None:
            return float(self._attention.args[_SCALE_ARGUMENT])
        scale = self._attention.kwargs.get("scale")
        return float(self._query.shape[-1] ** -0.5 if scale is None else scale)


def _parts(steps: Sequence[Step], ring: Ring) -> tuple[list[Step], Step, list[Step]]:
    """What a block does before attention, attention, and what it does with its result."""
    at = next(i for i, step in enumerate(steps) if step.result == ("made", ring.result))
    return list(steps[:at]), steps[at], list(steps[at + 1 :])


def _called(step: Step, table: Mapping[Key, Tensor], micro: int) -> Tensor:
    return step.function(*fill(step.args, table, micro), **fill(step.kwargs, table, micro))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(dtype, torch.float32)
