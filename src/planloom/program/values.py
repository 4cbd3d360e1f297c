"""The `Program`: bodies of instructions, and for every role a list of calls of bodies.

Bodies are straight lines written once, in the time index: a buffer that is `indexed` has one instance a micro-batch. A
role is a device group here, with one stage of the plan or several: all its devices run the same instructions, and what
differs between them (coordinates, groups) is in the values. Where a program says stage, it means the role. A *shared*
group is a union of roles, which all have its bodies, each for its devices' share (`shared`). The
verifier, the simulator and the runtime interpret the same instructions; there is no other description of what runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from planloom.collective import Step
from planloom.layout import Box, Digit, Layout, Mesh


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Buffer:
    """A named place on every device of a stage; one instance a micro-batch if `indexed`."""

    name: str
    indexed: bool = False
    of: int = -1
    """The shared group whose it is; -1: the role's own."""

    def __hash__(self) -> int:
        return hash(self.name)  # memories are tables of buffers, and a string remembers its hash

    @property
    def tensor(self) -> str:
        """The tensor that a buffer is named after."""
        return self.name.split(":")[0].split("@")[0]

    def __str__(self) -> str:
        return f"{self.name}[m]" if self.indexed else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A tensor at the boundary of a run, with its layout and that of its cotangent (None: it carries none).

    `sizes` are the factor sizes of the whole tensor in one micro-batch.
    """

    tensor: str
    layout: Layout
    cotangent: Layout | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One of the turns of a ring of devices (`program.rings`), numbered from 0; `digits` are those of its axis.

    Number -1 stands for what is done before: the ring is opened.
    """

    number: int
    digits: tuple[Digit, ...]

    @property
    def count(self) -> int:
        return prod(digit.size for digit in self.digits)

    @property
    def opens(self) -> bool:
        return self.number < 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def position(self, coordinates: Mapping[Digit, int]) -> int:
        """The place of a device in its ring."""
        place = 0
        for digit in self.digits:
            place = place * digit.size + coordinates[digit]
        return place

    def met(self, coordinates: Mapping[Digit, int]) -> dict[Digit, int]:
        """The coordinates of the device whose keys and values a device meets in this turn."""
        place, found = (self.position(coordinates) - self.number) % self.count, dict(coordinates)
        for digit in reversed(self.digits):
            place, found[digit] = divmod(place, digit.size)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBlock:
    """A block inside a run: its split dims with their digits, and the slot of each tensor from outside.

    `timed_dim` is the dim that the micro-batches split; `passes_partial`: digits over which a partial cotangent of
    its outputs is passed on to its parameters; `turn`: the run is one turn of a ring, and carries out its part of the
    block.
    """

    block: int
    splits: tuple[tuple[str, tuple[Digit, ...]], ...]
    timed_dim: str
    reads: dict[str, int]
    passes_partial: bool
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks with no communication between them, forward or backward: the unit that is launched and profiled.

    `moment`: its coordinates along digits of time, one run for each (see `moments`).
    """

    index: int
    stage: int
    blocks: tuple[RunBlock, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    moment: tuple[tuple[Digit, int], ...] = ()

    @property
    def turn(self) -> Turn | None:
        """Which turn of a ring it is; such a run has one block."""
        return self.blocks[0].turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Run the local forward function; `saves`: with what its `Backward` needs; `again`: it is a recomputation."""

    run: int
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    saves: bool = True
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """The vector-Jacobian product of an earlier `Forward` that saved, of the same micro-batch; None: no cotangent."""

    run: int
    cotangents: tuple[Buffer | None, ...]
    outputs: tuple[Buffer | None, ...]
    is_split: bool = False
    """The cotangents of parameters are left to a `WeightGradient`."""
    again: tuple[Buffer, ...] = ()
    """What it reads again instead of having it saved: the keys and values of a turn of a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The rest of an earlier `Backward` that is split: the cotangents of parameters; None: not one, or none."""

    run: int
    outputs: tuple[Buffer | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Start a collective program on a tensor whose factor i is the product of `factors[i]`, major to minor.

    `sizes` are the dims, one a sub-factor, of a device's array before it. For a ragged tensor `rows` holds the device's
    part of its mask, whose elements are the first `num_row_dims` dims: only the rows where it is true are stored.
    """

    tensor: str
    source: Buffer
    target: Buffer
    steps: tuple[Step, ...]
    factors: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    rows: Buffer | None = None
    num_row_dims: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coalesced:
    """Start several collectives as one: equal kinds and groups step by step, their arrays side by side in one message.

    Each target is awaited by itself. `takes_sources`: the sources are copied at the start and forgotten.
    """

    collectives: tuple[Collective, ...]
    takes_sources: bool = False

    def __post_init__(self) -> None:
        if len({signature(collective) for collective in self.collectives}) != 1:
            raise ValueError("collectives of different kinds or groups cannot be one")


def signature(collective: Collective) -> tuple[tuple[object, ...], ...]:
    """What collectives must have in common to be carried out as one."""
    return tuple((step.kind, step.groups, step.combine) for step in collective.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Elements from one device to another: boxes in the index of the sender's and of the receiver's array."""

    source: int
    target: int
    source_box: Box
    target_box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Start the sending half of an exchange between stages."""

    tensor: str
    channel: str
    source: Buffer
    transfers: tuple[Transfer, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Start the receiving half of an exchange between stages."""

    tensor: str
    channel: str
    target: Buffer
    transfers: tuple[Transfer, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Wait for what was started on a buffer.

    `lag`: for the instance of that many micro-batches before, if it is in flight; `every`: for all that are.
    """

    buffer: Buffer
    lag: int = 0
    every: bool = False
    free: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A junction: the sum of cotangents in one layout."""

    tensor: str
    target: Buffer
    sources: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add into a buffer of the step, which starts empty."""

    tensor: str
    target: Buffer
    source: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A piece of a buffer whose array has these dims, one a factor: a view where its elements lie side by side."""

    tensor: str
    source: Buffer
    target: Buffer
    box: Box
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write a piece to its place in a buffer whose array has these dims: the first makes it, the last completes it."""

    tensor: str
    target: Buffer
    source: Buffer
    box: Box
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """The cotangent of the loss: one."""

    tensor: str
    target: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Forget a buffer."""

    buffer: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step on the shards of these parameters: gradients in, new values out."""

    parameters: tuple[str, ...]
    gradients: tuple[Buffer, ...]
    targets: tuple[Buffer, ...]


Instruction = (
    Forward
    | Backward
    | WeightGradient
    | Collective
    | Coalesced
    | Send
    | Receive
    | Wait
    | Sum
    | Accumulate
    | Take
    | Put
    | Seed
    | Free
    | Update
)


def collectives_in(instruction: Instruction) -> tuple[Collective, ...]:
    """The collectives that an instruction starts."""
    match instruction:
        case Collective():
            return (instruction,)
        case Coalesced(collectives=collectives):
            return collectives
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyCall:
    """One call of a body; `micro` is the time index, -1 outside the loop."""

    body: str
    micro: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter at its home stage: the layout between steps, and the one in which gradients and optimizer live."""

    name: str
    stage: int
    sizes: tuple[int, ...]
    layout: Layout
    optimizer_layout: Layout
    buffer: Buffer
    gathers: tuple[Buffer, ...] = ()

    @property
    def updated(self) -> Buffer:
        """Where the optimizer writes: the stored buffer itself, unless only a shard is updated."""
        if self.layout == self.optimizer_layout:
            return self.buffer
        return replace(self.buffer, name=f"{self.name}:updated")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The program of one role."""

    mesh: Mesh
    bodies: dict[str, tuple[Instruction, ...]]
    calls: tuple[BodyCall, ...]
    parameters: tuple[StoredParameter, ...]
    loss: Buffer

    @property
    def split_runs(self) -> frozenset[int]:
        """The runs whose backward comes in two halves."""
        return frozenset(i.run for body in self.bodies.values() for i in body if isinstance(i, WeightGradient))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every device does in one training step; `shared`: the meshes of shared groups, numbered behind the roles."""

    plan_name: str
    num_micro_batches: int
    stages: tuple[StageProgram, ...]
    runs: tuple[Run, ...]
    trains: bool = True
    """Whether a step updates parameters; else it computes the loss alone."""
    shared: tuple[Mesh, ...] = ()

    def mesh_of(self, group: int) -> Mesh:
        """The mesh of a device group: of a run, of a stored parameter, or of a buffer's."""
        return self.stages[group].mesh if group < len(self.stages) else self.shared[group - len(self.stages)]

    def mesh_at(self, stage: int, buffer: Buffer) -> Mesh:
        """The mesh on which a role's buffer lies."""
        return self.mesh_of(buffer.of if buffer.of >= 0 else stage)

    def stage_of(self, device: int) -> int:
        return next(i for i, stage in enumerate(self.stages) if device in stage.mesh.devices)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for stage in self.stages for device in stage.mesh.devices)
