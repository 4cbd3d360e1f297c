"""What the parameters of a block cost under every strategy and every way to store them.

With a device's part of a parameter of b bytes, split over no more axes than the strategy splits it, and its gradient
partial over the axes that split the block but not the parameter:

| stored              | a micro-batch                                     | a step                       | bytes held
     |
|---------------------|---------------------------------------------------|------------------------------|------------------|
| replicated          |                                                   | all-reduce                   | 4 b
     |
| ZeRO-1 over n       |                                                   | reduce-scatter, all-gather   | 2 b + 3 b/n
     |
| ZeRO-2 over n       | reduce-scatter                                    | all-gather                   | b + 4 b/n
     |
| ZeRO-3 over n       | all-gather twice, reduce-scatter                  |                              | 4 b/n
     |

a reduction being followed by an all-reduce over the other axes, and in every case the update, and the addition to the
gradient's sum at every micro-batch but the first. Bytes held: parameter,
gradient, the two moments of AdamW in the parameter's dtype, and with ZeRO-1 and -2 the shard that is updated before
it is gathered. While a whole parameter is gathered, or its gradient scattered, three times its bytes are in work.

Gathers are started one run ahead and gradients are reduced while the backward goes on (`program.overlap`), so what
counts is what exceeds the computation meanwhile: the block's own, for what is reduced once a step; the share
a share of it for what is gathered and scattered at every micro-batch, since the run beside may be shorter, a smaller
one in a pipeline (`_HIDDEN`). The gather of updated shards is not hidden.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import Block, BlockGraph
from planloom.cluster import Device
from planloom.cost.roofline import memory_seconds, update_seconds
from planloom.plan import StorageKind
from planloom.search.conversions import Array, MeshBatch, reduction_seconds
from planloom.search.strategies import Strategies

_SIZE = 1 << 24
_MOMENTS = 2
_HIDDEN, _HIDDEN_IN_PIPELINE = 0.5, 0.2
"""Which share of a block's own computing hides what is gathered and scattered meanwhile.

[Empirical] Two pipelines with ZeRO-2 and -3 of Llama-3-70B on 128 H100, 2026-11-19, simulated 64.2 and 66.3 s,
estimated 57.6 and 56.2 with 0.5, 60.7 and 63.2 with 0.25, 61.9 and 65.2 with 0.2, 63.1 and 67.2 with 0.15, 64.3 and
69.3 with 0.1. Both 0.2 and 0.15 fit; 0.2 leaves smaller gaps (decision 29). With one stage 0.5 fits."""
_IN_WORK = 3  # arrays that a gather or scatter works with: what goes in, what comes out, and a copy (`execute.wire`)


@dataclass(frozen=True, slots=True)
class StorageOption:
    """How the parameters of a block are stored; `axis`: over which axis of the shape, -1 for none."""

    kind: StorageKind
    axis: int = -1


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ParameterTables:
    """For every option (first dim), problem and strategy: exposed seconds, and bytes held by a device."""

    options: tuple[StorageOption, ...]
    micro_seconds: Array
    step_seconds: Array
    stored_bytes: Array
    working_bytes: Array


def storage_options(num_axes: int, wanted: str | None) -> tuple[StorageOption, ...]:
    """All ways to store parameters, or those of one kind and plain replication, which is what small ones fall back
    to."""
    kinds: list[StorageKind] = ["zero1", "zero2", "zero3"]
    chosen = [kind for kind in kinds if wanted in (None, kind)]
    return (StorageOption("replicated"), *(StorageOption(kind, a) for kind in chosen for a in range(num_axes)))


def update_seconds_per_byte(device: Device) -> float:
    """Of an optimizer step, for every byte of parameters."""
    small, large = (update_seconds([(n, 2)], device).seconds for n in (_SIZE, 2 * _SIZE))
    return (large - small) / (2 * _SIZE)


def addition_seconds_per_byte(device: Device) -> float:
    """Of adding to a sum of gradients, for every byte of it: two are read and one is written."""
    small, large = (memory_seconds(3 * n, device).seconds for n in (_SIZE, 2 * _SIZE))
    return (large - small) / _SIZE


def parameter_tables(
    blocks: BlockGraph,
    block: Block,
    strategies: Strategies,
    mesh: MeshBatch,
    options: tuple[StorageOption, ...],
    forward: Array,
    backward: Array,
    num_micro: NDArray[np.intp],
    *,
    in_pipeline: bool,
) -> ParameterTables:
    """`forward` and `backward`: the seconds of the block's own computation, of shape (problems, strategies)."""
    share = _HIDDEN_IN_PIPELINE if in_pipeline else _HIDDEN
    shape = (len(options), *forward.shape)
    micro, step, stored, working = (np.zeros(shape) for _ in range(4))
    per_byte = 0.0 if mesh.by_volume else update_seconds_per_byte(mesh.device)
    added = ((num_micro - 1) / num_micro)[:, None]
    added = added * (0.0 if mesh.by_volume else addition_seconds_per_byte(mesh.device))
    for i, option in enumerate(options):
        traffic = _Traffic(blocks, block, strategies, mesh, option, forward.shape)
        micro[i] = np.maximum(0.0, traffic.gathered - share * forward)
        micro[i] += np.maximum(0.0, traffic.gathered + traffic.scattered - share * backward)
        micro[i] += added * traffic.gradient_bytes
        step[i] = np.maximum(0.0, traffic.reduced - backward) + traffic.updated + per_byte * traffic.updated_bytes
        stored[i], working[i] = traffic.stored_bytes, traffic.working_bytes
        micro[i, :, ~traffic.is_possible] = np.inf
    return ParameterTables(
        options=options, micro_seconds=micro, step_seconds=step, stored_bytes=stored, working_bytes=working
    )


