"""Blocks and segments in figures, tables and pictures; the list of models."""

import json
import re
import subprocess
import sys
from math import log10
from pathlib import Path

from rich.console import Console

from planloom.blocks import Segment, count_strategies, figures_of, find_segments, repeated_segments
from planloom.graph.catalog import preset_names
from planloom.report import blocks_dot, blocks_tables
from planloom.report.blocks import format_count
from tests.pure.tiny_graph import BATCH, HIDDEN, SEQUENCE, WIDE, tiny_blocks

ROOT = Path(__file__).parents[2]
PRODUCT = 2 * BATCH * SEQUENCE * WIDE * HIDDEN


def printed(width: int = 100) -> str:
    blocks = tiny_blocks()
    console = Console(width=width, no_color=True)
    with console.capture() as captured:
        for table in blocks_tables(blocks, find_segments(blocks), title="tiny[0]"):
            console.print(table)
    return captured.get()


def test_figures_of_a_block_and_of_all() -> None:
    blocks = tiny_blocks()
    first = figures_of(blocks, [0])
    assert first.flops == PRODUCT
    assert first.num_parameters == WIDE * HIDDEN
    assert first.moved_bytes == 4 * (BATCH * SEQUENCE * (WIDE + HIDDEN) + WIDE * HIDDEN)
    whole = figures_of(blocks, range(len(blocks.blocks)))
    assert whole.flops == 2 * PRODUCT
    assert whole.num_operators == len(blocks.graph.ops)
    assert whole.num_parameters == 2 * WIDE * HIDDEN


def test_strategies_are_products_of_choices() -> None:
    blocks = tiny_blocks()
    cuts = [Segment(start=i, stop=i + 1, fingerprint="abca"[i]) for i in range(len(blocks.blocks))]
    strategies = count_strategies(blocks, cuts)
    # four factors in either map, three in the activation and in the sum
    assert abs(strategies.log10_over_operators - log10(5 * 4 * 5 * 4)) < 1e-9
    choices = [len(block.dims) + 1 for block in blocks.blocks]
    assert abs(strategies.log10_over_blocks - sum(map(log10, choices))) < 1e-9
    assert abs(strategies.log10_over_distinct_segments - sum(map(log10, choices[:3]))) < 1e-9
    assert [(r.first.start, r.count) for r in repeated_segments(cuts)] == [(0, 2), (1, 1), (2, 1)]


def test_the_tables_fit_a_narrow_terminal_and_show_every_figure() -> None:
    text = printed(80)
    assert max(map(len, text.splitlines())) <= 80
    assert "tiny[0]: 4 operators → 4 blocks → 1 segments, 1 distinct" in text
    assert "first" in text
    assert "10^" in text
    assert format_count(2 * PRODUCT) in text


def test_counts_are_short() -> None:
    assert [format_count(n) for n in (0, 12, 1500, 8.03e9, 405.85e9, 3.8e25)] == [
        "",
        "12",
        "1.5 k",
        "8.03 G",
        "405.9 G",
        "3.8e+07 E",
    ]


def test_the_picture_has_a_node_a_block_and_an_edge_a_tensor() -> None:
    blocks = tiny_blocks()
    text = blocks_dot(blocks, find_segments(blocks))
    assert text.startswith("digraph blocks {")
    assert text.count("{") == text.count("}")
    assert len(re.findall(r"^ +b\d+ \[label=", text, flags=re.MULTILINE)) == len(blocks.blocks)
    edges = re.findall(r"b(\d+) -> b(\d+) \[label=\"([^\"]*)\"\]", text)
    assert len(edges) == sum(len(block.inputs) for block in blocks.blocks)
    assert (edges[0][0], edges[0][2]) == ("0", f"{BATCH}×{SEQUENCE}×{HIDDEN} float32")


def test_models_are_listed_without_torch() -> None:
    program = "import sys, planloom.cli.app as a; a.app(['models', '--json'], standalone_mode=False); "
    program += "print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.split() == ["False"]
    found = {model["name"]: model for model in json.loads(done.stdout)["models"]}
    assert tuple(found) == preset_names()
    assert found["llama3-405b"]["parameters"] == 405_000_000_000
    assert "arXiv:2407.21783" in found["llama3-405b"]["source"]
