"""The oracle of collective programs: its counts of P2's space, its verdicts by hand and against arithmetic.

`tests/oracle_arithmetic.py` carries programs out on arrays of integers. Random programs are walks over letters, one a
digit (partial, replicated, master-only, or split into a sub-factor of its own); corruptions of them are accepted only
if they still compute the target.
"""

import random
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest
from numpy.typing import NDArray

from planloom.collective.space import SpaceStep, count_programs, enumerate_programs, space_groups
from planloom.collective.steps import (
    CUTTING_KINDS,
    JOINING_KINDS,
    CollectiveProgram,
    Step,
    StepKind,
)
from planloom.errors import LayoutError, VerificationError
from planloom.layout import Axis, Combine, Digit, Layout, Mesh
from tests.oracle_arithmetic import Case, MalformedError, computes_the_target

Array = NDArray[Any]


# --- P2's space


@pytest.mark.parametrize(
    ("digits", "counts"),
    [((2, 2), (1, 4, 24, 42, 22)), ((4, 4), (1, 4, 24, 42, 22)), ((2, 2, 2), (1, 6, 59, 319, 1250))],
)
def test_the_numbers_of_programs_in_p2s_space(digits: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert count_programs(digits, 5) == counts
    programs = list(enumerate_programs(digits, 5))
    assert len(set(programs)) == len(programs) == sum(counts)
    assert tuple(sum(len(program) == length for program in programs) for length in range(1, 6)) == counts


def test_one_digit_has_three_programs() -> None:
    assert list(enumerate_programs((3,), 4)) == [
        (SpaceStep("all_reduce", (0,), False),),
        (SpaceStep("reduce_scatter", (0,), False), SpaceStep("all_gather", (0,), False)),
        (SpaceStep("reduce", (0,), False), SpaceStep("broadcast", (0,), False)),
    ]


def test_groups_of_the_master_form() -> None:
    assert space_groups((2, 2, 2), (1,), master=False) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert space_groups((2, 2, 2), (1,), master=True) == ((0, 2), (4, 6))
    assert space_groups((2, 2, 2), (0, 1), master=True) == ((0, 2, 4, 6),)


def as_case(digits: tuple[int, ...], steps: tuple[SpaceStep, ...]) -> Case:
    """A program of P2's space as steps on a tensor with one sub-factor a digit."""
    mesh = Mesh(axes=(Axis(name="a", sizes=digits),), devices=tuple(range(prod(digits))))
    return Case(
        mesh=mesh,
        source=Layout(splits=((),), partial=mesh.digits),
        target=Layout(splits=((),)),
        program=CollectiveProgram(
            factors=(digits,),
            steps=tuple(
                Step(
                    kind=kind,
                    groups=space_groups(digits, run, master=master),
                    shape=tuple(digits[i] for i in run),
                    along=run if kind in JOINING_KINDS else (),
                    into=run if kind in CUTTING_KINDS else (),
                )
                for kind, run, master in steps
            ),
        ),
    )


@pytest.mark.parametrize("digits", [(2, 2), (4, 4), (2, 3), (2, 2, 2)])
def test_the_rules_accept_all_programs_of_the_space(digits: tuple[int, ...]) -> None:
    for steps in enumerate_programs(digits, 4 if len(digits) == 3 else 5):
        as_case(digits, steps).check()


def test_the_rules_accept_no_others_except_with_idle_steps() -> None:
    """Of all sequences of three steps over two digits: what only the rules accept can do without one of its steps."""
    valid = set(enumerate_programs((2, 2), 3))
    kinds: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
    forms = (((0,), False), ((0,), True), ((1,), False), ((0, 1), False))
    steps = [SpaceStep(kind, *form) for kind in kinds for form in forms]
    accepted = 0
    for sequence in product(steps, repeat=3):
        if as_case((2, 2), sequence).is_accepted:
            accepted += 1
            shorter = (sequence[:i] + sequence[i + 1 :] for i in range(3))
            assert sequence in valid or any(as_case((2, 2), rest).is_accepted for rest in shorter)
        else:
            assert sequence not in valid
    assert accepted >= 24


# --- good programs by hand

SQUARE = Mesh.of((0, 1, 2, 3), a=2, b=2)
A, B = SQUARE.digits
OBLONG = Mesh(axes=(Axis(name="d", sizes=(2, 4)),), devices=(3, 1, 0, 2, 7, 6, 5, 4))
D0, D1 = OBLONG.digits
ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))  # the groups of SQUARE over b and over a
BIG = Mesh.of(range(66), a=33, b=2)


