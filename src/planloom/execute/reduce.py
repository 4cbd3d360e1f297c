"""A choice of `find_reductions` on the wire: programs in chunks, several chunks on their way at once.

Every chunk is a slice of the array along the sub-factor that no digit ever splits, so each goes through its program by
itself. Steps on the same process group run one after another, in one order on all devices, in a thread of their own; so
while one group waits for its slow link another reduces the next chunk. Steps by rings are single messages with tags of
their own and need no order among others: each step of a program has its thread. The order in a thread is by waves: step
s of the i-th chunk of a program is in wave i + s. A step comes after the step before it in every such order, so nothing
can block. Arrays on a GPU go through one thread, in the same order.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from planloom.collective import Choice, Step, local_sizes_after
from planloom.execute.wire import Finish, PeerLostError, Wire
from planloom.layout import Mesh


@dataclass
class _Task:
    """One step of one chunk."""

    chunk: int
    number: int
    step: Step
    sizes: tuple[int, ...]
    done: threading.Event = field(default_factory=threading.Event)


class Reducer:
    """Carries out one choice for arrays of one size, again and again; its groups are created once."""

    def __init__(self, wire: Wire, choice: Choice, mesh: Mesh) -> None:
        self.wire, self.mesh = wire, mesh
        self.factors, self.local_sizes = choice.programs[0].factors, choice.programs[0].local_sizes
        steps = [program.program(mesh).steps for program in choice.programs]
        wire.create_groups(group for program in steps for s in program if not s.is_local for group in s.groups)
        self._num_programs = len(steps)
        self._cut_dim = self._find_cut_dim(choice.num_chunks)
        self._num_chunks = choice.num_chunks if self._cut_dim is not None else 1  # one, where it cannot be cut evenly
        self._steps = [steps[i % len(steps)] for i in range(self._num_chunks)]

    @property
    def num_elements(self) -> int:
        """Of a device's array before."""
        return prod(self.local_sizes)

    def _find_cut_dim(self, num_chunks: int) -> int | None:
        """The minor sub-factor of a factor, which no digit splits, if it can be cut into chunks."""
        dim = -1
        for subs in self.factors:
            dim += len(subs)
            if subs[-1] % num_chunks == 0:
                return dim
        return None

    def run(self, local: Tensor) -> Tensor:
        """The array after the change, with one dim a sub-factor; fewer elements than expected are padded with zeros."""
        array = self._padded(local)
        try:
            if self._cut_dim is None or self._num_chunks == 1:
                return self.wire.run_steps(self._steps[0], array, self.local_sizes)()
            chunks = [chunk.contiguous() for chunk in array.chunk(self._num_chunks, self._cut_dim)]
            return torch.cat(self._run_chunks(chunks), self._cut_dim)
        except PeerLostError as error:
            limit, ranks = self.wire.timeout.total_seconds(), ", ".join(map(str, self.mesh.devices))
            raise PeerLostError(
                f"a reduction among the ranks {ranks} failed on rank {self.wire.device}: another one is gone, or did "
                f"not answer within {limit:g} s ({error})"
            ) from error

    def all_reduce(self, local: Tensor) -> Tensor:
        """For a choice that changes no split: the result in the shape of the tensor given."""
        return self.run(local).reshape(-1)[: local.numel()].reshape(local.shape)

    def start(self, local: Tensor) -> Finish:
        """The same, while the caller goes on; the result waits for it."""
        box: list[Tensor] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                box.append(self.run(local))
            except BaseException as error:  # handed to the caller, who waits
                failures.append(error)

        thread = threading.Thread(target=work, name="planloom-reduce", daemon=True)
        thread.start()

        def finish() -> Tensor:
            thread.join()
            if failures:
                raise failures[0]
            return box[0]

        return finish

    def _padded(self, local: Tensor) -> Tensor:
        missing = self.num_elements - local.numel()
        flat = local.reshape(-1)
        return (torch.cat((flat, flat.new_zeros(missing))) if missing > 0 else flat).reshape(self.local_sizes)

    def _run_chunks(self, chunks: list[Tensor]) -> list[Tensor]:
        queues = self._queues(chunks[0])
        if len(queues) > 1 and chunks[0].device.type != "cpu":
            # On a GPU a kernel of one group can keep that of another from starting: all in one order.
            queues = {(): sorted((task for queue in queues.values() for task in queue), key=self._wave)}
        done = {(task.chunk, task.number): task.done for queue in queues.values() for task in queue}
        most_steps = max(map(len, self._steps))
        tag = self.wire.reserve_tags(self._num_chunks * most_steps)
        failures: list[BaseException] = []

        def work(queue: Sequence[_Task]) -> None:
            try:
                for task in queue:
                    before = done.get((task.chunk, task.number - 1))
                    if before is not None and not before.wait(self.wire.timeout.total_seconds()):
                        raise PeerLostError("a chunk did not arrive in time")
                    if failures:
                        return
                    number = tag + task.chunk * most_steps + task.number
                    chunks[task.chunk] = self.wire.start_step(task.step, chunks[task.chunk], task.sizes, number)()
                    task.done.set()
            except BaseException as error:  # raised below, in the caller's thread
                failures.append(error)
                for event in done.values():
                    event.set()

        threads = [threading.Thread(target=work, args=(queue,), daemon=True) for queue in queues.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return chunks

    def _wave(self, task: _Task) -> tuple[int, int]:
        return task.chunk // self._num_programs + task.number, task.chunk

    def _queues(self, first: Tensor) -> dict[tuple[int, ...], list[_Task]]:
        """The tasks of every thread of this device, in the order of waves."""
        tasks = []
        for chunk, steps in enumerate(self._steps):
            sizes = tuple(first.shape)
            for number, step in enumerate(steps):
                tasks.append(_Task(chunk=chunk, number=number, step=step, sizes=sizes))
                sizes = local_sizes_after(step, sizes)
        tasks.sort(key=self._wave)
        queues: dict[tuple[int, ...], list[_Task]] = {}
        for task in tasks:
            group = task.step.group_of(self.wire.device) or ()
            num_bytes = prod(task.sizes) * first.element_size()
            alone = bool(group) and self.wire.by_rings(task.step, num_bytes, group, first.device)
            queues.setdefault((task.number if alone else -1, *sorted(group)), []).append(task)
        return queues
