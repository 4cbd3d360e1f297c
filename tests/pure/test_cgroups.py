"""Control groups of the testbed, on a tree of files that stands for the kernel's; shares and cores of ranks."""

import os
import shutil
from pathlib import Path

import pytest

from testbed import cgroups, limits
from testbed.cgroups import Groups, NoGroupsError, Place, RankLimits, find_places, owner_is_alive
from testbed.devices import DeviceLimits, plan_devices
from testbed.errors import TestbedError
from testbed.speed import judge_speed, measured_ranks

INFINITE = float("inf")
RANK = RankLimits(quota_us=2000, period_us=5000, memory_bytes=None)

V1_FILES = {
    "cpu": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000", "cpu.shares": "1024", "cgroup.procs": ""},
    "memory": {
        "memory.limit_in_bytes": "9223372036854771712",
        "memory.memsw.limit_in_bytes": "9223372036854771712",
        "memory.usage_in_bytes": "1000",
        "memory.max_usage_in_bytes": "5000",
        "memory.stat": "total_cache 700\ntotal_shmem 200\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "cgroup.procs": "",
    },
}
V2_FILES = {
    "cgroup.controllers": "cpuset cpu io memory pids\n",
    "cgroup.subtree_control": "\n",
    "cgroup.procs": "",
    "cpu.max": "max 100000\n",
    "cpu.weight": "100\n",
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.oom.group": "0\n",
    "memory.current": "1000\n",
    "memory.stat": "anon 400\nfile 700\nshmem 200\n",
    "memory.events": "low 0\noom 0\noom_kill 0\n",
}


