"""`planloom models`: which models are known by name. `planloom blocks`: what a model is made of."""

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.blocks import (
    BlockGraph,
    Segment,
    count_strategies,
    figures_of,
    find_blocks,
    find_segments,
    repeated_segments,
)
from planloom.cli.output import JsonOption, messages, progress_bar, show, write_file
from planloom.errors import CaptureError
from planloom.graph.catalog import ModelPreset, model_preset, preset_names
from planloom.graph.flops import graph_flops, training_flops
from planloom.report import blocks_dot, blocks_tables
from planloom.report.blocks import format_count

GRAPHS = Path(".planloom/graphs")
"""Captured graphs, so that the next command about the same model need not capture it."""

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A preset (`planloom models` lists them), with overrides if wanted, as "
        "'llama3-8b?num_hidden_layers=4&seq=4096&batch=8'; path/to/file.py:factory, where factory() returns "
        "(model, batch); or a Hugging Face path/to/config.json, with overrides as for presets."
    ),
]


_NEW_OBJECTS = 50_000
"""Made before Python looks for cycles among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A model named on the command line, captured; the seconds are those of loading and capturing it."""

    blocks: BlockGraph
    spec: dict[str, tuple[tuple[int, ...], str]]
    capture_seconds: float

    @property
    def num_parameters(self) -> int:
        graph = self.blocks.graph
        return sum(prod(graph.tensors[name].shape) for name in graph.parameters)


def capture_model(source: str, *, again: bool = False) -> CapturedModel:
    """Load and capture a model, with a spinner; what was captured before is read, unless it is wanted `again`."""
    with progress_bar(f"capturing {source}"):
        start = time.perf_counter()
        from planloom.capture import batch_spec, cached_capture, capture, load_model

        model, batch = load_model(source)
        graph = capture(model, batch) if again else cached_capture(model, batch, folder=GRAPHS)
        gc.freeze()  # what torch and the model are made of stays: half a second less for every look at all objects
        gc.set_threshold(_NEW_OBJECTS, 20, 20)  # tables and programs have few cycles, and many objects
        seconds = time.perf_counter() - start
        return CapturedModel(blocks=find_blocks(graph), spec=batch_spec(batch), capture_seconds=seconds)


def register(app: typer.Typer) -> None:
    app.command(name="models", epilog="Example: planloom models")(models_command)
    app.command(name="blocks", epilog="Example: planloom blocks examples/models/gpt.py:small")(blocks_command)


def models_command(as_json: JsonOption = False) -> None:
    """Show the models that are known by name: their parameters, and who published that number."""
    presets = [model_preset(name) for name in preset_names()]
    table = Table(title="Models", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.caption_justify = "left"
    table.add_column("name", no_wrap=True)
    table.add_column("model")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for preset in presets:
        count = format_count(preset.parameters or 0) or "–"
        table.add_row(preset.name, escape(preset.title), count, escape(preset.parameters_source))
    table.caption = "settings are overridden as in planloom blocks 'llama3-8b?num_hidden_layers=4&seq=4096&batch=8'"
    show({"models": [_preset_document(preset) for preset in presets]}, table, as_json=as_json)


def _preset_document(preset: ModelPreset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "title": preset.title,
        "parameters": preset.parameters,
        "active_parameters": preset.active_parameters,
        "source": preset.parameters_source,
        "batch": preset.batch,
        "seq": preset.seq,
        "dtype": preset.dtype,
    }


def blocks_command(
    model: ModelArgument,
    dot: Annotated[
        Path | None, typer.Option("--dot", help="Write a picture of the blocks for Graphviz (dot -Tsvg FILE).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's blocks: groups of operators through which a split passes without communication.

    Blocks that repeat are segments; each distinct one is shown once, with its number of repetitions.
    """
    captured = capture_model(model, again=True)
    segments = find_segments(captured.blocks)
    if dot is not None:
        write_file(blocks_dot(captured.blocks, segments), dot, failing=CaptureError)
        messages.print(f"wrote {escape(str(dot))}")
    document = blocks_document(captured, segments) if as_json else {}
    tables = [] if as_json else blocks_tables(captured.blocks, segments, title=model)
    show(document, *tables, as_json=as_json)


def blocks_document(captured: CapturedModel, segments: Sequence[Segment]) -> dict[str, Any]:
    """Blocks and segments for machines. FLOPs are those of one example batch, attention in full."""
    blocks, distinct = captured.blocks, repeated_segments(segments)
    strategies = count_strategies(blocks, segments)
    return {
        "operators": len(blocks.graph.ops),
        "blocks": len(blocks.blocks),
        "segments": len(segments),
        "distinct_segments": len(distinct),
        "parameters": captured.num_parameters,
        "flops": graph_flops(blocks.graph),
        "training_flops": training_flops(blocks.graph),
        "capture_seconds": captured.capture_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "strategies_log10": {
            "operators": strategies.log10_over_operators,
            "blocks": strategies.log10_over_blocks,
            "distinct_segments": strategies.log10_over_distinct_segments,
        },
        "block_list": [
            {
                "name": block.name,
                "dims": {dim.name: dim.size for dim in block.dims},
                "parameters": list(block.parameters),
                **_figures_document(blocks, [block.index]),
            }
            for block in blocks.blocks
        ],
        "segment_list": [{"start": s.start, "stop": s.stop, "fingerprint": s.fingerprint} for s in segments],
        "distinct_segment_list": [
            {
                "fingerprint": repeated.first.fingerprint,
                "count": repeated.count,
                "start": repeated.first.start,
                "stop": repeated.first.stop,
                **_figures_document(blocks, range(repeated.first.start, repeated.first.stop)),
            }
            for repeated in distinct
        ],
    }


def _figures_document(blocks: BlockGraph, indices: Sequence[int]) -> dict[str, int]:
    figures = figures_of(blocks, indices)
    return {
        "operators": figures.num_operators,
        "flops": figures.flops,
        "bytes": figures.moved_bytes,
        "num_parameters": figures.num_parameters,
    }


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far."""
    import resource  # not on every system

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
