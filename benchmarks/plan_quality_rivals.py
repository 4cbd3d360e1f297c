"""What a chosen plan competes with: DDP, FSDP2 and tensor parallel by hand, each as torch's own documentation has it.

All train the unchanged model of Hugging Face, but for GPT-2's fused projections, which torch's styles cannot split:
these become `nn.Linear`s whose rows are ordered so that every rank's part holds its own queries, keys and values. The
tensor-parallel plan is Megatron's: columns, then rows, the vocabulary split in the embedding, the head and the loss
(`loss_parallel`), and an expert's features split as a dense layer's are.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

RIVALS = ("DDP", "FSDP2", "DTensor TP")

Optimizer = Callable[[Any], torch.optim.Optimizer]


def rival_step(
    name: str, model: nn.Module, batch: Mapping[str, Tensor], make_optimizer: Optimizer
) -> Callable[[], float]:
    """A training step on the global batch, which returns the mean loss of all, as ours does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    splits_batch = name != "DTensor TP"
    rows = next(iter(batch.values())).shape[0] // world
    own = {key: tensor[rank * rows : (rank + 1) * rows] if splits_batch else tensor for key, tensor in batch.items()}
    if name == "DDP":
        model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
    elif name == "FSDP2":
        for layer in layers_of(model):
            fully_shard(layer)
        fully_shard(model)
    else:
        split_by_hand(model, init_device_mesh("cpu", (world,)))
    optimizer = make_optimizer(model.parameters())

    def step() -> float:
        with nullcontext() if splits_batch else loss_parallel():
            loss = model(**own).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = loss.detach()
        if splits_batch:
            dist.all_reduce(found)
            return float(found) / world
        return float(found.full_tensor() if isinstance(found, DTensor) else found)

    return step


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def split_by_hand(model: Any, mesh: DeviceMesh) -> None:
    """Megatron's tensor parallelism with torch's styles."""
    is_gpt2 = any(type(module).__name__ == "Conv1D" for module in model.modules())
    embedding = "transformer.wte" if is_gpt2 else "model.embed_tokens"
    for layer in layers_of(model):
        if is_gpt2:
            _unfuse(layer, mesh.size())
        parallelize_module(layer, mesh, {name: style for name, style in _styles().items() if _has(layer, name)})
    is_tied = model.get_submodule(embedding).weight is model.lm_head.weight
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {embedding: RowwiseParallel(input_layouts=Replicate()), "lm_head": head})
    if is_tied:
        model.lm_head.weight = model.get_submodule(embedding).weight


def _styles() -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj", "attn.c_proj", "mlp.c_proj")
    found: dict[str, ParallelStyle] = dict.fromkeys((*columns, "attn.c_attn", "mlp.c_fc"), ColwiseParallel())
    return found | dict.fromkeys(rows, RowwiseParallel()) | {"mlp.experts": ExpertFeatures()}


def _has(layer: nn.Module, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True


def _unfuse(layer: Any, num_parts: int) -> None:
    """GPT-2's `Conv1D`s as `nn.Linear`s; rows of the fused projection by rank, then query, key, value."""
    for owner, name in ((layer.attn, "c_attn"), (layer.attn, "c_proj"), (layer.mlp, "c_fc"), (layer.mlp, "c_proj")):
        fused = getattr(owner, name)
        weight, bias = fused.weight.detach().t(), fused.bias.detach()
        if name == "c_attn":
            weight, bias = (
                tensor.unflatten(0, (3, num_parts, -1)).transpose(0, 1).flatten(0, 2) for tensor in (weight, bias)
            )
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        setattr(owner, name, linear)
    layer.attn.split_size //= num_parts
    layer.attn.num_heads //= num_parts


class ExpertFeatures(ParallelStyle):
    """Every rank has its part of the features of all experts; their outputs are partial sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        experts: Any = module
        gate, up = (half.chunk(size, dim=1)[rank] for half in experts.gate_up_proj.detach().chunk(2, dim=1))
        experts.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1))
        experts.down_proj = nn.Parameter(experts.down_proj.detach().chunk(size, dim=2)[rank].clone())

        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            rows, index, weights = given
            return _summed_backward(rows, device_mesh), index, _summed_backward(weights, device_mesh)

        def leave(_: nn.Module, given: Any, made: Tensor) -> Tensor:
            partial = DTensor.from_local(made, device_mesh, [Partial()], run_check=False)
            whole: Tensor = partial.redistribute(placements=[Replicate()]).to_local()
            return whole

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _summed_backward(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same tensor; its gradients on the ranks are added."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    local: Tensor = whole.to_local(grad_placements=[Partial()])
    return local
