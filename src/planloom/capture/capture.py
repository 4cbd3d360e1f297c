"""Capture: `nn.Module` + example batch → `Graph`.

The stages, in order: export (torch), translate (nodes → operators, identities dropped, tuples flattened), expand
(norms, losses and biases into forms that can be split), separate what depends on inputs alone, attach rules, agree on
factors. Nothing is computed: tensors are fake, and a model on the `meta` device is captured as well as one in memory.
"""

import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map_only  # tried with torch 2.11 and 2.13

from planloom.capture.batch import Batch, Spec, arguments_from_spec, keyword_arguments, leaves
from planloom.capture.expand import expand
from planloom.capture.experts import our_experts
from planloom.capture.guards import (
    refuse_backward_hooks,
    refuse_hidden_no_grad,
    refusing_own_backwards,
    without_cache,
    without_garbage_collection,
    without_idle_layer_drop,
)
from planloom.capture.layers import expand_stamps, stamping_layers
from planloom.capture.restore import restore_attention
from planloom.capture.rules import attach_rules
from planloom.capture.rules.custom import require_registered_rules
from planloom.capture.sinks import our_sinks
from planloom.capture.translate import is_machinery, translate
from planloom.errors import CaptureError
from planloom.graph import Graph, Op, refine_factors

LossFunction = Callable[[Any], torch.Tensor]
_LOG = logging.getLogger(__name__)
_FOR_DEVELOPERS = re.compile(r"(?i)file an issue|report (this|a bug)|github\.com/pytorch|TORCH_LOGS|TORCHDYNAMO_")
_PYTHON = sysconfig.get_path("stdlib")
_LOUD_LOGS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
)


class _WithLoss(nn.Module):
    """The model and its loss as one module that returns a scalar."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Any) -> torch.Tensor:
        output = self.model(**batch)
        loss: Any
        if self.loss:
            loss = self.loss(output)
        elif isinstance(output, Mapping) and "loss" in output:
            loss = output["loss"]
        else:
            loss = getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"{type(loss).__name__}{list(loss.shape) if isinstance(loss, torch.Tensor) else ''}"
            raise CaptureError(
                "the model does not return a scalar loss",
                given=shown,
                required="a scalar tensor, or an output with a scalar `.loss` or `['loss']`",
                todo="pass loss=…, a function from the model's output to a scalar, or put labels into the batch",
            )
        return loss if loss.dim() == 0 else loss.reshape(())


def capture(model: nn.Module, batch: Batch, *, loss: LossFunction | None = None, stamp: bool = True) -> Graph:
    """The forward pass and loss of `model` on inputs shaped like `batch`.

    Repeated layers are traced twice and stamped; `stamp=False` traces them all, for the same graph.
    """
    refuse_backward_hooks(model, loss)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    arguments = keyword_arguments(model, batch)
    example = tree_map_only(torch.Tensor, lambda tensor: torch.empty_like(tensor, device=device), arguments)
    with (
        without_garbage_collection(),
        without_idle_layer_drop(model),
        without_cache(model),
        our_experts(model),
        our_sinks(model),
    ):
        program = _export(_WithLoss(model, loss), example, stamp=stamp)
        return _graph(program, model, list(leaves(example)))


def _graph(program: ExportedProgram, model: nn.Module, inputs: list[str]) -> Graph:
    graph = expand(restore_attention(translate(program, model, inputs)))
    if graph.loss not in {name for op in graph.ops for name in op.outputs}:
        raise CaptureError(
            "the loss does not depend on any trainable parameter",
            given=f"{len(graph.parameters)} parameters that the loss reads",
            required="at least one",
            todo="return the loss of the model's output, and leave requires_grad on",
        )
    ruled = attach_rules(graph.ops, graph.tensors)
    require_registered_rules(ruled, graph.tensors)
    tensors, ops = refine_factors(graph.tensors, ruled)
    return replace(graph, tensors=tensors, ops=_producers_first(ops))


def _export(model: nn.Module, example: dict[str, Any], *, stamp: bool) -> ExportedProgram:
    try:
        program = _trace_stamped(model, example) if stamp else None
        return _trace(model, example) if program is None else program
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises many types; each is the user's to repair
        on_values = "data-dependent" in str(error) or "DataDependent" in type(error).__name__
        todo = "torch.where instead of a branch on values, numbers as arguments instead of .item()"
        raise CaptureError(
            f"{type(model.model).__name__} cannot be captured",
            given=f"{_place(error, model)}{type(error).__name__}: {_message(error)} (batch: {', '.join(example)})",
            required="a batch that the model takes, and no control flow or shape that depends on values",
            todo=todo if on_values else "try model(**batch) first; torch's own error is the cause of this one",
        ) from error


def _place(error: Exception, model: nn.Module) -> str:
    """The module and the line of user code at which an error was raised, with a semicolon; nothing if not known."""
    names = {id(module): name.removeprefix("model").removeprefix(".") for name, module in model.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        summary = traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        module = names.get(id(frame.f_locals.get("self")), module) or module
        is_pythons = summary.filename.startswith(_PYTHON) and "site-packages" not in summary.filename
        if not is_pythons and not is_machinery(f'"{summary.filename}"'):
            line = f'File "{summary.filename}", line {number}, in {summary.name}: {summary.line}'
    return f"{module or 'the model'}, {line}; " if line else ""


def _message(error: Exception) -> str:
    """The first line of an error's message, without what torch says to its developers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if not _FOR_DEVELOPERS.search(line)), "")
    return re.sub(r"\s*\((unhinted|Size-like symbols): [^)]*\)+\.?", "", first).strip()


