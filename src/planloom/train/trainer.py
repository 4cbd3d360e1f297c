"""`parallelize(model, plan, optimizer=…).step(batch)`: the public API of training."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import Batch, batch_spec, tensors_of
from planloom.capture.batch import arguments_from_spec
from planloom.collective import change_layout
from planloom.errors import TrainingError
from planloom.execute.compiled import CompiledRuns
from planloom.execute.sharing import shared_capture
from planloom.execute.wire import PeerLostError, Wire
from planloom.layout import Layout
from planloom.plan import Plan, require_model
from planloom.program import Proof, build_program, verify_program
from planloom.simulate import Event, Timeline
from planloom.train.handing_over import HandedOver
from planloom.train.runtime import OptimizerFactory, Runtime
from planloom.train.watch import Watch, start_watch

DEFAULT_TIMEOUT_SECONDS = 600.0
Result = TypeVar("Result")


class Trainer:
    """A model in training under a plan: `step` trains, `parameters` gives whole parameters back."""

    def __init__(
        self,
        model: nn.Module,
        blocks: BlockGraph,
        plan: Plan,
        optimizer: OptimizerFactory,
        *,
        timeout_seconds: float,
        watch: Watch,
        owns_watch: bool,
        seed: int,
        compiled: bool,
    ) -> None:
        self.plan, self.blocks, self._watch, self._owns_watch = plan, blocks, watch, owns_watch
        self.rank = dist.get_rank()
        self._model, self._spec = model, plan.batch
        self.program = build_program(blocks, plan)
        self.proof: Proof = verify_program(blocks, self.program)
        self._wire = Wire(self.rank, timeout_seconds=timeout_seconds)
        at = next(model.parameters()).device
        fixed = dict(model.named_buffers()) | dict(model.named_parameters())
        buffers = {name: fixed.pop(name).detach() for name in blocks.graph.buffers}
        del fixed
        runs, handed_over = CompiledRuns() if compiled else None, HandedOver(model, blocks.graph.parameters)
        self.runtime = self._communicating(
            lambda: Runtime(
                blocks,
                self.program,
                self.rank,
                handed_over,
                buffers,
                optimizer,
                self._wire,
                seed=seed,
                at=at,
                **({"make_local": runs.compile} if runs is not None else {}),
            )
        )
        handed_over.drop_rest()
        self._gather_groups()

    def step(self, batch: Batch) -> float:
        """One step on the whole global batch; the loss, the same on every rank."""
        self._require_batch(batch)
        at = self.runtime.at
        moved = {name: tensor.to(at) for name, tensor in tensors_of(batch, self._model).items()}
        return float(self._communicating(lambda: self.runtime.step(moved)))

    def timed_step(self, batch: Batch) -> tuple[float, Timeline]:
        """One step, with what happened when on this rank."""
        self.runtime.events = []
        loss = self.step(batch)
        self.runtime.record_communication()
        events, self.runtime.events = self.runtime.events, None
        start = min(event.start_seconds for event in events)
        return loss, Timeline(events=tuple(_shift(event, start) for event in events))

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by name, on the ranks of its home stage."""
        return self._whole(lambda name: self.runtime.stored(name), lambda stored: stored.layout)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last step, whole, on the ranks of their home stage; see `keep_gradients`."""
        kept = self.runtime.gradients
        if not self.program.trains:
            raise TrainingError(
                "there are no gradients",
                given=f"plan {self.program.plan_name!r}, whose schedule has forwards only",
                required="a schedule with backwards, such as 1f1b",
            )
        return self._whole(lambda name: kept[name], lambda stored: stored.optimizer_layout)

    def keep_gradients(self) -> None:
        """Keep each step's gradients for `gradients`."""
        self.runtime.keep_gradients = True

    def close(self) -> None:
        """Give the process groups back and say goodbye to the other ranks."""
        self._wire.close()
        if self._owns_watch:
            self._watch.stop()

    def _whole(self, piece: Callable[[str], Tensor], layout: Callable[..., Layout]) -> dict[str, Tensor]:
        result = {}
        for stored in self.runtime.stage.parameters:
            before = layout(stored)
            mesh, whole = self.program.mesh_of(stored.stage), piece(stored.name)
            for part in change_layout(before, Layout.replicated(len(stored.sizes)), mesh, stored.sizes):
                steps, array = part.program(mesh).steps, whole
                whole = self._communicating(
                    lambda: self._wire.run_steps(steps, array, part.local_sizes)()  # noqa: B023
                )
            result[stored.name] = whole.reshape(self.blocks.graph.tensors[stored.name].shape).clone()
        return result

    def _gather_groups(self) -> None:
        """Groups that only `parameters` and `gradients` use, created on every rank alike."""
        groups = []
        for stage in self.program.stages:
            for stored in stage.parameters:
                for layout in (stored.layout, stored.optimizer_layout):
                    whole = Layout.replicated(len(stored.sizes))
                    mesh = self.program.mesh_of(stored.stage)
                    for part in change_layout(layout, whole, mesh, stored.sizes):
                        steps = part.program(mesh).steps
                        groups += [group for step in steps if not step.is_local for group in step.groups]
        self._communicating(lambda: self._wire.create_groups(groups))

    def _require_batch(self, batch: Batch) -> None:
        given = batch_spec(batch, self._model)
        if given != self._spec:
            raise TrainingError(
                "the batch has another shape than the plan was made for",
                given=str(given),
                required=str(self._spec),
                todo="pad or cut the batch, or plan again for this shape",
            )

    def _communicating(self, function: Callable[[], Result]) -> Result:
        """Run what communicates; if a peer is gone, say which."""
        try:
            return function()
        except PeerLostError as error:
            raise self._watch.explain(error) from error


