"""One capture for all ranks: rank 0 captures, the others read what it found."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from planloom.capture import Batch, capture
from planloom.errors import CaptureError, PlanloomError
from planloom.graph import Graph


def shared_capture(model: nn.Module, batch: Batch, *, loss: Callable[[Any], torch.Tensor] | None = None) -> Graph:
    """`capture(model, batch)` on rank 0, sent to all others as JSON; an error there is an error everywhere."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return capture(model, batch, loss=loss)
    if dist.get_rank() != 0:
        found = msgspec.json.decode(_receive(), type=_Outcome)
        if found.graph is None:
            raise CaptureError(found.what, given=found.given, required=found.required, todo=found.todo)
        _require_same_parameters(model, found.graph)
        return found.graph
    try:
        graph = capture(model, batch, loss=loss)
    except PlanloomError as error:
        told = _Outcome(what=error.what, given=error.given, required=error.required, todo=error.todo)
        _send(msgspec.json.encode(told))
        raise
    except BaseException as error:
        _send(msgspec.json.encode(_Outcome(what="rank 0 could not capture the model", given=repr(error))))
        raise
    _send(msgspec.json.encode(_Outcome(graph=graph)))
    return graph


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    graph: Graph | None = None
    what: str = ""
    given: str = ""
    required: str = ""
    todo: str = ""


def _send(text: bytes) -> None:
    dist.broadcast(torch.tensor([len(text)]), 0)
    dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)


def _receive() -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, 0)
    return bytes(text.numpy())


def _require_same_parameters(model: nn.Module, graph: Graph) -> None:
    named = dict(model.named_parameters())
    for name in graph.parameters:
        own, expected = named.get(name), graph.tensors[name]
        shown = "absent" if own is None else f"{str(own.dtype).removeprefix('torch.')}{list(own.shape)}"
        if shown != f"{expected.dtype}{list(expected.shape)}":
            raise CaptureError(
                "the ranks hold different models",
                given=f"parameter {name} is {shown} on rank {dist.get_rank()}",
                required=f"{expected.dtype}{list(expected.shape)}, as on rank 0",
                todo="build the same model on every rank",
            )
