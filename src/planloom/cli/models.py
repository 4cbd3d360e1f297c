"""`planloom blocks`: what a model is made of."""

from dataclasses import dataclass
from math import prod
from typing import Annotated

import typer

from planloom.blocks import BlockGraph, find_blocks, find_segments
from planloom.cli.output import JsonOption, progress_bar, show
from planloom.report import blocks_table

ModelArgument = Annotated[str, typer.Argument(help="path/to/file.py:factory, where factory() returns (model, batch).")]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A model named on the command line, captured."""

    blocks: BlockGraph
    spec: dict[str, tuple[tuple[int, ...], str]]

    @property
    def num_parameters(self) -> int:
        graph = self.blocks.graph
        return sum(prod(graph.tensors[name].shape) for name in graph.parameters)


def capture_model(source: str) -> CapturedModel:
    """Load and capture a model, with a spinner."""
    with progress_bar(f"capturing {source}"):
        from planloom.capture import batch_spec, capture, load_model

        model, batch = load_model(source)
        return CapturedModel(blocks=find_blocks(capture(model, batch)), spec=batch_spec(batch))


def register(app: typer.Typer) -> None:
    app.command(name="blocks", epilog="Example: planloom blocks examples/models/gpt.py:small")(blocks_command)


def blocks_command(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Show a model's blocks: groups of operators through which a split passes without communication."""
    captured = capture_model(model)
    segments = find_segments(captured.blocks)
    document = {
        "operators": len(captured.blocks.graph.ops),
        "parameters": captured.num_parameters,
        "blocks": [
            {"name": b.name, "dims": {d.name: d.size for d in b.dims}, "parameters": list(b.parameters)}
            for b in captured.blocks.blocks
        ],
        "segments": [{"start": s.start, "stop": s.stop, "fingerprint": s.fingerprint} for s in segments],
        "distinct_segments": len({s.fingerprint for s in segments}),
    }
    show(document, blocks_table(captured.blocks, segments), as_json=as_json)
