"""The profile of an H200 in benchmarks/profiles serves here, where there is no GPU, as it did there."""

import json
from pathlib import Path

from benchmarks.gpu_settings import SETTINGS
from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture, load_model
from planloom.cost import PriceStore, run_fingerprint
from planloom.cost.keys import run_key
from planloom.plan import named_plan, parse_named
from planloom.program import build_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_run_of_a_measured_setting_is_found_in_the_profile(tmp_path: Path) -> None:
    profile = json.loads((BENCHMARKS / "profiles" / "h200.json").read_text())["profiles"][0]
    store = PriceStore(tmp_path / "prices.sqlite", device=profile["device"], software=profile["software"])
    store.import_(BENCHMARKS / "profiles" / "h200.json")
    figures = store.load()
    setting = next(setting for setting in SETTINGS if setting.plan == "tp=4")
    model, batch = load_model(setting.source)
    blocks = find_blocks(capture(model, batch))
    program = build_program(blocks, named_plan(blocks, parse_named(setting.plan), batch=batch_spec(batch)))
    fingerprints = {run_fingerprint(blocks, program, run) for run in program.runs}
    assert len(fingerprints) == 5
    for fingerprint in fingerprints:
        assert figures[run_key(fingerprint, "forward")] > 0
        assert figures[run_key(fingerprint, "backward")] > 0
