"""An independent oracle: a program run on concrete tensors, all devices in one process, collectives by definition.

It shares nothing with the verifier and nothing with the wire; only the local functions of runs are the runtime's own. A
program means what this computes. Programs that read what is not there, or that cannot go on, raise `Broken`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.collective import Step
from planloom.execute import LocalRun, RunVjp, compute_given, local_slice
from planloom.program import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Forward,
    Free,
    Program,
    Receive,
    Seed,
    Send,
    Sum,
    Update,
    Wait,
)


class Broken(Exception):
    """The program cannot be carried out."""


Place = tuple[Buffer, int]


class Emulation:
    """One training step of a program: `run` returns losses and new parameters of every device."""

    def __init__(
        self, blocks: BlockGraph, program: Program, whole: dict[str, Tensor], buffers: dict[str, Tensor], lr: float
    ) -> None:
        self.blocks, self.program, self.lr = blocks, program, lr
        self.buffers = buffers
        self.memory: dict[int, dict[Place, Tensor]] = {device: {} for device in program.devices}
        self.saved: dict[int, dict[tuple[int, int], RunVjp]] = {device: {} for device in program.devices}
        self.mail: dict[tuple[str, int, int, int, int], Tensor] = {}
        self.received: dict[tuple[int, Place], tuple[Receive, int]] = {}
        self.gradients: dict[int, dict[str, Tensor]] = {device: {} for device in program.devices}
        self.shards: dict[int, dict[str, Tensor]] = {device: {} for device in program.devices}
        self.local: dict[tuple[int, int], LocalRun] = {}
        for stage in program.stages:
            for device in stage.mesh.devices:
                for stored in stage.parameters:
                    factors = blocks.graph.tensors[stored.name].factors
                    at = stage.mesh.coordinates(device)
                    box = stored.layout.box(stored.sizes, at)
                    self.memory[device][stored.buffer, -1] = local_slice(whole[stored.name], factors, box).clone()
                    shard = local_slice(whole[stored.name], factors, stored.optimizer_layout.box(stored.sizes, at))
                    self.shards[device][stored.name] = shard.clone()

    def run(self, batch: dict[str, Tensor]) -> None:
        self.given = compute_given(self.blocks.graph, {**batch, **self.buffers}, torch.device("cpu"))
        counters = dict.fromkeys(range(len(self.program.stages)), 0)
        scripts = [
            [(i, call.micro) for call in stage.calls for i in stage.bodies[call.body]] for stage in self.program.stages
        ]
        while any(counters[s] < len(script) for s, script in enumerate(scripts)):
            moved = False
            for s, script in enumerate(scripts):
                while counters[s] < len(script) and self._step(s, *script[counters[s]]):
                    counters[s] += 1
                    moved = True
            if not moved:
                raise Broken("deadlock")

    def _step(self, s: int, instruction: object, micro: int) -> bool:
        """Carry out one instruction on all devices of a stage; False if it must wait."""
        devices = self.program.stages[s].mesh.devices
        if isinstance(instruction, Collective):
            self._collective(devices, instruction, micro)
            return True
        if isinstance(instruction, Wait):
            return all([self._wait(device, instruction, micro) for device in devices])
        for device in devices:
            self._local(device, s, instruction, micro)
        return True

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _get(self, device: int, buffer: Buffer, micro: int) -> Tensor:
        place = self._place(buffer, micro)
        if place not in self.memory[device]:
            raise Broken(f"{buffer} is not there on {device}")
        return self.memory[device][place]

    def _set(self, device: int, buffer: Buffer, micro: int, value: Tensor) -> None:
        self.memory[device][self._place(buffer, micro)] = value

    def _local(self, device: int, s: int, instruction: object, micro: int) -> None:
        get: Callable[[Buffer], Tensor] = lambda buffer: self._get(device, buffer, micro)  # noqa: E731
        match instruction:
            case Forward(run=run, inputs=inputs, outputs=outputs):
                if (device, run) not in self.local:
                    mesh = self.program.stages[s].mesh
                    self.local[device, run] = LocalRun(
                        self.blocks,
                        self.program.runs[run],
                        mesh.coordinates(device),
                        num_micro=self.program.num_micro_batches,
                    )
                vjp = self._checked(lambda: RunVjp(self.local[device, run], [get(b) for b in inputs], self.given, micro))
                self.saved[device][run, micro] = vjp
                for buffer, value in zip(outputs, vjp.take_outputs(), strict=True):
                    self._set(device, buffer, micro, value)
            case Backward(run=run, cotangents=cotangents, outputs=outputs):
                vjp = self.saved[device].pop((run, micro))
                values = self._checked(lambda: vjp.backward([None if b is None else get(b) for b in cotangents]))
                for buffer, value in zip(outputs, values, strict=True):
                    if buffer is not None:
                        self._set(device, buffer, micro, value)
            case Seed(target=target):
                loss = self.blocks.graph.tensors[self.blocks.graph.loss]
                self._set(device, target, micro, torch.ones((), dtype=getattr(torch, loss.dtype)))
            case Sum(target=target, sources=sources):
                total = self._checked(lambda: torch.stack([get(b) for b in sources]).sum(0))
                self._set(device, target, micro, total)
            case Accumulate(target=target, source=source):
                place = self._place(target, micro)
                old = self.memory[device].get(place)
                new = get(source) if old is None else self._checked(lambda: old + get(source))
                self.memory[device][place] = new
            case Free(buffer=buffer):
                get(buffer)
                del self.memory[device][self._place(buffer, micro)]
            case Send(channel=channel, source=source, transfers=transfers, sizes=sizes):
                for i, t in enumerate(transfers):
                    if t.source == device:
                        part = self._checked(lambda: get(source).reshape(sizes))
                        for dim, (start, stop) in enumerate(t.source_box):
                            part = part.narrow(dim, start, stop - start)
                        self.mail[channel, micro, i, t.source, t.target] = part.clone()
            case Receive(target=target):
                self.received[device, self._place(target, micro)] = (instruction, micro)
            case Update(parameters=parameters, gradients=gradients, targets=targets):
                for name, gradient, target in zip(parameters, gradients, targets, strict=True):
                    self.gradients[device][name] = get(gradient)
                    shard = self.shards[device][name]
                    shard = self._checked(lambda: shard - self.lr * get(gradient).reshape(shard.shape))  # noqa: B023
                    self.shards[device][name] = shard
                    self._set(device, target, micro, shard)
            case _:
                raise AssertionError(instruction)

    def _checked(self, function: Callable[[], object]) -> object:
        try:
            return function()
        except RuntimeError as error:
            raise Broken(str(error)) from error

    def _wait(self, device: int, wait: Wait, micro: int) -> bool:
        place = self._place(wait.buffer, micro)
        if place in self.received.keys() and False:
            return True
        key = (device, place)
        if key in self.received:
            receive, at = self.received[key]
            tensor = self.blocks.graph.tensors[receive.tensor]
            result = torch.full(receive.sizes, float("nan"), dtype=getattr(torch, tensor.dtype))
            for i, t in enumerate(receive.transfers):
                if t.target == device:
                    mail = (receive.channel, at, i, t.source, t.target)
                    if mail not in self.mail:
                        return False
                    part = result
                    for dim, (start, stop) in enumerate(t.target_box):
                        part = part.narrow(dim, start, stop - start)
                    self._checked(lambda: part.copy_(self.mail[mail]))  # noqa: B023
            del self.received[key]
            self._set(device, receive.target, at, result.reshape(_local_shape(tensor.factors, receive.sizes)))
        if wait.free:
            for other in [p for p in self.memory[device] if p[0] == wait.buffer]:
                if wait.every or other[1] == (micro - wait.lag if wait.buffer.indexed else -1):
                    del self.memory[device][other]
        return True

    def _collective(self, devices: tuple[int, ...], instruction: Collective, micro: int) -> None:
        tensor = self.blocks.graph.tensors[instruction.tensor]
        sizes = instruction.sizes
        arrays = {d: self._checked(lambda d=d: self._get(d, instruction.source, micro).reshape(sizes)) for d in devices}
        for step in instruction.steps:
            arrays = self._checked(lambda step=step: _apply(step, arrays))
        for device, array in arrays.items():
            shape = _local_shape(tensor.factors, tuple(array.shape))
            self._set(device, instruction.target, micro, array.reshape(shape).clone())


def _local_shape(factors: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> list[int]:
    left = list(sizes)
    shape = []
    for dim in factors:
        length = 1
        for _ in dim:
            length *= left.pop(0)
        shape.append(length)
    return shape


def _apply(step: Step, arrays: dict[int, Tensor]) -> dict[int, Tensor]:
    result = {}
    for group in step.groups:
        parts = [arrays[device] for device in group]
        if step.kind in ("all_reduce", "reduce_scatter"):
            stacked = torch.stack(parts)
            whole = stacked.sum(0) if step.combine == "sum" else stacked.amax(0)
        elif step.kind in ("all_gather", "all_to_all"):
            whole = torch.cat(parts, step.along)
        for position, device in enumerate(group):
            if step.kind in ("all_reduce", "all_gather"):
                result[device] = whole
            elif step.kind in ("reduce_scatter", "all_to_all"):
                result[device] = whole.chunk(len(group), step.into)[position]
            elif step.kind == "slice":
                result[device] = arrays[device].chunk(len(group), step.into)[position]
            else:
                result[device] = arrays[device] if position == 0 else torch.zeros_like(arrays[device])
    return result
