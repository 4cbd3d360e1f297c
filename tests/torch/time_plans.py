"""Steps of drafts with time axes for the models of the tests: attention, MLPs or layers in pieces."""

from math import prod

import torch

from planloom.capture import batch_spec
from planloom.layout import Mesh
from planloom.plan import Draft, StorageKind, draft
from tests.dist.cases import captured
from tests.models import build

ATTENTION = {"gpt": "layers.?.attention*", "llama": "model.layers.?.self_attn*"}
MLP = {"gpt": "layers.?.up|layers.?:apply|layers.?.down", "llama": "model.layers.?.mlp*"}
LAYERS = {"gpt": "layers.*", "llama": "model.layers.*"}


def empty(model: str, **axes: int) -> Draft:
    """Everything replicated on a mesh with these axes."""
    _, batch = build(model, torch.float64)
    mesh = Mesh.of(range(prod(axes.values())), **axes)
    return draft(captured(model, torch.float64), mesh, batch=batch_spec(batch))


def sharded(written: Draft, kind: StorageKind) -> Draft:
    """Data parallel over dp, with parameters in shards."""
    return written.split("*", batch="dp").store("*", kind, over="dp")


def tensor_parallel(written: Draft, model: str, axis: str) -> Draft:
    """Megatron's: heads and features over an axis, of space or of time."""
    return heads(features(written, model, axis), model, axis)


def heads(written: Draft, model: str, axis: str) -> Draft:
    """Attention over heads."""
    if model == "gpt":
        written = written.split("layers.?.attention.qkv", out=axis).split("layers.?.attention:apply", features=axis)
        return written.split("layers.?.attention:attention", heads=axis).split("layers.?.attention.out", **{"in": axis})
    written = written.split("*.q_proj|*.k_proj|*.v_proj", out=axis).split("*:attention", heads=axis)
    return written.split("*.o_proj", **{"in": axis})


def features(written: Draft, model: str, axis: str) -> Draft:
    """MLPs over their inner features."""
    if model == "gpt":
        written = written.split("layers.?.up", out=axis).split("layers.?:apply", features=axis)
        return written.split("layers.?.down", **{"in": axis})
    written = written.split("*.gate_proj|*.up_proj", out=axis).split("*.mlp:apply", features=axis)
    return written.split("*.mlp.down_proj", **{"in": axis})


def heads_of_swin(written: Draft, axis: str) -> Draft:
    """Attention over heads; the position bias of each head with it."""
    return heads(written, "llama", axis).split("*relative_position_bias", **{"features.0": axis})