class FakeKernel:
    """A folder with /proc/self and control groups, in which a new group has its files at once, as in the kernel."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.process = root, root / "proc"
        self.process.mkdir()
        (root / "cgroup").mkdir()
        self.busy: set[Path] = set()  # v2: groups that hold processes, so that no controllers can be enabled inside
        self._write = cgroups._write
        monkeypatch.setattr(cgroups, "_make_folder", self.make_folder)
        monkeypatch.setattr(cgroups, "_remove_folder", shutil.rmtree)
        monkeypatch.setattr(cgroups, "_write", self.write)

    def mount(self, mountinfo: str, own: str) -> None:
        (self.process / "mountinfo").write_text(mountinfo)
        (self.process / "cgroup").write_text(own)

    def make_folder(self, folder: Path) -> None:
        if folder.exists():
            return
        folder.mkdir()
        controller = next((name for name in V1_FILES if f"/cgroup/{name}" in str(folder)), None)
        for name, text in (V2_FILES if controller is None else V1_FILES[controller]).items():
            (folder / name).write_text(text)

    def write(self, path: Path, text: str) -> None:
        if not path.exists():
            raise FileNotFoundError(2, "no such file", str(path))
        if path.name == "cgroup.subtree_control":
            if path.parent in self.busy:
                raise OSError(16, "Device or resource busy")
            offered = (path.parent / "cgroup.controllers").read_text().split()
            assert all(word[1:] in offered for word in text.split())
            text = text.replace("+", "")
        self._write(path, text)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    return FakeKernel(tmp_path, monkeypatch)


@pytest.fixture
def v1(fake: FakeKernel) -> FakeKernel:
    fake.mount(
        "30 23 0:26 / /cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "31 23 0:27 /outer /cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "32 23 0:28 / /cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "33 23 0:29 / /with\\040space rw - tmpfs tmpfs rw\n",
        "4:memory:/outer/inner\n1:cpu,cpuacct:/\n0::/\n",
    )
    for name in ("cpu", "memory", "memory/inner"):  # /outer of the tree is what is shown
        fake.make_folder(fake.root / "cgroup" / name)
    return fake


@pytest.fixture
def v2(fake: FakeKernel) -> FakeKernel:
    fake.mount("30 23 0:26 / /cgroup rw shared:9 - cgroup2 cgroup2 rw\n", "0::/user.slice/session-3.scope\n")
    (fake.root / "cgroup").rmdir()
    for name in ("", "user.slice", "user.slice/session-3.scope"):
        fake.make_folder(fake.root / "cgroup" / name)
    fake.busy.add(fake.root / "cgroup/user.slice/session-3.scope")
    return fake


def test_v1_groups_are_made_in_our_own_group_of_each_tree(v1: FakeKernel) -> None:
    places = find_places(v1.process, v1.root)
    assert places["cpu"] == Place(version=1, folder=f"{v1.root}/cgroup/cpu", top=f"{v1.root}/cgroup/cpu")
    assert places["memory"].folder == f"{v1.root}/cgroup/memory/inner"
    groups = Groups.from_text(Groups(places, "planloom-testbed-1-2-3").to_text())
    groups.make()
    groups.make_rank(3, RankLimits(quota_us=2000, period_us=5000, memory_bytes=1 << 30))
    cpu = v1.root / "cgroup/cpu/planloom-testbed-1-2-3"
    memory = v1.root / "cgroup/memory/inner/planloom-testbed-1-2-3/rank3"
    assert (cpu / "cpu.shares").read_text() == "262144"
    assert (cpu / "rank3/cpu.cfs_quota_us").read_text() == "2000"
    assert (cpu / "rank3/cpu.cfs_period_us").read_text() == "5000"
    assert (memory / "memory.limit_in_bytes").read_text() == str(1 << 30)
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == str(1 << 30)
    groups.enter(3)
    assert (cpu / "rank3/cgroup.procs").read_text() == (memory / "before/cgroup.procs").read_text() == "0"
    assert not groups.out_of_memory(3)
    (memory / "model/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert groups.out_of_memory(3)
    groups.make_rank(3, RANK)  # a new run begins with new groups
    assert not groups.out_of_memory(3)
    groups.remove()
    assert not cpu.exists()
    assert not memory.parent.exists()


def test_v2_groups_are_made_where_controllers_can_be_enabled(v2: FakeKernel) -> None:
    places = find_places(v2.process, v2.root)
    slice_folder = v2.root / "cgroup/user.slice"
    assert {place.folder for place in places.values()} == {str(slice_folder)}
    assert set((slice_folder / "cgroup.subtree_control").read_text().split()) == {"cpu", "memory"}
    groups = Groups(places, "planloom-testbed-1-2-3")
    groups.make()
    groups.make_rank(0, RankLimits(quota_us=1000, period_us=5000, memory_bytes=1 << 20))
    base = slice_folder / "planloom-testbed-1-2-3"
    assert (base / "cpu.weight").read_text() == "10000"
    assert (base / "cgroup.subtree_control").read_text().split() == ["cpu", "memory"]
    rank = base / "rank0"
    assert (rank / "cpu.max").read_text() == "1000 5000"
    assert (rank / "memory.max").read_text() == str(1 << 20)
    assert (rank / "cgroup.subtree_control").read_text().split() == ["memory"]
    assert (rank / "model/memory.swap.max").read_text() == "0"
    assert (rank / "model/memory.oom.group").read_text() == "1"
    groups.enter(0)
    assert (rank / "before/cgroup.procs").read_text() == "0"
    assert (rank / "cgroup.procs").read_text() == ""  # a group with controllers inside holds no processes
    (rank / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert groups.out_of_memory(0)
    groups.remove()
    assert not base.exists()


def test_v2_without_controllers_says_which_are_missing(v2: FakeKernel) -> None:
    for folder in ("", "user.slice", "user.slice/session-3.scope"):
        (v2.root / "cgroup" / folder / "cgroup.controllers").write_text("cpu io\n")
    with pytest.raises(NoGroupsError, match="memory not among the controllers"):
        find_places(v2.process, v2.root)


def test_v2_of_a_container_full_of_processes_says_so(v2: FakeKernel) -> None:
    v2.busy |= {v2.root / "cgroup/user.slice", v2.root / "cgroup"}
    with pytest.raises(NoGroupsError, match=r"cannot be enabled inside .*busy"):
        find_places(v2.process, v2.root)


def test_a_machine_without_control_groups_says_so(fake: FakeKernel) -> None:
    fake.mount("30 23 0:26 / / rw - ext4 /dev/root rw\n", "0::/\n")
    with pytest.raises(NoGroupsError, match="no control groups of cpu and memory are mounted"):
        find_places(fake.process, fake.root)


def test_only_groups_whose_owner_is_gone_are_removed(v1: FakeKernel) -> None:
    groups = Groups(find_places(v1.process, v1.root), "planloom-testbed-1-2-3")
    places = [v1.root / "cgroup/cpu", v1.root / "cgroup/memory", v1.root / "cgroup/memory/inner"]
    for place in places:
        for name in ("planloom-testbed-1-10-5", "planloom-testbed-1-11-5", "another"):
            v1.make_folder(place / name)
            v1.make_folder(place / name / "rank0")
    groups.remove_left_behind(alive=lambda name: "-11-" in name)
    for place in places:
        assert {path.name for path in place.iterdir() if path.is_dir()} - {"inner"} == {
            "planloom-testbed-1-11-5",
            "another",
        }


def test_an_owner_is_told_from_a_later_process_with_its_number() -> None:
    own = Groups.of_owner({}, os.getpid()).name
    start, _, ticks = own.rpartition("-")
    assert owner_is_alive(own)
    assert owner_is_alive(f"{own}-trial")
    assert not owner_is_alive(f"{start}-{int(ticks) + 1}")
    assert owner_is_alive("planloom-testbed-1-2-3")  # of another PID namespace: nobody can tell
    assert owner_is_alive("planloom-testbed-unreadable")


def test_a_quota_around_us_is_the_number_of_cores(v1: FakeKernel) -> None:
    groups = Groups(find_places(v1.process, v1.root), "planloom-testbed-1-2-3")
    assert groups.own_core_limit() == INFINITE
    (v1.root / "cgroup/cpu/cpu.cfs_quota_us").write_text("150000")
    assert groups.own_core_limit() == 1.5


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "share", "period_us", "cores"),
    [
        (1, 2, 1.0, 5000, (0,)),
        (2, 2, 0.8, 5000, (0, 1)),
        (3, 2, 0.4, 5000, (0, 1, 0)),
        (4, 2, 0.4, 5000, (0, 1, 0, 1)),
        (8, 2, 0.2, 5000, (0, 1) * 4),
        (16, 2, 0.1, 10000, (0, 1) * 8),
        (8, 16, 1.0, 5000, tuple(range(8))),
    ],
)
def test_ranks_share_what_the_machine_has(
    num_ranks: int, num_cores: int, share: float, period_us: int, cores: tuple[int, ...]
) -> None:
    plan = plan_devices(num_ranks, DeviceLimits(), tuple(range(num_cores)), INFINITE)
    assert plan.share == pytest.approx(share)
    assert plan.limits == RankLimits(quota_us=round(share * period_us), period_us=period_us, memory_bytes=None)
    assert plan.core_of_rank == cores
    assert num_ranks * plan.share <= 0.8 * num_cores + 1e-9


def test_large_shares_of_few_ranks_are_left_to_the_kernel_to_place() -> None:
    assert plan_devices(3, DeviceLimits(cpu_share=0.5), (0, 1), INFINITE).core_of_rank == (None,) * 3


@pytest.mark.parametrize("share", [0.41, 1.2, 0.0, -1.0])
def test_more_than_the_machine_has_is_refused(share: float) -> None:
    with pytest.raises(TestbedError, match=r"4 ranks cannot have[\s\S]*1.6 in all[\s\S]*cpu_share of at most 0.4"):
        plan_devices(4, DeviceLimits(cpu_share=share), (0, 1), INFINITE)


def test_a_container_with_one_core_of_two_has_one() -> None:
    assert plan_devices(4, DeviceLimits(), (0, 1), 1.0).share == pytest.approx(0.2)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_rank_limits_itself_above_what_it_uses(
    version: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: FakeKernel = request.getfixturevalue(version)
    groups = Groups(find_places(fake.process, fake.root), "planloom-testbed-1-2-3")
    groups.make()
    groups.make_rank(0, RANK)
    monkeypatch.setenv(limits.GROUP_VARIABLE, str(groups.folder("memory", "rank0")))
    monkeypatch.setattr(limits, "_state", {"base": 0, "inside": 0, "peak": -1})
    model = groups.folder("memory", "rank0", "model")
    assert limits.limit_memory(10_000)
    assert (model / "cgroup.procs").read_text() == "0"
    assert limits.memory_use() == 500  # of 1000, 700 are cache, 200 of which cannot be dropped
    name = "memory.limit_in_bytes" if version == "v1" else "memory.max"
    assert (model / name).read_text() == "10500"
    if version == "v1":
        (model / "memory.max_usage_in_bytes").write_text("5000")
        assert limits.peak_memory() == 4500
    assert not limits.limit_memory(None)
    assert (model / name).read_text() == ("-1" if version == "v1" else "max")


def test_a_plain_process_counts_but_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.GROUP_VARIABLE, raising=False)
    monkeypatch.setattr(limits, "_state", {"base": 0, "inside": 0, "peak": -1})
    assert not limits.limit_memory(1)
    limits.reset_peak()
    block = bytearray(b"1" * 20_000_000)
    assert 19_000_000 < limits.memory_use() < 23_000_000
    del block
    assert limits.memory_use() < 4_000_000
    assert 38_000_000 < limits.peak_memory() < 44_000_000  # two such blocks, while one was made from the other


def test_speed_is_judged_by_share_and_by_time() -> None:
    times = {"idle": [(1.0, 0.4)], "compute": [(1.04, 0.416)], "send": [(1.2, 0.48), (1.2, 0.48), (9.0, 1.0)]}
    idle, compute, send = judge_speed(0, times, 0.4)
    assert (idle.ok, compute.ok, send.ok) == (True, True, False)
    assert send.speed_deviation == pytest.approx(0.2)
    assert [result.ok for result in judge_speed(0, {"idle": [(1.0, 0.3)]}, 0.4)] == [False]


def test_one_rank_a_core_is_measured_if_two_others_are_left() -> None:
    assert measured_ranks((0, 1, 0, 1)) == [0, 1]
    assert measured_ranks((0, 1, 0)) == [0]
    assert measured_ranks((None,) * 5) == [0]
