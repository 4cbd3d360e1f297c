"""Planloom's workers on devices instead of local processes under torchrun."""

import sys
from typing import Any

from planloom.errors import TrainingError
from planloom.execute.processes import Launch, Listener, event_in, reported_error
from testbed.opening import OpenDevices

_LIMIT_SECONDS = 3600.0
_TAIL = 2000


def launcher(devices: OpenDevices, *, timeout_seconds: float = _LIMIT_SECONDS) -> Launch:
    """What `profile_locally` and `train_locally` take as `launch`, to run on these devices."""

    def launch(module: str, arguments: list[str], num_processes: int, on_event: Listener) -> None:
        if num_processes != devices.cluster.num_devices:
            raise TrainingError(
                "the plan has another number of devices than the testbed",
                given=f"{num_processes} processes",
                required=f"{devices.cluster.num_devices}, one for each device of {devices.cluster.name}",
            )
        errors: list[dict[str, Any]] = []

        def hear(rank: int, stream: str, text: str) -> None:
            event = event_in(text) if stream == "stdout" else None
            if event is not None:
                errors.append(event) if event["event"] == "error" else on_event(event)

        command = [sys.executable, "-m", module, *arguments]
        result = devices.run(command, timeout_seconds=timeout_seconds, on_line=hear)
        if errors:
            raise reported_error(errors[0])
        for rank in result.ranks:
            if rank.exit_code:
                how = "ran out of memory" if rank.out_of_memory else f"ended with code {rank.exit_code}"
                raise TrainingError(
                    f"rank {rank.rank} {how}; all others were stopped",
                    given=rank.stderr[-_TAIL:],
                    required="all ranks alive until the end",
                )

    return launch
