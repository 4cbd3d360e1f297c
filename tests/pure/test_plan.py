"""Plans by hand and by name, their orders and their files; what does not fit is refused with what to do."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.blocks import BlockGraph
from planloom.errors import LayoutError, PlanError, PlanloomError
from planloom.layout import Mesh, Placement
from planloom.plan import (
    Call,
    Draft,
    NamedPlan,
    Plan,
    Storage,
    draft,
    gpipe,
    library,
    load_plan,
    named_plan,
    one_forward_one_backward,
    parse_named,
    require_model,
    save_plan,
)
from planloom.program import build_program
from tests.pure.tiny_graph import tiny_batch, tiny_blocks, tiny_graph

FIRST, APPLY, SECOND, LOSS = range(4)  # the blocks of the tiny graph


@pytest.fixture(scope="module")
def blocks() -> BlockGraph:
    return tiny_blocks()


@pytest.fixture
def empty(blocks: BlockGraph) -> Draft:
    """Everything replicated on two by two devices."""
    return draft(blocks, Mesh.of(range(4), dp=2, tp=2), batch=tiny_batch())


@pytest.fixture
def staged(empty: Draft) -> Draft:
    """The second map and the loss in a stage of their own."""
    return empty.assign("second|loss", stage=1, mesh=Mesh.of((4, 5), dp=2))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_the_tiny_graph_has_the_blocks_that_these_tests_name(blocks: BlockGraph) -> None:
    assert [block.name for block in blocks.blocks] == ["first", "model:apply", "second", "loss"]


def test_split_takes_the_blocks_that_match_and_have_the_dim(empty: Draft) -> None:
    plan = empty.split("*", batch="dp").split("first|model:a*", out="tp", features="tp").plan("mine")
    assert plan.strategies[FIRST] == {"batch": ("dp",), "out": ("tp",)}
    assert plan.strategies[APPLY] == {"batch": ("dp",), "features": ("tp",)}
    assert plan.strategies[SECOND] == {"batch": ("dp",)}


def test_a_draft_is_not_changed_in_place(empty: Draft) -> None:
    empty.split("*", batch="dp").store("*", "zero1", over="dp").order("1f1b", micro_batches=2)
    assert empty.strategies == ({}, {}, {}, {})
    assert (empty.storage, empty.num_micro_batches) == ({}, 1)


def test_a_finished_plan_holds_every_choice(empty: Draft, staged: Draft) -> None:
    plan = staged.split("*", batch="dp").store("second.*", "zero3", over="dp").order("1f1b", micro_batches=2).plan("p")
    assert plan.stages == (0, 0, 1, 1)
    assert plan.devices == (0, 1, 2, 3, 4, 5)
    assert plan.storage == {"second.weight": Storage(kind="zero3", over="dp")}
    assert (plan.schedule, plan.num_micro_batches) == ("1f1b", 2)
    assert plan.orders == one_forward_one_backward(2, 2)
    assert plan.batch == tiny_batch()


@pytest.mark.parametrize(
    ("pattern", "axes", "message"),
    [
        ("first", {"heads": "dp"}, r"(?s)'first'.*'heads' over dp.*first \(batch=8, sequence=2, in=4, out=12\)"),
        ("nowhere*", {"batch": "dp"}, r"(?s)no block matches 'nowhere\*'.*first, model:apply, second"),
    ],
)
def test_a_split_of_what_is_not_there(empty: Draft, pattern: str, axes: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        empty.split(pattern, **axes)


def test_a_split_over_an_axis_that_is_not_there(empty: Draft) -> None:
    with pytest.raises(LayoutError, match=r"(?s)no axis 'cp'.*'dp', 'tp'"):
        empty.split("*", batch="cp")


@pytest.mark.parametrize("axes", [{"batch": "dp", "out": "dp"}, {"out": ("tp", "tp")}], ids=str)
def test_an_axis_used_twice(empty: Draft, blocks: BlockGraph, axes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"(?s)block first uses axis '[dt]p' twice.*out"):
        build_program(blocks, empty.split("first", **axes).plan("p"))


def test_a_batch_that_does_not_divide(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)batch does not divide.*8 over 3 micro-batches.*multiple of 3.*to do:"):
        empty.order("gpipe", micro_batches=3).plan("p")
    with pytest.raises(PlanError, match=r"(?s)8 over 8 micro-batches × axes \('dp',\).*multiple of 16"):
        empty.split("*", batch="dp").order("gpipe", micro_batches=8).plan("p")


@pytest.mark.parametrize("count", [0, -1])
def test_micro_batches_are_one_or_more(empty: Draft, count: int) -> None:
    with pytest.raises(PlanError, match=f"{count}"):
        empty.order("gpipe", micro_batches=count).plan("p")


def test_a_stage_without_a_mesh(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)stage 1 has no mesh.*1 stages so far"):
        empty.assign("second", stage=1)
    with pytest.raises(PlanError, match="stage 2 has no mesh"):
        empty.assign("second", stage=2, mesh=Mesh.of((4, 5), dp=2))


def test_a_negative_stage(empty: Draft) -> None:
    with pytest.raises(PlanError, match="stage -1"):
        empty.assign("second", stage=-1, mesh=Mesh.of((4, 5), dp=2))


def test_a_stage_that_reads_from_a_later_one(empty: Draft) -> None:
    later = empty.assign("first", stage=1, mesh=Mesh.of((4, 5), dp=2))
    with pytest.raises(PlanError, match=r"(?s)stage 0 reads from a later.*map1 is made by first in stage 1"):
        later.plan("p")


def test_two_stages_that_share_a_device(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)share a device.*\(0, 1, 2, 3\), \(3, 5\)"):
        empty.assign("second|loss", stage=1, mesh=Mesh.of((3, 5), dp=2)).plan("p")


def test_a_parameter_that_is_not_there(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)no parameter matches.*third.*'first.weight', 'second.weight'"):
        empty.store("third.*", "zero1", over="dp")


def test_a_kind_of_storage_that_is_not_there(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)zero4.*zero1.*zero2.*zero3"):
        empty.store("*", "zero4", over="dp").plan("p")  # type: ignore[arg-type]


def test_storage_over_an_axis_that_is_not_there(empty: Draft, blocks: BlockGraph) -> None:
    with pytest.raises(LayoutError, match=r"(?s)no axis 'fsdp'.*'dp', 'tp'"):
        build_program(blocks, empty.store("*", "zero1", over="fsdp").plan("p"))


def test_storage_over_an_axis_that_splits_the_parameter(empty: Draft, blocks: BlockGraph) -> None:
    plan = empty.split("first", out="tp").store("first.weight", "zero1", over="tp").plan("p")
    with pytest.raises(PlanError, match=r"(?s)first.weight is already split over 'tp'"):
        build_program(blocks, plan)


# --- orders ----------------------------------------------------------------------------------------------------------


def test_recompute_takes_the_segments_all_of_whose_blocks_match(empty: Draft) -> None:
    assert empty.recompute("*").plan("p").recompute == (0,)
    assert empty.recompute("*").recompute("first|*").plan("p").recompute == (0,)
    assert empty.plan("p").recompute == ()
    with pytest.raises(PlanError, match=r"(?s)only blocks that match 'first'.*given:.*first … loss.*to do:.*widen"):
        empty.recompute("first")


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((1,), r"segment 1, which the model does not have.*given:.*segments 1\n.*from 0 to 0.*to do:.*find_segments"),
        ((-1,), r"segment -1, which the model does not have"),
        ((0, 0), r"a segment twice.*given:.*segments 0 0\n.*each at most once"),
    ],
)
def test_segments_that_are_not_there(empty: Draft, blocks: BlockGraph, segments: tuple[int, ...], message: str) -> None:
    plan = replace(empty.plan("p"), recompute=segments)
    with pytest.raises(PlanError, match=rf"(?s)plan 'p' recomputes {message}"):
        build_program(blocks, plan)


def test_a_schedule_that_is_not_there(empty: Draft) -> None:
    with pytest.raises(PlanError, match=r"(?s)no schedule is named 'zigzag'.*'1f1b', '3f1b', 'chimera'.*'gpipe'"):
        empty.order("zigzag")


def test_an_order_of_ones_own(empty: Draft) -> None:
    backwards_first = gpipe(1, 2)[0][:2] + gpipe(1, 2)[0][:1:-1]
    assert empty.order("mine", micro_batches=2, orders=[backwards_first]).plan("p").orders == (backwards_first,)


@pytest.mark.parametrize(
    "calls",
    [gpipe(1, 1)[0], gpipe(1, 2)[0][:3], gpipe(1, 2)[0] + gpipe(1, 2)[0][:1], gpipe(1, 3)[0][1:5]],
    ids=lambda calls: " ".join(map(str, calls)),
)
def test_an_order_that_does_not_call_everything_once(empty: Draft, calls: tuple[Call, ...]) -> None:
    message = rf"(?s)order of stage 0.*{' '.join(map(str, calls))}.*2 micro-batches|calls what is not there.*0 to 1"
    with pytest.raises(PlanError, match=message):
        empty.order("mine", micro_batches=2, orders=[calls]).plan("p")


@pytest.mark.parametrize("num_orders", [1, 3])
def test_an_order_for_every_stage(staged: Draft, num_orders: int) -> None:
    with pytest.raises(PlanError, match=f"{num_orders} orders"):
        staged.order("mine", orders=gpipe(num_orders, 1)).plan("p")


PIPELINES = given(st.integers(1, 6), st.integers(1, 12))


def in_flight(calls: tuple[Call, ...]) -> int:
    """The largest number of micro-batches whose forward is done and whose backward is not."""
    counts, count = [], 0
    for call in calls:
        count += 1 if call.phase == "forward" else -1
        counts.append(count)
    return max(counts)


@PIPELINES
def test_gpipe_holds_all_micro_batches_and_1f1b_no_more_than_the_stages_ahead(num_stages: int, num_micro: int) -> None:
    assert {in_flight(calls) for calls in gpipe(num_stages, num_micro)} == {num_micro}
    for stage, calls in enumerate(one_forward_one_backward(num_stages, num_micro)):
        assert in_flight(calls) == min(num_stages - stage, num_micro)


def test_1f1b_by_example() -> None:
    orders = [" ".join(map(str, calls)) for calls in one_forward_one_backward(2, 3)]
    assert orders == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


# --- by name ---------------------------------------------------------------------------------------------------------


DEGREES = st.integers(1, 8)
NAMED = st.builds(
    NamedPlan,
    dp=DEGREES,
    tp=DEGREES,
    tp2=DEGREES,
    pp=DEGREES,
    micro=DEGREES,
    sequence=st.booleans(),
    vocab=st.booleans(),
    storage=st.sampled_from(("replicated", "zero1", "zero2", "zero3")),
    recompute=st.booleans(),
    schedule=st.sampled_from(("gpipe", "1f1b")),
)


@given(NAMED)
def test_names_are_read_back(named: NamedPlan) -> None:
    if named.pp == 1:
        named = replace(named, schedule="1f1b")  # without stages the schedule has no say and no place in the name
    assert parse_named(str(named)) == named


def test_a_name_by_example() -> None:
    assert str(parse_named("recompute,micro=2,zero2,dp=2")) == "dp=2,zero2,recompute,micro=2"
    named = parse_named("dp=2,tp=2,pp=2,vocab,zero1,micro=4,gpipe")
    assert named == NamedPlan(dp=2, tp=2, pp=2, vocab=True, storage="zero1", micro=4, schedule="gpipe")
    assert named.num_devices == 8
    assert str(NamedPlan()) == "single"


@pytest.mark.parametrize(
    "word",
    [
        "heads",
        "dp=0",
        "dp=-1",
        "dp=",
        "dp",
        "zero4",
        "recompute=1",
        "tp=2.0",
        pytest.param("dp=²"),
    ],
)
def test_a_word_that_is_not_there(word: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s)unknown word '{word}'.*tp=2,{word}.*dp=N"):
        parse_named(f"tp=2,{word}")


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 8])
def test_the_library_lists_different_plans_for_all_devices(num_devices: int) -> None:
    plans = library(num_devices)
    assert len(plans) == len({str(plan) for plan in plans}) > 0
    assert {plan.num_devices for plan in plans} == {num_devices}
    assert not any(plan.experts for plan in plans)
    assert any(plan.experts for plan in library(num_devices, experts=True)) == (num_devices > 1)


def test_a_named_plan_on_stages(blocks: BlockGraph) -> None:
    mesh = Mesh.of((7, 6, 5, 4, 3, 2, 1, 0), dp=2, pp=2, tp=2, tp2=1)
    plan = named_plan(blocks, parse_named("pp=2,dp=2,tp=2,zero1,micro=4"), batch=tiny_batch(), mesh=mesh)
    assert [stage.devices for stage in plan.meshes] == [(7, 6, 3, 2), (5, 4, 1, 0)]
    assert list(plan.stages) == sorted(plan.stages)
    assert set(plan.stages) == {0, 1}
    assert plan.strategies[FIRST] == {"out": ("tp",), "batch": ("dp",)}
    assert plan.strategies[SECOND] == {"in": ("tp",), "batch": ("dp",)}
    assert set(plan.storage) == set(blocks.graph.parameters)
    assert plan.orders == one_forward_one_backward(2, 4)


def test_a_named_plan_on_a_placement(blocks: BlockGraph) -> None:
    placement = Placement(axes=("pp", "dp", "tp", "tp2"), matrix=((1, 1), (1, 2), (2, 1), (1, 1)))
    plan = named_plan(blocks, parse_named("dp=2,tp=2"), batch=tiny_batch(), placement=placement)
    (mesh,) = plan.meshes
    assert mesh.groups(mesh.axis("tp").digits) == ((0, 2), (1, 3))


def test_more_stages_than_the_model_has_cuts(blocks: BlockGraph) -> None:
    with pytest.raises(PlanError, match=r"(?s)cannot be cut.*5 stages for 4 blocks.*at most 4"):
        named_plan(blocks, parse_named("pp=5"), batch=tiny_batch())


def test_a_model_without_layers_has_none_to_recompute(blocks: BlockGraph) -> None:
    with pytest.raises(PlanError, match=r"(?s)no layers that repeat.*given:.*recompute.*has 1, all different.*Draft"):
        named_plan(blocks, parse_named("dp=2,recompute"), batch=tiny_batch())


# --- files and models ------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(staged: Draft) -> Plan:
    return staged.split("*", batch="dp").store("*", "zero1", over="dp").order("1f1b", micro_batches=2).plan("mine")


def test_a_file_is_read_back_as_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    save_plan(replace(plan, name="other"), str(tmp_path / "plan.json"))
    assert load_plan(tmp_path / "plan.json").name == "other"


def test_recomputed_segments_are_written_and_old_files_have_none(plan: Plan, tmp_path: Path) -> None:
    chosen = replace(plan, recompute=(0,), storage=dict.fromkeys(plan.storage, Storage(kind="zero2", over="dp")))
    save_plan(chosen, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == chosen
    fields = msgspec.to_builtins(plan)
    del fields["recompute"]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(fields))
    assert load_plan(tmp_path / "old.json") == plan


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a plan", "malformed"),
        (b"", "truncated"),
        (b'{"name": "mine"}', "missing required field `model`"),
        (b"[1, 2]", "Expected `object`, got `array`"),
        pytest.param(b'{"name": "\xff"}', "utf-8"),
    ],
)
def test_a_file_that_is_not_a_plan(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=rf"(?s)plan.json is not a plan file.*{message}.*to do:"):
        load_plan(tmp_path / "plan.json")


def edited(plan: Plan, path: Path, **fields: object) -> Path:
    """A plan's file with some fields replaced, as if by hand."""
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(plan), **fields}))
    return path