class _Traffic:
    """Seconds of communication of all parameters of a block under one option, and their bytes."""

    def __init__(
        self,
        blocks: BlockGraph,
        block: Block,
        strategies: Strategies,
        mesh: MeshBatch,
        option: StorageOption,
        shape: tuple[int, ...],
    ) -> None:
        self.mesh, self.option = mesh, option
        self.gathered, self.scattered = np.zeros(shape), np.zeros(shape)  # a micro-batch: each gather, each reduction
        self.reduced, self.updated = np.zeros(shape), np.zeros(shape)  # a step: before the update, after it
        self.updated_bytes, self.stored_bytes = np.zeros(shape), np.zeros(shape)
        self.working_bytes, self.gradient_bytes = np.zeros(shape), np.zeros(shape)
        self.is_possible = np.ones(shape[1], dtype=bool)
        is_sharded_once = np.zeros(shape[1], dtype=bool)
        for name in block.parameters:
            split, over = self._splits(block, strategies, name)
            tensor = blocks.graph.tensors[name]
            own = prod(tensor.sizes) * tensor.item_bytes / split[:, 0]
            shards = self._shards(tensor.sizes, block, strategies, name, over)
            shards &= len(blocks.consumers[name]) == 1  # what several blocks read is replicated, as in `finished`
            is_sharded_once |= shards
            self._add(np.broadcast_to(own, shape), over, shards)
        if option.kind != "replicated":
            self.is_possible = is_sharded_once

    def _splits(self, block: Block, strategies: Strategies, name: str) -> tuple[Array, NDArray[np.bool_]]:
        """Into how many pieces a strategy splits a parameter; over which axes its gradient is partial."""
        has = np.array([*(name in dim.shards for dim in block.dims), False])
        splits_it = has[strategies.dims]
        over = (strategies.dims >= 0) & ~splits_it
        counts = np.where(splits_it, np.array(self.mesh.sizes, dtype=float), 1.0).prod(axis=1)
        return counts[:, None], over

    def _shards(
        self, sizes: tuple[int, ...], block: Block, strategies: Strategies, name: str, over: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Under which strategies is the parameter cut into shards? One factor must divide (`program.storage`)."""
        axis = self.option.axis
        if axis < 0:
            return np.zeros(len(strategies), dtype=bool)
        local = np.tile(np.array(sizes, dtype=np.intp), (len(strategies), 1))
        for d, dim in enumerate(block.dims):
            if name in dim.shards:
                local[:, dim.shards[name]] //= strategies.pieces[:, d]
        found: NDArray[np.bool_] = over[:, axis] & (local % self.mesh.sizes[axis] == 0).any(axis=1)
        return found

    def _add(self, own: Array, over: NDArray[np.bool_], shards: NDArray[np.bool_]) -> None:
        """One parameter, `own` bytes a device."""
        axis, kind = self.option.axis, self.option.kind
        count = self.mesh.sizes[axis] if axis >= 0 else 1
        part = np.where(shards, own / count, own)
        others = over.copy()
        if axis >= 0:
            others[:, axis] &= ~shards
            curves = self.mesh.axes[axis]
            gather = np.where(shards, curves.seconds("all_gather", own / count), 0.0)
            scatter = np.where(shards, curves.seconds("reduce_scatter", np.ascontiguousarray(own)), 0.0)
            if kind == "zero3":
                self.gathered += gather
            else:
                self.updated += gather
            if kind == "zero1":
                self.reduced += scatter
            else:
                self.scattered += scatter
        reduction = reduction_seconds(self.mesh, others, np.ascontiguousarray(part))
        is_each = shards & (kind in ("zero2", "zero3"))
        self.scattered += np.where(is_each, reduction, 0.0)
        self.reduced += np.where(is_each, 0.0, reduction)
        self.working_bytes += np.where(is_each, _IN_WORK * own, 0.0)
        self.updated_bytes += part
        extra = np.where(shards & (kind in ("zero1", "zero2")), part, 0.0)
        held = part if kind == "zero3" else own
        gradient = part if kind in ("zero2", "zero3") else own
        self.gradient_bytes += gradient
        self.stored_bytes += held + gradient + _MOMENTS * part + extra