def _trace(model: nn.Module, example: dict[str, Any]) -> ExportedProgram:
    with warnings.catch_warnings(), refusing_own_backwards(), _quiet_export():
        # torch 2.13.0's own use of a deprecated class, nothing that a user could change
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        program = torch.export.export(model, (), example, strict=False)
        refuse_hidden_no_grad(program)
        return program.run_decompositions({})


@contextmanager
def _quiet_export() -> Iterator[None]:
    """Without the log and the graph that torch.export prints before it raises: the error says what is to be known."""

    def is_quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logs = [logging.getLogger(name) for name in _LOUD_LOGS]
    for log in logs:
        log.addFilter(is_quiet)
    try:
        # torch 2.13.0 prints the graph to stderr; `print` of that one module, so that the model's own is heard
        with patch("torch.export._trace.print", lambda *_, **__: None, create=True):
            yield
    finally:
        for log in logs:
            log.removeFilter(is_quiet)


def _trace_stamped(model: nn.Module, example: dict[str, Any]) -> ExportedProgram | None:
    """The program of a full trace from a short one; None where layers cannot be stamped, and the log says why."""
    refused: dict[Hashable, str] = {}
    for shells in (True, False, False):  # what was presumed wrongly, or cannot be stamped, costs another trace
        try:
            with stamping_layers(model, refused, shells=shells) as calls:
                program = _trace(model, example)
            found = expand_stamps(program, model, calls)
        except CaptureError:
            raise
        except Exception as error:  # the model's own fault is raised again by the full trace
            _LOG.info("a trace with stamped layers failed: %s: %s", type(error).__name__, error)
            continue
        if not found:
            return program
        _LOG.info("layers that are traced one by one: %s", "; ".join(found.values()))
        refused |= found
    return None


def _producers_first(ops: list[Op]) -> tuple[Op, ...]:
    made = {name for op in ops for name in op.outputs}
    seen: set[str] = set()
    for op in ops:
        assert all(name in seen for name in op.inputs if name in made), op.name
        seen.update(op.outputs)
    return tuple(ops)


def capture_from_spec(model: nn.Module, spec: Spec, *, loss: LossFunction | None = None) -> Graph:
    """Capture for a batch of which only shapes and dtypes are known."""
    return capture(model, arguments_from_spec(spec), loss=loss)