def test_a_wrong_value_is_named_by_its_place(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Expected `int`, got `str` - at `\$.stages\[1\]`"):
        load_plan(edited(plan, tmp_path / "plan.json", stages=[0, "one", 1, 1]))


def test_a_file_of_another_version(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"(?s)plan.json was written by another version.*format 99.*format 2.*to do:"):
        load_plan(edited(plan, tmp_path / "plan.json", version=99))


@pytest.mark.parametrize(
    "fields",
    [
        {"stages": [0, 0]},
        {"stages": [0, 0, 1, 2]},
        {"strategies": [{}]},
        {"num_micro_batches": 3},
        {"num_micro_batches": 0},
        {"orders": []},
        {"recompute": [7]},
    ],
    ids=str,
)
def test_an_edited_file_is_refused_where_a_draft_would_be(
    plan: Plan, blocks: BlockGraph, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(PlanloomError):
        build_program(blocks, load_plan(edited(plan, tmp_path / "plan.json", **fields)))


@pytest.mark.parametrize("name", ["nothing.json", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match=r"(?s)cannot be read.*readable file"):
        load_plan(tmp_path / name)


UNLINK = "plan/files.py: unlink(missing_ok=True) raises again what the writing raised"


@pytest.mark.parametrize(
    "path",
    [
        "no folder/plan.json",
        "folder",
        "file/plan.json",
        "x" * 255,
    ],
    ids=lambda path: path[:20],
)
def test_a_place_that_cannot_be_written(plan: Plan, tmp_path: Path, path: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PlanError, match=r"(?s)cannot be written to .*writable folder.*nothing was changed"):
        save_plan(plan, tmp_path / path)
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_full_disk_leaves_the_old_plan_and_nothing_else(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_plan(plan, tmp_path / "plan.json")
    write = Path.write_bytes

    def write_half(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(PlanError, match=r"(?s)No space left.*free space"):
        save_plan(replace(plan, name="other"), tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_plan_for_another_model_says_what_differs(plan: Plan) -> None:
    require_model(plan, tiny_graph())
    with pytest.raises(
        PlanError, match=r"(?s)'mine' was made for another model.*first.weight: float32\[12, 4\] in the plan, float32"
    ):
        require_model(plan, tiny_graph(hidden=24))


def test_a_plan_for_another_batch_says_what_differs(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"input x: float32\[8, 2, 4\] in the plan, float32\[16, 2, 4\] in the model"):
        require_model(plan, tiny_graph(batch=16))
