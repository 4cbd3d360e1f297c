"""For ranks: how much memory from here on. Needs nothing but Python, and nothing else of the testbed.

    from testbed.limits import limit_memory, peak_memory, reset_peak

    import torch
    limit_memory(200_000_000)      # what is allocated from now on: over that, the kernel kills the rank
    model = ...
    reset_peak(); step(); print(peak_memory())

A rank of a testbed with devices starts in a control group `before` and moves itself into a group `model` at the first
`limit_memory`. Charges do not move, so `model` holds what was allocated since, and nothing else: the size of Python and
torch does not count, and neither does the file cache, which the kernel drops before it kills.

    use  = usage - file cache                           limit = use + num_bytes
    peak = largest usage since reset - file cache       (v1: max_usage_in_bytes, v2: peak)

In a plain process there is no limit, `limit_memory` returns False, and figures are the process's own: anonymous memory
above that at the call, and for peaks VmHWM less the pages of files.
"""

import os
import re

GROUP_VARIABLE = "TESTBED_MEMORY_GROUP"
"""The folder of the rank's own control group of memory; set by the testbed."""

_state = {"base": 0, "inside": 0, "peak": -1}  # plain process: anonymous bytes; moved; v2: descriptor of memory.peak


def limit_memory(num_bytes: "int | None" = None) -> bool:
    """Count what this rank allocates from now on, and let it have `num_bytes` of that (None: no limit).

    Returns whether the kernel holds the rank to it. Called again, it sets the limit anew, above the use at that time.
    """
    rank = os.environ.get(GROUP_VARIABLE, "")
    if not rank:
        _state["base"] = _process_bytes("RssAnon")
        return False
    group = os.path.join(rank, "model")
    if not _state["inside"]:
        _write(os.path.join(group, "cgroup.procs"), "0")
        _state["inside"] = 1
        reset_peak()
    set_memory_limit(group, -1 if num_bytes is None else memory_use() + num_bytes)
    return num_bytes is not None


def memory_use() -> int:
    """Bytes that this rank has allocated since `limit_memory` and not freed; before that, all of the process."""
    group = _group()
    if not group:
        return max(0, _process_bytes("RssAnon") - _state["base"])
    return max(0, _number(group, "memory.usage_in_bytes", "memory.current") - _file_cache(group))


def peak_memory() -> int:
    """The largest `memory_use` since `limit_memory` or `reset_peak`, to within the kernel's batches (under 1 MB)."""
    group = _group()
    if group and os.path.exists(os.path.join(group, "memory.max_usage_in_bytes")):
        return max(memory_use(), _number(group, "memory.max_usage_in_bytes") - _file_cache(group))
    if group and _state["peak"] >= 0:
        return max(memory_use(), int(os.pread(_state["peak"], 64, 0)) - _file_cache(group))
    own = _process_bytes("VmHWM") - _process_bytes("RssFile") - _state["base"]
    return max(memory_use(), own)


def reset_peak() -> None:
    """Let `peak_memory` begin anew."""
    group = _group()
    if group and os.path.exists(os.path.join(group, "memory.max_usage_in_bytes")):
        _write(os.path.join(group, "memory.max_usage_in_bytes"), "0")
        return
    if group and _resets_in_v2(group):
        return
    _write("/proc/self/clear_refs", "5")  # VmHWM; see proc(5)


def _resets_in_v2(group: str) -> bool:
    """memory.peak begins anew for one descriptor when that is written to (Linux 6.12); before, it never does."""
    try:
        if _state["peak"] < 0:
            _state["peak"] = os.open(os.path.join(group, "memory.peak"), os.O_RDWR)
        os.write(_state["peak"], b"reset\n")
    except OSError:
        if _state["peak"] >= 0:
            os.close(_state["peak"])
        _state["peak"] = -1
        _state["base"] = _process_bytes("RssAnon") - memory_use()
        return False
    return True


def _group() -> str:
    return os.path.join(os.environ[GROUP_VARIABLE], "model") if _state["inside"] else ""


def set_memory_limit(group: str, num_bytes: int) -> None:
    """Of a control group, swap included; -1: no limit. (v1 has one limit for memory and one for memory with swap.)"""
    if not os.path.exists(os.path.join(group, "memory.limit_in_bytes")):
        _write(os.path.join(group, "memory.max"), "max" if num_bytes < 0 else str(num_bytes))
        return
    with_swap = os.path.join(group, "memory.memsw.limit_in_bytes")
    if os.path.exists(with_swap):
        _write(with_swap, "-1")  # never the smaller of the two
    _write(os.path.join(group, "memory.limit_in_bytes"), str(num_bytes))
    if os.path.exists(with_swap):
        _write(with_swap, str(num_bytes))


def _file_cache(group: str) -> int:
    """Pages of files. Shared memory counts as cache there but cannot be dropped."""
    stat = _read(os.path.join(group, "memory.stat"))
    found = dict(re.findall(r"^(total_cache|total_shmem|file|shmem) (\d+)$", stat, re.MULTILINE))
    if "total_cache" in found:
        return int(found["total_cache"]) - int(found["total_shmem"])
    return int(found["file"]) - int(found["shmem"])


def _process_bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    if match is None:
        raise OSError(f"this kernel's /proc/self/status has no {name}")
    return int(match[1]) * 1024


def _number(group: str, *names: str) -> int:
    for name in names:
        if os.path.exists(os.path.join(group, name)):
            return int(_read(os.path.join(group, name)))
    raise OSError(f"{group} has none of {names}")


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
