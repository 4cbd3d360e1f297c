"""By execution: a block on pieces, put together as its dims say, is the block on whole tensors."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from planloom.blocks import Block, BlockDim
from planloom.execute import LocalRun, RunVjp
from planloom.graph import Tensor as GraphTensor
from planloom.layout import Mesh
from tests.torch.captured import Captured
from tests.torch.hand_runs import hand_run

HALVES = 2
Index = tuple[int, ...]
Combination = Callable[[BlockDim, list[Tensor]], Tensor]


def even_dims(block: Block) -> list[BlockDim]:
    return [dim for dim in block.dims if dim.size % HALVES == 0]


def to_dims(piece: Tensor, tensor: GraphTensor) -> Tensor:
    lengths = iter(piece.shape)
    return piece.reshape([int(torch.tensor([next(lengths) for _ in dim]).prod()) for dim in tensor.factors])


def assemble(pieces: dict[Index, Tensor], dims: Sequence[BlockDim], combine: Combination) -> Tensor:
    """Put pieces together along the last dim first."""
    if not dims:
        return pieces[()]
    joined = {
        index: combine(dims[-1], [pieces[(*index, i)] for i in range(HALVES)])
        for index in product(range(HALVES), repeat=len(dims) - 1)
    }
    return assemble(joined, dims[:-1], combine)


def whole_result(name: str) -> Combination:
    """Shards are joined along the factor, partial results combined as the dim says."""

    def combine(dim: BlockDim, parts: list[Tensor]) -> Tensor:
        if name in dim.shards:
            return torch.cat(parts, dim.shards[name])
        stacked = torch.stack(parts)
        return {"sum": stacked.sum(0), "max": stacked.amax(0)}[dim.partials[name]]

    return combine


def whole_cotangent(name: str) -> Combination:
    """The cotangent of an input that has the dim is split like it; every piece adds its part to that of another."""

    def combine(dim: BlockDim, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim.shards[name]) if name in dim.shards else torch.stack(parts).sum(0)

    return combine


def require_close(found: Tensor, expected: Tensor, what: str, scale: float) -> None:
    """Equal but for rounding: `scale` is the size of the numbers that were summed, which may cancel."""
    assert found.shape == expected.shape, what
    if not expected.is_floating_point():
        assert torch.equal(found, expected), what
        return
    assert torch.equal(found.isinf(), expected.isinf()), what
    finite = torch.where(expected.isinf(), 0, found - expected)
    assert float(finite.abs().max()) <= 1e-10 * max(scale, 1e-300), what


class Execution:
    """A captured model with the values of all tensors between its blocks; ragged tensors as their rows."""

    def __init__(self, model: Captured) -> None:
        self.model, self.blocks, self.tensors = model, model.blocks, model.blocks.graph.tensors
        self.values = {**model.given, **model.parameters}
        for block in self.blocks.blocks:
            local = self._local(block, (), ())
            outputs = local([self.values[slot.tensor] for slot in local.run.inputs], model.given, 0)
            self.values.update(zip(block.outputs, (output.detach() for output in outputs), strict=True))

    def _local(self, block: Block, dims: Sequence[BlockDim], index: Index) -> LocalRun:
        mesh = Mesh.of(range(HALVES ** len(dims)), **{f"axis{i}": HALVES for i in range(len(dims))})
        splits = {dim.name: digit for dim, digit in zip(dims, mesh.digits, strict=True)}
        run = hand_run(self.blocks, [block], block.outputs, splits)
        return LocalRun(self.blocks, run, dict(zip(mesh.digits, index, strict=True)), num_micro=1)

    def _run(
        self, block: Block, dims: Sequence[BlockDim], index: Index, cotangents: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(outputs, cotangents of the inputs) of one piece, with one dim a factor."""
        local = self._local(block, dims, index)
        names = [slot.tensor for slot in local.run.inputs]
        inputs = [self._cut(self.values[name], name, dims, index) for name in names]
        vjp = RunVjp(local, inputs, self.model.given, 0)
        outputs = dict(zip(block.outputs, vjp.take_outputs(), strict=True))
        given_back = vjp.backward(
            [
                self._cut(cotangents[name], name, dims, index) if name in cotangents else None
                for name in block.outputs
            ]
        )  # fmt: skip
        found = {name: value for name, value in zip(names, given_back, strict=True) if value is not None}
        return (
            {name: self._in_factors(value, name, dims, index) for name, value in outputs.items()},
            {name: self._in_factors(value, name, dims, index) for name, value in found.items()},
        )

    def _cut(self, value: Tensor, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor:
        """The piece of a whole tensor that a device at `index` holds."""
        tensor = self.tensors[name]
        if tensor.rows:
            mask = self._piece(self.values[tensor.rows], tensor.rows, dims, index, of=name)
            whole = self._piece(self._with_zeros(value, self.values[tensor.rows]), name, dims, index)
            return to_dims(whole, tensor)[to_dims(mask, self.tensors[tensor.rows])].unsqueeze(0)
        return to_dims(self._piece(value, name, dims, index), tensor)

    def _piece(
        self, value: Tensor, name: str, dims: Sequence[BlockDim], index: Index, *, of: str = ""
    ) -> Tensor:  # fmt: skip
        piece, count = value.reshape(self.tensors[name].sizes), len(self.tensors[name].sizes)
        for dim, i in zip(dims, index, strict=True):
            factor = dim.shards.get(of or name, -1)
            if 0 <= factor < count:
                piece = piece.chunk(HALVES, factor)[i]
        return piece

    def _with_zeros(self, rows: Tensor, mask: Tensor) -> Tensor:
        whole = torch.zeros(*mask.shape, rows.shape[-1], dtype=rows.dtype)
        whole[mask] = rows[0]
        return whole

    def _in_factors(self, local: Tensor, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor:
        tensor = self.tensors[name]
        sizes = list(tensor.sizes)
        for dim in dims:
            if name in dim.shards:
                sizes[dim.shards[name]] //= HALVES
        if tensor.rows:
            mask = to_dims(
                self._piece(self.values[tensor.rows], tensor.rows, dims, index, of=name), self.tensors[tensor.rows]
            )
            local = self._with_zeros(local, mask)
        return local.reshape(sizes)

    def require_free_split(self, block: Block, dims: Sequence[BlockDim]) -> None:
        """The block on pieces, put together, is the block on whole tensors: forward and backward."""
        generator = torch.Generator().manual_seed(block.index)
        cotangents = {
            name: torch.randn(self.values[name].shape, generator=generator, dtype=torch.float64)
            for name in block.outputs
            if self.blocks.graph.is_differentiable(name)
        }
        expected = self._run(block, (), (), cotangents)
        pieces = {
            index: self._run(block, dims, index, cotangents) for index in product(range(HALVES), repeat=len(dims))
        }
        what = f"{block.name} split along {' and '.join(dim.name for dim in dims)}"
        for part, combination, word in ((0, whole_result, "output"), (1, whole_cotangent, "cotangent of")):
            largest = max((_largest(value) for value in expected[part].values()), default=1.0)
            for name, value in expected[part].items():
                found = assemble({index: piece[part][name] for index, piece in pieces.items()}, dims, combination(name))
                scale = max(_largest(value), 1e-4 * largest)
                require_close(found, value, f"{what}: {word} {name}", scale)


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0