def make(mesh: Mesh, source: Layout, target: Layout, factors: tuple[tuple[int, ...], ...], *steps: Step) -> Case:
    return Case(mesh=mesh, source=source, target=target, program=CollectiveProgram(factors=factors, steps=steps))


def over(mesh: Mesh, kind: StepKind, *digits: Digit, master: tuple[Digit, ...] = (), **fields: Any) -> Step:
    """A step over digits; only on devices with coordinate 0 along `master`."""
    groups = tuple(g for g in mesh.groups(digits) if not any(mesh.coordinates(g[0])[m] for m in master))
    return Step(kind=kind, groups=groups, shape=tuple(d.size for d in digits), **fields)


def hierarchical(mesh: Mesh, outer: Digit, inner: Digit, rest: int) -> Case:
    return make(
        mesh,
        Layout(splits=((),), partial=(outer, inner)),
        Layout(splits=((),)),
        ((inner.size, rest),),
        over(mesh, "reduce_scatter", inner, into=(0,)),
        over(mesh, "all_reduce", outer),
        over(mesh, "all_gather", inner, along=(0,)),
    )


def through_masters(mesh: Mesh, outer: Digit, inner: Digit) -> Case:
    return make(
        mesh,
        Layout(splits=((),), partial=(outer, inner)),
        Layout(splits=((),)),
        ((5,),),
        over(mesh, "reduce", inner),
        over(mesh, "all_reduce", outer, master=(inner,)),
        over(mesh, "broadcast", inner),
    )


