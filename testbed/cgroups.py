"""Control groups of the testbed: a share of a core and an amount of memory for each rank, enforced by the kernel.

Where controllers are found, and what is written where (v1 | v2):

    base/                        made in this process's own group; weighs more than all else beside it
    base/rank3/                  cpu.cfs_period_us, cpu.cfs_quota_us | cpu.max        the rank's share of a core
                                 memory.limit_in_bytes | memory.max                   of the rank with all it is made of
    base/rank3/before/           (memory) where the rank starts
    base/rank3/model/            (memory) where `limits.limit_memory` moves it when the model is about to be built

A charge stays with the group in which a page was first touched. So what `model` holds is exactly what was allocated
since the move; Python, torch and the pages of their libraries stay in `before` and are never under pressure.

v1 has a tree for each controller, v2 one tree for all: there a group with controllers may hold no processes itself, so
`base` is made in the nearest group around that may have groups with controllers inside.

Only Python's own library is used here: the testbed's inner processes import this.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.limits import set_memory_limit

CONTROLLERS = ("cpu", "memory")
BEFORE, MODEL = "before", "model"
_PREFIX = "planloom-testbed-"
_WEIGHT_V1, _WEIGHT_V2 = 262_144, 10_000  # the largest that the kernel takes
_REMOVE_SECONDS = 5.0
_RETRY_SECONDS = 0.01


class NoGroupsError(Exception):
    """Why no group can be made here, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The group in which a controller's `base` is made, and the version of that controller's tree."""

    version: int
    folder: str
    top: str  # where the tree is mounted


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLimits:
    """What one rank may use: `quota_us` of every `period_us` of one core, and memory in all (None: no limit)."""

    quota_us: int
    period_us: int
    memory_bytes: int | None


def find_places(process: Path = Path("/proc/self"), root: Path = Path("/")) -> dict[str, Place]:
    """Where groups with each of the controllers can be made. `root` is put before every path (for tests)."""
    mounts = list(_cgroup_mounts((process / "mountinfo").read_text(encoding="utf-8")))
    own = dict(_own_groups((process / "cgroup").read_text(encoding="utf-8")))
    places, unified = {}, []
    for controller in CONTROLLERS:
        found = [(inner, top) for kind, inner, top, options in mounts if kind == "cgroup" and controller in options]
        if found and controller in own:
            inner, top = found[0]
            tree = _under(root, top)
            folder = _shown(tree, inner, own[controller])
            places[controller] = Place(version=1, folder=str(folder), top=str(tree))
        else:
            unified.append(controller)
    if unified:
        found = [(inner, top) for kind, inner, top, _ in mounts if kind == "cgroup2"]
        if not found:
            raise NoGroupsError(f"no control groups of {' and '.join(unified)} are mounted")
        inner, top = found[0]
        tree = _under(root, top)
        folder = _unified_folder(tree, _shown(tree, inner, own.get("", "/")), unified)
        places |= {controller: Place(version=2, folder=str(folder), top=str(tree)) for controller in unified}
    return places


def _cgroup_mounts(mountinfo: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Kind, folder of the tree that is shown, where it is shown, and the controllers (v1), of each mount."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        inner, top = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word) for word in before.split()[3:5])
        kind, _, options = after.split(maxsplit=2)
        if kind in ("cgroup", "cgroup2"):
            yield kind, inner, top, options.split(",")


def _own_groups(text: str) -> Iterator[tuple[str, str]]:
    """Controller to path; the controller of v2 is the empty word."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _shown(tree: Path, inner: str, own: str) -> Path:
    """Where a group is seen, if at all: a container may show only its part of a tree. Else the top of what is shown."""
    if own == inner or not own.startswith(inner.rstrip("/") + "/") or "/.." in own:
        return tree
    return tree / own[len(inner.rstrip("/")) + 1 :]


