"""What a model is made of: operators, blocks and segments, as tables and as a picture for Graphviz.

Equal segments are shown once, so that a model of a thousand blocks is a page. Bytes of a block are those that enter and
leave it; FLOPs are of the forward pass on the example batch.
"""

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.blocks import BlockGraph, Figures, Segment, count_strategies, figures_of, repeated_segments
from planloom.cluster import format_bytes
from planloom.graph import Tensor

_PREFIXES = ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#ff9da6", "#9d755d", "#bab0ac")


def blocks_tables(blocks: BlockGraph, segments: Sequence[Segment], *, title: str) -> list[Table]:
    """The blocks of every distinct segment, once; then how many strategies there are to choose from."""
    return [_segments_table(blocks, segments, title), _strategies_table(blocks, segments)]


def _segments_table(blocks: BlockGraph, segments: Sequence[Segment], title: str) -> Table:
    distinct = repeated_segments(segments)
    whole = figures_of(blocks, range(len(blocks.blocks)))
    text = (
        f"{title}: {whole.num_operators:,} operators → {len(blocks.blocks):,} blocks → {len(segments):,} segments, "
        f"{len(distinct)} distinct"
    )
    table = Table(title=escape(text), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("block", overflow="fold")
    table.add_column("ops", justify="right", no_wrap=True)
    table.add_column("dims", overflow="fold")
    for name in ("FLOPs", "bytes", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, repeated in enumerate(distinct, start=1):
        inside = range(repeated.first.start, repeated.first.stop)
        times = f" × {repeated.count}" if repeated.count > 1 else ""
        first = blocks.blocks[repeated.first.start].name
        layer = first.removesuffix(_short(first)).rstrip(".")
        where = f"from {layer}" if layer else ""
        table.add_row(*_cells(f"segment {number}{times}", where, figures_of(blocks, inside)), style="bold")
        for index in inside:
            block = blocks.blocks[index]
            dims = " ".join(f"{dim.name}={dim.size}" for dim in block.dims)
            table.add_row(*_cells(f"  {_short(block.name)}", dims, figures_of(blocks, [index])))
        table.add_section()
    table.add_row(*_cells("all blocks", "", whole), style="bold")
    return table


def _cells(name: str, dims: str, figures: Figures) -> list[str]:
    return [
        escape(name),
        f"{figures.num_operators:,}",
        escape(dims),
        format_count(figures.flops),
        format_bytes(figures.moved_bytes),
        format_count(figures.num_parameters),
    ]


def _short(name: str) -> str:
    """A block's name inside its layer: `self_attn.q_proj` of `model.layers.0.self_attn.q_proj`."""
    return re.sub(r"^.*\.\d+\.(?=[^.\d])", "", name)


def _strategies_table(blocks: BlockGraph, segments: Sequence[Segment]) -> Table:
    strategies, distinct = count_strategies(blocks, segments), repeated_segments(segments)
    table = Table(title="Strategies over one axis", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("over")
    table.add_column("choices", justify="right")
    table.add_column("strategies", justify="right")
    rows = (
        ("operators", len(blocks.graph.ops), strategies.log10_over_operators),
        ("blocks", len(blocks.blocks), strategies.log10_over_blocks),
        (
            "blocks of distinct segments",
            sum(repeated.first.stop - repeated.first.start for repeated in distinct),
            strategies.log10_over_distinct_segments,
        ),
    )
    for over, count, log10 in rows:
        table.add_row(over, f"{count:,}", f"10^{log10:,.1f}")
    return table


def format_count(count: float) -> str:
    """A number with three digits: 405.9 G; nothing for none."""
    for scale, prefix in _PREFIXES:
        if count >= scale:
            return f"{count / scale:.4g}{prefix}"
    return f"{count:.4g}" if count else ""


def blocks_dot(blocks: BlockGraph, segments: Sequence[Segment]) -> str:
    """A picture for Graphviz: a node a block, coloured by its distinct segment; an edge a tensor that one reads."""
    colors = {r.first.fingerprint: _COLORS[i % len(_COLORS)] for i, r in enumerate(repeated_segments(segments))}
    lines = ["digraph blocks {", "  rankdir=TB;", '  node [shape=box, style="filled,rounded", fontname="sans-serif"];']
    lines += ['  edge [fontname="sans-serif", fontsize=9];']
    for number, segment in enumerate(segments):
        lines.append(f'  subgraph "segment {number}" {{')
        for block in blocks.blocks[segment.start : segment.stop]:
            dims = " ".join(f"{dim.name}={dim.size}" for dim in block.dims)
            label = _quoted(f"{block.name}\n{dims}" if dims else block.name)
            lines.append(f'    b{block.index} [label={label}, fillcolor="{colors[segment.fingerprint]}"];')
        lines.append("  }")
    for block in blocks.blocks:
        for name in block.inputs:
            label = _quoted(_shape(blocks.graph.tensors[name]))
            lines.append(f"  b{blocks.producer[name]} -> b{block.index} [label={label}];")
    return "\n".join([*lines, "}", ""])


def _shape(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