WHOLE = Layout(splits=((), ()))
SCATTER_GATHER = make(
    SQUARE,
    Layout(splits=((), ()), master=(A, B)),
    Layout(splits=((), ()), master=(A, B)),
    ((2,), (2, 3)),
    over(SQUARE, "scatter", A, B, into=(0, 1)),
    over(SQUARE, "gather", B, A, along=(1, 0)),
)
ALL_TO_ALL = make(
    SQUARE,
    Layout(splits=((A, B), ())),
    Layout(splits=((A,), (B,))),
    ((2, 2), (2, 3)),
    over(SQUARE, "all_to_all", B, along=(1,), into=(2,)),
)
TRANSPOSED = make(
    SQUARE,
    Layout(splits=((A,), (B,))),
    Layout(splits=((B,), (A,))),
    ((2,), (2,)),
    over(SQUARE, "all_to_all", A, B, along=(0, 1), into=(1, 0)),
)
MIXTURE = make(
    SQUARE,
    Layout(splits=((B,), ()), partial=(A,)),
    Layout(splits=((), (A,))),
    ((2, 2), (2, 1)),
    over(SQUARE, "reduce_scatter", A, into=(2,)),
    over(SQUARE, "all_gather", B, along=(0,)),
)
STILL_PARTIAL = make(
    SQUARE,
    Layout(splits=((B,), ()), partial=(A,)),
    Layout(splits=((), (B,)), partial=(A,)),
    ((2,), (2, 2)),
    over(SQUARE, "all_to_all", B, along=(0,), into=(1,)),
)
MASKED = make(
    SQUARE,
    Layout(splits=((), ()), partial=(A,)),
    Layout(splits=((), ()), partial=(A, B)),
    ((3,), (1,)),
    over(SQUARE, "mask", B),
)
MASKED_AND_BACK = make(
    SQUARE, WHOLE, Layout(splits=((A,), ())), ((2,), (1,)),
    over(SQUARE, "mask", A), over(SQUARE, "reduce_scatter", A, into=(0,)),
)  # fmt: skip
MAXIMUM = make(
    SQUARE,
    Layout(splits=((), ()), partial=(A, B), combine="max"),
    Layout(splits=((A,), ())),
    ((2, 2), (1,)),
    over(SQUARE, "all_reduce", B, combine="max"),
    over(SQUARE, "reduce_scatter", A, into=(0,), combine="max"),
)
SLICED = make(
    SQUARE,
    WHOLE,
    Layout(splits=((B, A), ())),
    ((2, 2, 3), ()),
    over(SQUARE, "slice", A, into=(1,)),
    over(SQUARE, "slice", B, into=(0,)),
)
TO_MASTERS = make(
    SQUARE,
    Layout(splits=((B,), ()), partial=(A,)),
    Layout(splits=((), ()), master=(A, B)),
    ((2,), (3,)),
    over(SQUARE, "reduce", A),
    over(SQUARE, "gather", B, master=(A,), along=(0,)),
)
FROM_MASTER = make(
    SQUARE,
    Layout(splits=((), ()), master=(A, B)),
    Layout(splits=((A,), ())),
    ((2,), (3,)),
    over(SQUARE, "scatter", A, master=(B,), into=(0,)),
    over(SQUARE, "broadcast", B),
)
GOOD = {
    "hierarchical 2×2": hierarchical(SQUARE, A, B, 3),
    "hierarchical 2×4": hierarchical(OBLONG, D0, D1, 1),
    "hierarchical 4×2": hierarchical(OBLONG, D1, D0, 5),
    "hierarchical on 66 devices": hierarchical(BIG, *BIG.digits, 1),
    "masters 2×2": through_masters(SQUARE, A, B),
    "masters 2×4": through_masters(OBLONG, D0, D1),
    "scatter and gather": SCATTER_GATHER,
    "all-to-all": ALL_TO_ALL,
    "transposed digits": TRANSPOSED,
    "mixture": MIXTURE,
    "still partial": STILL_PARTIAL,
    "masked": MASKED,
    "masked and back": MASKED_AND_BACK,
    "maximum": MAXIMUM,
    "sliced": SLICED,
    "to masters": TO_MASTERS,
    "from a master": FROM_MASTER,
    "scalar": make(SQUARE, Layout(splits=(), partial=(A, B)), Layout(splits=()), (), over(SQUARE, "all_reduce", A, B)),
    "nothing to do": make(SQUARE, Layout(splits=((A,), (B,))), Layout(splits=((A,), (B,))), ((4,), (2,))),
    "copies as maxima": make(SQUARE, WHOLE, Layout(splits=((), ()), partial=(A,), combine="max"), ((4,), (2,))),
    "what others hold is not looked at": make(
        SQUARE, WHOLE, Layout(splits=((), ()), master=(A,)), ((4,), (2,)), over(SQUARE, "slice", B, into=(0,)),
        over(SQUARE, "all_gather", B, master=(A,), along=(0,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD.keys())
def test_good_programs_are_accepted_and_compute_the_target(case: Case) -> None:
    case.check()
    assert computes_the_target(case, seed=1)


def test_the_order_of_a_group_does_not_matter_where_it_is_harmless() -> None:
    case = GOOD["hierarchical 2×4"]
    scatter, reduce, gather = case.program.steps
    case.with_steps(scatter, replace(reduce, groups=tuple(g[::-1] for g in reduce.groups)), gather).check()
    swapped = [replace(step, groups=tuple(g[::-1] for g in step.groups)) for step in (scatter, gather)]
    case.with_steps(swapped[0], reduce, swapped[1]).check()  # the same pieces on other devices, fetched from there
    case.with_steps(replace(scatter, groups=scatter.groups[::-1]), reduce, gather).check()


def test_cells_are_as_large_as_possible() -> None:
    """A tensor of 2^60 elements is no more work than one of eight."""
    hierarchical(OBLONG, D0, D1, 2**60).check()


# --- single corruptions by hand


def broken(case: Case, number: int, **fields: Any) -> Case:
    """The case with fields of step `number`, counted from 1, replaced."""
    steps = list(case.program.steps)
    steps[number - 1] = replace(steps[number - 1], **fields)
    return case.with_steps(*steps)


def without(case: Case, number: int) -> Case:
    return case.with_steps(*(step for i, step in enumerate(case.program.steps, start=1) if i != number))


def repeated(case: Case, number: int) -> Case:
    steps = case.program.steps
    return case.with_steps(*steps[:number], *steps[number - 1 :])


HIERARCHICAL, MASTERS = GOOD["hierarchical 2×2"], GOOD["masters 2×2"]
BAD: list[tuple[str, Case, str]] = [
    # order
    ("gather out of order", broken(HIERARCHICAL, 3, groups=((0, 1), (3, 2))),
     r"step 3 of 3, all_gather over group \(3, 2\): .* side by side in the group's order"),
    ("scatter out of order", broken(HIERARCHICAL, 1, groups=((1, 0), (3, 2))),
     r"step 3 of 3, all_gather over group \(0, 1\): .* in the group's order"),
    ("one scatter out of order", broken(HIERARCHICAL, 1, groups=((1, 0), (2, 3))),
     r"step 2 of 3, all_reduce over group \(0, 2\): .* equal chunks"),
    ("slice out of order", broken(SLICED, 2, groups=((1, 0), (2, 3))), "after the last step: device 0 does not hold"),
    ("all-to-all out of order", broken(ALL_TO_ALL, 1, groups=((1, 0), (3, 2))), r"step 1 of 1, all_to_all .*\(1, 0\)"),
    ("digits of a gather exchanged", broken(SCATTER_GATHER, 2, groups=((0, 1, 2, 3),)),
     r"step 2 of 2, gather over group \(0, 1, 2, 3\): .* in the group's order"),
    ("root of a gather exchanged", broken(TO_MASTERS, 2, groups=((1, 0),)), r"step 2 of 2, gather over group \(1, 0\)"),
    ("root of a broadcast exchanged", broken(MASTERS, 3, groups=((1, 0), (2, 3))),
     r"step 3 of 3, broadcast over group \(1, 0\): a device that holds nothing is read"),
    ("root of a reduce exchanged", broken(MASTERS, 1, groups=((1, 0), (2, 3))),
     r"step 2 of 3, all_reduce over group \(0, 2\): a device that holds nothing is read"),
    # members
    ("missing member", broken(HIERARCHICAL, 2, groups=((0, 2), (1,))), r"step 2 of 3, .*\(1,\): .* as many members"),
    ("missing members", broken(HIERARCHICAL, 2, groups=((0,), (1,)), shape=(1,)), "after the last step: .* missing"),
    ("missing group", broken(HIERARCHICAL, 2, groups=((0, 2),)), r"after the last step: over group .* missing"),
    ("missing group of a gather", broken(HIERARCHICAL, 3, groups=((0, 1),)), "after the last step: device 2 does not"),
    ("no groups", broken(HIERARCHICAL, 2, groups=()), "step 2 of 3, all_reduce: .* not empty"),
    ("empty groups", broken(HIERARCHICAL, 2, groups=((),), shape=(0,)), "step 2 of 3, all_reduce: .* not empty"),
    ("in two groups", broken(HIERARCHICAL, 2, groups=((0, 2), (0, 3))), r"step 2 of 3, .*\(0, 3\): device 0 .* twice"),
    ("twice in a group", broken(HIERARCHICAL, 2, groups=((0, 2), (1, 1))), r"step 2 of 3, .*: device 1 .* twice"),
    ("unknown device", broken(HIERARCHICAL, 1, groups=((0, 1), (2, 9))), r"step 1 of 3, .*: device 9 is unknown"),
    ("wrong groups", broken(HIERARCHICAL, 2, groups=ROWS), r"step 2 of 3, all_reduce over group \(0, 1\): .* equal"),
    ("wrong pairs", broken(HIERARCHICAL, 2, groups=((0, 3), (1, 2))), r"step 2 of 3, .*\(0, 3\): .* equal chunks"),
    # contributions
    ("counted twice", repeated(MASTERS, 2), r"step 3 of 4, all_reduce over group \(0, 2\): .* disjoint"),
    ("counted twice in a scatter", broken(MIXTURE, 1, groups=ROWS), r"step 1 of 2, reduce_scatter .*: .* equal chunks"),
    ("copies summed", make(SQUARE, WHOLE, WHOLE, ((2,), (2,)), over(SQUARE, "all_reduce", A)),
     r"step 1 of 1, all_reduce over group \(0, 2\): .* disjoint"),
    ("copies as partial sums", make(SQUARE, WHOLE, Layout(splits=((), ()), partial=(A,)), ((2,), (2,))),
     r"after the last step: over group \(0, 2\) .* twice"),
    ("partial sums as copies", make(SQUARE, MASKED.source, WHOLE, ((2,), (2,))), "after the last step: .* missing"),
    ("partial sums sliced", replace(SLICED, source=MASKED.source), r"step 1 of 2, slice .*: .* hold the same"),
    ("wrong combination", broken(MAXIMUM, 1, combine="sum"), "step 1 of 2, all_reduce .*: a wrong combination"),
    ("a mask of maxima", replace(MASKED, source=replace(MASKED.source, combine="max"),
                                 target=replace(MASKED.target, combine="max")), "step 1 of 1, mask .* partial sums"),
    ("a sum becomes a maximum", replace(MASKED, target=replace(MASKED.target, combine="max")), "before the first step"),
    ("masked twice", repeated(MASKED, 1), r"step 2 of 2, mask over group \(0, 1\): .* same"),
    ("masked in one row only", broken(MASKED, 1, groups=((0, 1),)), r"after the last step: over group .* twice"),
    ("replicas that differ", make(SQUARE, WHOLE, Layout(splits=((), ()), partial=(A,)), ((2,), (2,)),
                                  Step(kind="mask", groups=((0, 2), (3, 1)), shape=(2,))),
     r"after the last step: replicas \(0, 1\) .* differ"),
    # dims
    ("wrong dim of a gather", broken(ALL_TO_ALL, 1, along=(0,)), r"step 1 of 1, all_to_all over group \(0, 1\)"),
    ("wrong dim of a cut", broken(ALL_TO_ALL, 1, into=(1,)), "after the last step: device 0 does not hold"),
    ("a dim that cannot be cut", broken(ALL_TO_ALL, 1, into=(3,)), r"step 1 of 1, .*: a dim is cut into equal pieces"),
    ("no such dim", broken(ALL_TO_ALL, 1, into=(4,)), "step 1 of 1, all_to_all .*: `into` names"),
    ("a dim twice", broken(SCATTER_GATHER, 1, into=(1, 1)), "step 1 of 2, scatter .*: `into` names"),
    ("a dim too few", broken(SCATTER_GATHER, 2, along=(1,)), "step 2 of 2, gather .*: `along` names"),
    ("a dim too many", broken(HIERARCHICAL, 2, into=(0,)), "step 2 of 3, all_reduce .*: `into` names"),
    ("dims exchanged", broken(SCATTER_GATHER, 2, along=(0, 1)), r"step 2 of 2, gather .* in the group's order"),
    # steps
    ("first step left out", without(HIERARCHICAL, 1), r"step 2 of 2, all_gather over group \(0, 1\): .* disjoint"),
    ("second step left out", without(HIERARCHICAL, 2), "after the last step: over group .* missing"),
    ("last step left out", without(HIERARCHICAL, 3), "after the last step: device 0 does not hold"),
    ("broadcast left out", without(MASTERS, 3), "after the last step: device 1 does not hold"),
    ("reduce left out", without(MASTERS, 1), r"step 2 of 2, broadcast over group \(0, 1\): a receiver holds what"),
    ("scatter repeated", repeated(HIERARCHICAL, 1), r"step 2 of 4, reduce_scatter .*\(0, 1\): .* equal chunks"),
    ("gather repeated", repeated(HIERARCHICAL, 3), r"step 4 of 4, all_gather over group \(0, 1\): .* disjoint"),
    ("slice repeated", repeated(SLICED, 1), r"step 2 of 3, slice over group \(0, 2\): .* hold the same"),
    ("unequal counts", make(SQUARE, WHOLE, WHOLE, ((2,), (2,)),
                            Step(kind="slice", groups=((0, 2),), shape=(2,), into=(0,)),
                            over(SQUARE, "all_gather", B, along=(0,))),
     r"step 2 of 2, all_gather over group \(0, 1\): .* equal numbers"),
    ("nothing is read", broken(MASTERS, 2, groups=COLUMNS), r"step 2 of 3, .*\(1, 3\): a device that holds nothing"),
    ("nothing is gathered", broken(TO_MASTERS, 2, groups=ROWS), r"step 2 of 2, gather over group \(2, 3\): .* nothing"),
    ("an unknown kind", broken(HIERARCHICAL, 2, kind="all_sum"), "step 2 of 3, all_sum: no such collective"),
    # layouts
    ("digits that are not there", replace(HIERARCHICAL, target=Layout(splits=((D1,),))), "does not have"),
    ("factors that are not there", replace(HIERARCHICAL, target=WHOLE), "2 factors and the program 1"),
    ("no box of sub-factors", make(SQUARE, WHOLE, Layout(splits=((A,), ())), ((3, 2), (1,))),
     "does not fit the sub-factors"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_corrupted_programs_are_refused(case: Case, message: str) -> None:
    with pytest.raises(VerificationError, match=f"(?s){message}"):
        case.check()


def test_a_split_that_is_not_even_is_an_error_of_the_layout() -> None:
    with pytest.raises(LayoutError, match="not even"):
        make(SQUARE, WHOLE, Layout(splits=((A,), ())), ((3,), (1,))).check()


# --- random programs and random corruptions of them


def random_case(rng: random.Random) -> Case:
    """A walk over the digits' letters: "P", "R", "M" or the number of the factor that the digit splits."""
    mesh = random_mesh(rng)
    start = {digit: rng.choice(("P", "P", "R", "M", 0, 1)) for digit in mesh.digits}
    combine: Combine = rng.choice(("sum", "sum", "max")) if "P" in start.values() else "sum"
    orders = [rng.sample(mesh.digits, len(mesh.digits)) for _ in range(2)]
    for factor, order in enumerate(orders):
        order.sort(key=lambda digit: start[digit] != factor)  # the source's digits are major
    dims = {
        (digit, f): f * (len(mesh.digits) + 1) + i for f, order in enumerate(orders) for i, digit in enumerate(order)
    }
    factors = tuple((*(digit.size for digit in order), rng.choice((1, 2))) for order in orders)

    def layout(letters: dict[Digit, str | int]) -> Layout | None:
        splits = tuple(tuple(d for d in order if letters[d] == f) for f, order in enumerate(orders))
        if any(tuple(order[: len(split)]) != split for order, split in zip(orders, splits, strict=True)):
            return None
        partial, master = (tuple(d for d in mesh.digits if letters[d] == letter) for letter in "PM")
        return Layout(splits=splits, partial=partial, combine=combine if partial else "sum", master=master)

    letters: dict[Digit, str | int] = dict(start)
    source, steps = layout(letters), []
    assert source is not None
    for _ in range(rng.randint(1, 6)):
        choices = [
            (kind, before, after)
            for kind, before, after in TRANSITIONS
            if before in letters.values() and not (kind == "mask" and combine == "max")
        ]
        kind, before, after = rng.choice(choices)
        old = [d for d in mesh.digits if letters[d] == before]
        digits = rng.sample(old, rng.randint(1, len(old)))
        new = {d: rng.choice((0, 1)) if after == "S" else after for d in digits}
        idle = tuple(d for d in mesh.digits if letters[d] == "M" and d not in digits)
        joins, cuts = kind in JOINING_KINDS, kind in CUTTING_KINDS
        step = over(mesh, kind, *digits, master=idle, combine=combine)
        steps.append(
            replace(
                step,
                along=tuple(dims[d, int(before)] for d in digits) if joins else (),
                into=tuple(dims[d, int(new[d])] for d in digits) if cuts else (),
            )
        )
        letters |= new
    target = layout(letters)
    return make(mesh, source, target, factors, *steps) if target else random_case(rng)


TRANSITIONS: tuple[tuple[StepKind, str | int, str | int], ...] = (
    ("all_reduce", "P", "R"),
    ("reduce_scatter", "P", "S"),
    ("reduce", "P", "M"),
    ("broadcast", "M", "R"),
    ("scatter", "M", "S"),
    ("slice", "R", "S"),
    ("mask", "R", "P"),
    ("all_gather", 0, "R"),
    ("all_gather", 1, "R"),
    ("gather", 0, "M"),
    ("gather", 1, "M"),
    ("all_to_all", 0, "S"),
    ("all_to_all", 1, "S"),
)
"""Kind of a step, the letter of its digits before and after; "S" is either factor."""


def random_mesh(rng: random.Random) -> Mesh:
    axes = rng.choice((((2, 2),), ((2,), (2,)), ((2,), (3,)), ((2, 2), (2,)), ((4,), (2,)), ((3, 2), (2,))))
    num_devices = prod(map(prod, axes))
    return Mesh(
        axes=tuple(Axis(name=f"a{i}", sizes=sizes) for i, sizes in enumerate(axes)),
        devices=tuple(rng.sample(range(num_devices), num_devices)),
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_are_accepted_and_compute_the_target(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(250):
        case = random_case(rng)
        case.check()
        assert computes_the_target(case, seed)


def corrupted(case: Case, rng: random.Random) -> Case:
    steps = list(case.program.steps)
    at = rng.randrange(len(steps))
    step, groups = steps[at], [list(group) for group in steps[at].groups]
    group = rng.choice(groups)
    num_dims = len(case.program.sizes)
    match rng.choice(
        ("shuffle", "shuffle all", "swap", "drop", "repeat", "exchange", "group", "dim", "kind", "device")
    ):
        case "shuffle":
            rng.shuffle(group)
        case "shuffle all":
            order = rng.sample(range(step.group_size), step.group_size)
            groups = [[group[i] for i in order] for group in groups]
        case "swap":
            other = rng.choice(groups)
            i, j = rng.randrange(len(group)), rng.randrange(len(group))
            group[i], other[j] = other[j], group[i]
        case "drop":
            return case.with_steps(*steps[:at], *steps[at + 1 :])
        case "repeat":
            return case.with_steps(*steps[: at + 1], *steps[at:])
        case "exchange":
            other_at = rng.randrange(len(steps))
            steps[at], steps[other_at] = steps[other_at], steps[at]
            return case.with_steps(*steps)
        case "group":
            groups.remove(group)
        case "dim":
            along = tuple(rng.sample(range(num_dims), len(step.along)))
            into = tuple(rng.sample(range(num_dims), len(step.into)))
            step = replace(step, **(rng.choice(({"along": along}, {"into": into}))))
        case "kind":
            alike = [t for t in TRANSITIONS if (t[0] in JOINING_KINDS) == (step.kind in JOINING_KINDS)]
            alike = [t for t in alike if (t[0] in CUTTING_KINDS) == (step.kind in CUTTING_KINDS)]
            step = replace(step, kind=rng.choice(alike)[0])
        case "device":
            group[rng.randrange(len(group))] = rng.choice(case.mesh.devices)
    steps[at] = replace(step, groups=tuple(map(tuple, groups)))
    return case.with_steps(*steps)


@pytest.mark.parametrize("seed", range(4))
def test_verdicts_on_random_corruptions_agree_with_the_arithmetic(seed: int) -> None:
    """Accepted: right. Refused: wrong or impossible to carry out, in nine of ten cases and more."""
    rng = random.Random(100 + seed)
    accepted = refused = refused_but_right = 0
    for _ in range(1000):
        case = corrupted(random_case(rng), rng)
        try:
            right = computes_the_target(case, seed)
        except MalformedError:
            right = False
        if case.is_accepted:
            accepted += 1
            assert right, f"{case.source} to {case.target}: {'; '.join(map(str, case.program.steps))}"
        else:
            refused += 1
            refused_but_right += right
    assert accepted >= 100
    assert refused >= 400
    assert refused_but_right <= 0.1 * refused