def _unified_folder(tree: Path, own: Path, controllers: list[str]) -> Path:
    """The nearest group, from our own upwards, in which groups may have these controllers."""
    why = ""
    for folder in (own, *own.parents):
        offered = (folder / "cgroup.controllers").read_text(encoding="utf-8").split()
        enabled = (folder / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        lacking = [controller for controller in controllers if controller not in offered]
        if lacking:
            why = f"{' and '.join(lacking)} not among the controllers of {folder}"
        elif set(controllers) <= set(enabled):
            return folder
        else:
            try:
                _write(folder / "cgroup.subtree_control", " ".join(f"+{controller}" for controller in controllers))
                return folder
            except OSError as error:  # busy: it holds processes itself
                why = f"controllers cannot be enabled inside {folder}: {error.strerror}"
        if folder == tree:
            break
    raise NoGroupsError(why)


class Groups:
    """The groups of one testbed, by the name of their owner: a process that is told from all later ones."""

    def __init__(self, places: dict[str, Place], name: str) -> None:
        self.places, self.name = places, name

    @classmethod
    def of_owner(cls, places: dict[str, Place], pid: int) -> "Groups":
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        return cls(places, f"{_PREFIX}{space}-{pid}-{_start_ticks(pid)}")

    def to_text(self) -> str:
        return json.dumps({"name": self.name, "places": {name: asdict(place) for name, place in self.places.items()}})

    @classmethod
    def from_text(cls, text: str) -> "Groups":
        read = json.loads(text)
        return cls({name: Place(**place) for name, place in read["places"].items()}, read["name"])

    def folder(self, controller: str, *inside: str) -> Path:
        return Path(self.places[controller].folder, self.name, *inside)

    def bases(self) -> list[Path]:
        return list(dict.fromkeys(self.folder(controller) for controller in CONTROLLERS))

    def make(self) -> None:
        for base in self.bases():
            _make_folder(base)
        base = self.folder("cpu")
        if self.places["cpu"].version == 1:
            _write(base / "cpu.shares", str(_WEIGHT_V1))
        else:
            _write(base / "cpu.weight", str(_WEIGHT_V2))
        self._enable(base)

    def make_rank(self, rank: int, limits: RankLimits) -> None:
        """New groups for a rank, with nothing of an earlier run in them."""
        name = f"rank{rank}"
        for base in self.bases():
            remove_tree(base / name)
        cpu, memory = self.folder("cpu", name), self.folder("memory", name)
        _make_folder(cpu)
        if self.places["cpu"].version == 1:
            _write(cpu / "cpu.cfs_period_us", str(limits.period_us))
            _write(cpu / "cpu.cfs_quota_us", str(limits.quota_us))
        else:
            _write(cpu / "cpu.max", f"{limits.quota_us} {limits.period_us}")
        _make_folder(memory)
        if limits.memory_bytes is not None:
            set_memory_limit(str(memory), limits.memory_bytes)
        self._enable(memory, ["memory"])
        for inner in (BEFORE, MODEL):
            _make_folder(memory / inner)
        for folder in (memory, memory / BEFORE, memory / MODEL):
            _write_if_there(folder / "memory.oom.group", "1")  # v2: all processes of the rank die, not one of them
            _write_if_there(folder / "memory.swap.max", "0")
            _write_if_there(folder / "memory.swappiness", "0")

    def _enable(self, folder: Path, controllers: list[str] | None = None) -> None:
        """v2: let groups inside have what is controlled by v2. v1 trees have their controller throughout."""
        wanted = [
            controller
            for controller in controllers or CONTROLLERS
            if self.places[controller].version == 2 and self.folder(controller) in (folder, *folder.parents)
        ]
        if wanted:
            _write(folder / "cgroup.subtree_control", " ".join(f"+{controller}" for controller in wanted))

    def enter(self, rank: int) -> None:
        """Move the process that calls into a rank's groups; what it starts is in them too."""
        memory = self.folder("memory", f"rank{rank}", BEFORE)
        cpu = self.folder("cpu", f"rank{rank}")
        if cpu not in memory.parents:
            _write(cpu / "cgroup.procs", "0")
        _write(memory / "cgroup.procs", "0")

    def out_of_memory(self, rank: int) -> bool:
        """Whether the kernel has killed a process of this rank because the rank's memory was used up."""
        rank_folder = self.folder("memory", f"rank{rank}")
        for folder in (rank_folder, rank_folder / BEFORE, rank_folder / MODEL):
            for name in ("memory.oom_control", "memory.events"):  # v1, v2
                path = folder / name
                if path.exists() and re.search(r"^oom_kill [1-9]", path.read_text(encoding="utf-8"), re.MULTILINE):
                    return True
        return False

    def remove(self) -> None:
        """Remove all groups; their processes may be about to end. What stays busy is left to the next testbed."""
        for base in self.bases():
            remove_tree(base)

    def remove_left_behind(self, alive: Callable[[str], bool] | None = None) -> None:
        """Remove groups of testbeds whose owner is gone, wherever in the trees they were made."""
        alive = alive or owner_is_alive
        for top in {place.top for place in self.places.values()}:
            for folder, names, _ in os.walk(top):
                for name in [name for name in names if name.startswith(_PREFIX)]:
                    names.remove(name)
                    if not alive(name):
                        remove_tree(Path(folder, name), limit_seconds=0.0)

    def own_core_limit(self) -> float:
        """How many cores the groups around leave us; infinite without a quota."""
        place = self.places["cpu"]
        limit = float("inf")
        for folder in (Path(place.folder), *Path(place.folder).parents):
            quota, period = _quota(folder)
            if quota > 0:
                limit = min(limit, quota / period)
            if folder == Path(place.top):
                break
        return limit


def owner_is_alive(name: str) -> bool:
    """Whether the process that owns groups of this name still runs. One of another PID namespace counts as alive."""
    match = re.fullmatch(_PREFIX + r"(\d+)-(\d+)-(\d+)(-trial)?", name)
    if match is None or match[1] != re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")):
        return True
    try:
        return _start_ticks(int(match[2])) == int(match[3])
    except FileNotFoundError:
        return False


def remove_tree(folder: Path, *, limit_seconds: float = _REMOVE_SECONDS) -> None:
    """Remove a group with those inside it. A group is busy until its last process has gone."""
    if not folder.is_dir():
        return
    for inside in [path for path in folder.iterdir() if path.is_dir()]:
        remove_tree(inside, limit_seconds=limit_seconds)
    deadline = time.monotonic() + limit_seconds
    while True:
        try:
            _remove_folder(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() >= deadline:
                return
            time.sleep(_RETRY_SECONDS)


def _quota(folder: Path) -> tuple[float, float]:
    """Quota and period of a group in µs; a quota of -1 is none."""
    if (folder / "cpu.cfs_quota_us").exists():
        words = [(folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period")]
    elif (folder / "cpu.max").exists():
        words = (folder / "cpu.max").read_text(encoding="utf-8").replace("max", "-1").split()
    else:
        return -1.0, 1.0
    return float(words[0]), float(words[1])


def _start_ticks(pid: int) -> int:
    """When a process started, in ticks since boot: the 22nd field of its stat, the second may hold anything."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _make_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)


def _remove_folder(folder: Path) -> None:
    folder.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_if_there(path: Path, text: str) -> None:
    if path.exists():
        _write(path, text)