def _shift(event: Event, start: float) -> Event:
    return replace(event, start_seconds=event.start_seconds - start, stop_seconds=event.stop_seconds - start)


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: OptimizerFactory,
    blocks: BlockGraph | None = None,
    loss: Callable[[object], Tensor] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    watch: Watch | None = None,
    seed: int = 0,
    compile: bool = False,  # as in torch.compile
) -> Trainer:
    """Prepare this process, started by `torchrun`, to train `model` as `plan` says.

    `optimizer` makes a `torch.optim` optimizer from a list of tensors. Every rank holds the same model and passes the
    same global batch to `step`. `blocks` saves the capture where the caller has them already, `watch` the start of a
    watch. Dropout draws its numbers from `seed`, the step and the element: the same on any plan. `compile` compiles
    every distinct run with torch's compiler at its first use. A plan for another model, or for another number of ranks,
    is refused before anything is sent.

    The parameters are handed over, one by one, so that no rank keeps what the plan gives to others: the module is left
    with empty ones on the meta device. `Trainer.parameters` gives whole ones back.
    """
    if not dist.is_initialized():
        dist.init_process_group(_backend(model), timeout=timedelta(seconds=timeout_seconds))
    _require_world(plan)
    if blocks is None:
        blocks = find_blocks(shared_capture(model, arguments_from_spec(plan.batch), loss=loss))
    require_model(plan, blocks.graph)
    return Trainer(
        model,
        blocks,
        plan,
        optimizer,
        timeout_seconds=timeout_seconds,
        watch=watch or start_watch(),
        owns_watch=watch is None,
        seed=seed,
        compiled=compile,
    )


def _backend(model: nn.Module) -> str:
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def _require_world(plan: Plan) -> None:
    world, needed = dist.get_world_size(), len(plan.devices)
    if sorted(plan.devices) != list(range(needed)) or world != needed:
        more = "more" if world > needed else "fewer"
        raise TrainingError(
            f"{more} ranks than devices in the plan" if world != needed else "the plan's devices are not 0 … n−1",
            given=f"{world} ranks for plan {plan.name!r} on devices {plan.devices}",
            required=f"{needed} ranks, one for each device",
            todo=f"start with torchrun --nproc-per-node {needed}, or plan for {world} devices",
        )
