"""Clusters: the tree of devices, figures with units, files and presets, and every message."""

import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planloom.cluster import DTYPES, Cluster, Device, Level, Link, cluster_to_yaml, list_presets, load_cluster, units
from planloom.errors import ClusterError

LINK = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-6)
DEVICE = Device(
    name="d", flops_per_second={"float32": 1e12}, memory_bytes=2**30, memory_bytes_per_second=1e11, launch_seconds=1e-6
)


def make_cluster(*counts: int) -> Cluster:
    levels = tuple(Level(name=f"level{index}", count=count, link=LINK) for index, count in enumerate(counts))
    return Cluster(name="c", levels=levels, device=DEVICE)


# --- the tree of devices ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_coordinates_count_through_the_levels_with_the_outermost_as_major(counts: list[int]) -> None:
    cluster = make_cluster(*counts)
    coordinates = [cluster.coordinates(device) for device in range(cluster.num_devices)]
    assert coordinates == list(product(*map(range, counts)))
    assert cluster.level_counts == tuple(counts)


@given(st.data())
def test_the_crossed_level_is_the_outermost_that_differs(data: st.DataObject) -> None:
    cluster = make_cluster(2, 3, 4)
    devices = data.draw(st.lists(st.integers(0, cluster.num_devices - 1), min_size=1, max_size=4))
    columns = list(zip(*map(cluster.coordinates, devices), strict=True))
    crossed = cluster.crossed_level(tuple(devices))
    assert all(len(set(column)) == 1 for column in columns[:crossed])
    assert crossed == 2 or len(set(columns[crossed])) > 1


def test_crossed_level_by_example() -> None:
    cluster = make_cluster(2, 2, 4)
    assert cluster.crossed_level((5,)) == 2
    assert cluster.crossed_level((4, 7)) == 2
    assert cluster.crossed_level((7, 0, 4)) == 1
    assert cluster.crossed_level((3, 11)) == 0


def test_clusters_are_values() -> None:
    cluster = make_cluster(2, 2)
    assert hash(cluster) == hash(make_cluster(2, 2))
    assert pickle.loads(pickle.dumps(cluster)) == cluster  # to worker processes
    with pytest.raises(FrozenInstanceError):
        cluster.name = "other"  # type: ignore[misc]


def test_a_device_keeps_its_own_rates() -> None:
    rates = {"float32": 1e12}
    device = replace(DEVICE, flops_per_second=rates)
    rates["float32"] = 0.0
    assert device.flops_per_second == {"float32": 1e12}


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (lambda: make_cluster(2, 2).coordinates(4), ("device 4 is not in cluster 'c'", "from 0 to 3")),
        (lambda: make_cluster(2, 2).coordinates(-1), ("device -1 is not", "from 0 to 3")),
        (lambda: make_cluster(2, 2).crossed_level((0, 9)), ("device 9 is not", "from 0 to 3")),
        (lambda: make_cluster(2, 2).crossed_level(()), ("no devices", "one device or more")),
        (lambda: make_cluster(), ("levels of cluster 'c'", "none", "one level or more")),
        (lambda: make_cluster(2, 0), ("count of level 'level1'", "0", "a whole number from 1")),
        (lambda: replace(make_cluster(2), levels=make_cluster(2).levels * 2), ("equal names", "'level0', 'level0'")),
        (lambda: replace(make_cluster(2), name=" "), ("a cluster has no proper name", "not empty")),
        (lambda: replace(make_cluster(2).levels[0], name=""), ("a level has no proper name", "not empty")),
        (lambda: replace(DEVICE, name="a\nb"), ("a device has no proper name", "printable")),
        (lambda: replace(LINK, bandwidth_bytes_per_second=0.0), ("bandwidth_bytes_per_second", "0.0", "above zero")),
        (lambda: replace(LINK, latency_seconds=float("nan")), ("latency_seconds", "nan", "finite number")),
        (lambda: replace(DEVICE, flops_per_second={}), ("flops_per_second of device 'd'", "none", "float32")),
        (lambda: replace(DEVICE, flops_per_second={"bf16": 1.0}), ("'bf16'", "bfloat16")),
        (lambda: replace(DEVICE, flops_per_second={"float32": -1.0}), ("flops_per_second['float32']", "-1.0")),
        (lambda: replace(DEVICE, memory_bytes=0), ("memory_bytes", "0", "above zero")),
        (lambda: replace(DEVICE, memory_bytes_per_second=float("inf")), ("memory_bytes_per_second", "inf", "finite")),
        (lambda: replace(DEVICE, launch_seconds=-1.0), ("launch_seconds", "-1.0", "above zero")),
    ],
)
def test_values_that_cannot_be_are_refused(make: Any, messages: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        make()
    assert_says(caught.value, *messages)


def assert_says(error: ClusterError, *messages: str) -> None:
    for message in messages:
        assert message in str(error)


# --- units -----------------------------------------------------------------------------------------------------------

positive_floats = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        (units.parse_bandwidth, "25 GB/s", 25e9),
        (units.parse_bandwidth, "200 Gbit/s", 25e9),
        (units.parse_bandwidth, "100 MiB/s", 100 * 2**20),
        (units.parse_bandwidth, "3.35TB/s", 3.35e12),
        (units.parse_bandwidth, " 8 bit/s ", 1.0),
        (units.parse_seconds, "3.4 us", 3.4e-6),
        (units.parse_seconds, "2 ms", 2e-3),
        (units.parse_seconds, "1.5e3 ns", 1.5e-6),
        (units.parse_seconds, ".5 s", 0.5),
        (units.parse_bytes, "80 GiB", 80 * 2**30),
        (units.parse_bytes, "16 GB", 16 * 10**9),
        (units.parse_bytes, "2GiB", 2**31),
        (units.parse_bytes, "0.1 GiB", 107374182),
        (units.parse_rate, "312 TFLOP/s", 312e12),
        (units.parse_rate, "0.989 PFLOP/s", 989e12),
    ],
)
def test_figures_with_units(parse: Any, text: str, number: float) -> None:
    assert parse(text, key="k") == number


@pytest.mark.parametrize(
    ("parse", "example"),
    [
        (units.parse_bandwidth, "25 GB/s"),
        (units.parse_seconds, "3.4 us"),
        (units.parse_bytes, "80 GiB"),
        (units.parse_rate, "312 TFLOP/s"),
    ],
)
@pytest.mark.parametrize(
    ("number", "unit", "problem"),
    [
        ("25", "", "has no unit"),
        ("25", "gb/s", "has the unknown unit 'gb/s'"),
        ("25", "Gbps", "has the unknown unit 'Gbps'"),
        ("25", "{unit} extra", "is not a number and a unit"),
        ("25 25", "{unit}", "is not a number and a unit"),
        ("0", "{unit}", "is not a finite number above zero"),
        ("-3", "{unit}", "is not a finite number above zero"),
        ("nan", "{unit}", "is not a number and a unit"),
        ("inf", "{unit}", "is not a number and a unit"),
        ("1e999999999999", "{unit}", "is not a finite number above zero"),
        ("1e-999999999999", "{unit}", "is not a finite number above zero"),
        ("1_000", "{unit}", "is not a number and a unit"),
        ("", "", "is not a number and a unit"),
        ("", "{unit}", "is not a number and a unit"),
    ],
)
def test_wrong_figures_name_key_given_and_expected(
    parse: Any, example: str, number: str, unit: str, problem: str
) -> None:
    text = f"{number} {unit.format(unit=example.split()[1])}".strip()
    with pytest.raises(ClusterError) as caught:
        parse(text, key="levels[1].link.bandwidth")
    assert caught.value.what.startswith(f"levels[1].link.bandwidth {problem}")
    assert caught.value.given == repr(text)
    assert f"as in '{example}'" in caught.value.required
    assert example.split()[1] in caught.value.required


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (25, "has no unit"),
        (2.5, "has no unit"),
        (float("nan"), "has no unit"),
        (True, "is not text"),
        (None, "is not text"),
    ],
)
def test_figures_that_are_not_text_are_refused(value: object, problem: str) -> None:
    with pytest.raises(ClusterError, match=problem) as caught:
        units.parse_seconds(value, key="device.launch")
    assert_says(caught.value, "device.launch", repr(value), "as in '3.4 us'")


def test_memory_is_one_byte_or_more() -> None:
    with pytest.raises(ClusterError, match=r"device.memory is less than one byte"):
        units.parse_bytes("0.9 B", key="device.memory")


@given(positive_floats)
def test_written_figures_read_as_the_same_number(number: float) -> None:
    assert units.parse_bandwidth(units.write_bandwidth(number), key="k") == number
    assert units.parse_seconds(units.write_seconds(number), key="k") == number
    assert units.parse_rate(units.write_rate(number), key="k") == number


@given(st.integers(1, 2**63))
def test_written_bytes_read_as_the_same_number(number: int) -> None:
    assert units.parse_bytes(units.write_bytes(number), key="k") == number


@given(st.integers(1, 9999), st.sampled_from(list(enumerate(["", "k", "M", "G", "T"]))))
def test_texts_in_any_unit_are_exact(count: int, prefix: tuple[int, str]) -> None:
    power, letter = prefix
    assert units.parse_bytes(f"{count} {letter}B", key="k") == count * 1000**power
    assert units.parse_bandwidth(f"{count} {letter}B/s", key="k") == count * 1000**power
    assert units.parse_bandwidth(f"{count} {letter}bit/s", key="k") == count * 1000**power / 8
    if power:
        assert units.parse_bytes(f"{count} {letter.upper()}iB", key="k") == count * 1024**power
        assert units.parse_bandwidth(f"{count} {letter.upper()}iB/s", key="k") == count * 1024**power


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.write_bandwidth(25e9), "25 GB/s"),
        (units.write_seconds(3.4e-6), "3.4 us"),
        (units.write_bytes(80 * 2**30), "80 GiB"),
        (units.write_bytes(16 * 10**9), "16 GB"),
        (units.write_rate(312e12), "312 TFLOP/s"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(1000), "1000 B"),
        (units.format_bytes(1023.9), "1.00 KiB"),
        (units.format_bytes(1.5 * 2**30), "1.50 GiB"),
        (units.format_bytes(1023.9 * 2**20), "1.00 GiB"),
        (units.format_bytes(1000 * 2**20), "1000 MiB"),
        (units.format_bytes(-3 * 2**20), "-3.00 MiB"),
        (units.format_bytes(2**70), "1048576 PiB"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(3.4e-6), "3.40 us"),
        (units.format_seconds(0.0123), "12.3 ms"),
        (units.format_seconds(0.9996), "1.00 s"),
        (units.format_seconds(999.6e-6), "1.00 ms"),
        (units.format_seconds(123.4), "123 s"),
        (units.format_seconds(12345), "12345 s"),
        (units.format_seconds(5e-10), "0.50 ns"),
    ],
)
def test_numbers_as_text(text: str, expected: str) -> None:
    assert text == expected


# --- files -----------------------------------------------------------------------------------------------------------

printable = st.characters(exclude_categories=("C", "Z")) | st.just(" ")
names = st.text(printable, min_size=1).filter(str.strip)
links = st.builds(
    Link, bandwidth_bytes_per_second=positive_floats, latency_seconds=positive_floats, shared=st.booleans()
)
clusters = st.builds(
    Cluster,
    name=names,
    levels=st.lists(
        st.builds(Level, name=names, count=st.integers(1, 10**6), link=links),
        min_size=1,
        max_size=4,
        unique_by=lambda level: level.name,
    ).map(tuple),
    device=st.builds(
        Device,
        name=names,
        flops_per_second=st.dictionaries(st.sampled_from(DTYPES), positive_floats, min_size=1),
        memory_bytes=st.integers(1, 2**50),
        memory_bytes_per_second=positive_floats,
        launch_seconds=positive_floats,
    ),
)


@pytest.fixture(scope="module")
def scratch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters") / "cluster.yaml"


@given(cluster=clusters)
def test_a_written_cluster_reads_as_the_same_cluster(cluster: Cluster, scratch_file: Path) -> None:
    scratch_file.write_bytes(cluster_to_yaml(cluster).encode())
    assert load_cluster(scratch_file) == cluster
    assert load_cluster(str(scratch_file)) == cluster


def test_presets_are_listed() -> None:
    assert {"dgx-a100", "dgx-h100", "two-by-two"} <= set(list_presets())


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_loads_under_its_own_name_and_round_trips(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    path = tmp_path / "copy.yaml"
    path.write_text(cluster_to_yaml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster


def test_figures_of_the_presets() -> None:
    h100 = load_cluster("dgx-h100", num_outer=16)
    assert h100.num_devices == 128
    assert h100.levels[0].link == Link(bandwidth_bytes_per_second=50e9, latency_seconds=14e-6)
    assert h100.levels[1].link.bandwidth_bytes_per_second == 450e9
    assert h100.device.flops_per_second["bfloat16"] == 989e12
    assert load_cluster("dgx-a100").level_counts == (1, 8)
    two_by_two = load_cluster("two-by-two")
    assert two_by_two.level_counts == (2, 2)
    assert two_by_two.levels[0].link == Link(bandwidth_bytes_per_second=125e6, latency_seconds=1e-4, shared=True)
    assert two_by_two.device.memory_bytes == 4 * 2**30


def test_the_number_of_nodes_is_checked() -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster("dgx-h100", num_outer=0)
    assert_says(caught.value, "outermost level 'node' (--nodes)", "0", "a whole number from 1")


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster("dgx-h1000")
    assert_says(caught.value, "no cluster 'dgx-h1000'", "the path of a YAML file", *list_presets())


def test_a_path_is_never_a_preset() -> None:
    with pytest.raises(ClusterError, match="no cluster 'dgx-h100'"):
        load_cluster(Path("dgx-h100"))


GOOD: dict[str, Any] = {
    "name": "c",
    "levels": [
        {"name": "node", "count": 2, "link": {"bandwidth": "1 GB/s", "latency": "1 us", "shared": True}},
        {"name": "gpu", "count": 4, "link": {"bandwidth": "9 GB/s", "latency": "1 us"}},
    ],
    "device": {
        "name": "d",
        "flops": {"float32": "1 TFLOP/s"},
        "memory": "1 GiB",
        "memory_bandwidth": "1 TB/s",
        "launch": "1 us",
    },
}
MISSING = object()


def changed(value: Any, keys: tuple[str | int, ...], new: object) -> Any:
    """The value with the entry at these keys replaced, added or (MISSING) left out."""
    if not keys:
        return new
    key, *rest = keys
    if isinstance(value, list):
        assert isinstance(key, int)
        return [*value[:key], changed(value[key], tuple(rest), new), *value[key + 1 :]]
    entry = changed(value.get(key), tuple(rest), new)
    return {**{k: v for k, v in value.items() if k != key}, **({} if entry is MISSING else {key: entry})}


def load_text(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path)


def test_the_unchanged_file_is_good(tmp_path: Path) -> None:
    cluster = load_text(tmp_path, yaml.safe_dump(GOOD))
    assert [level.link.shared for level in cluster.levels] == [True, False]


@pytest.mark.parametrize(
    ("keys", "new", "messages"),
    [
        ((), [1], ("the file has the wrong form", "[1]", "the keys name, levels, device")),
        (("name",), MISSING, ("name is missing", "the keys name, levels, device")),
        (("name",), 3, ("name is not a name", "3", "text")),
        (("name",), "a\tb", ("name is not a name", "printable")),
        (("name",), "", ("name is not a name", "''", "not empty")),
        (("nodes",), 3, ("nodes is an unknown key", "'nodes'", "only name, levels, device")),
        (("levels",), {}, ("levels has the wrong form", "{}", "a list of one level or more")),
        (("levels",), [], ("levels has the wrong form", "[]", "a list of one level or more")),
        (("levels", 1), "gpu", ("levels[1] has the wrong form", "'gpu'", "the keys name, count, link")),
        (("levels", 1, "name"), "node", ("levels[1].name is the name of levels[0] too", "'node'", "of its own")),
        (("levels", 1, "name"), None, ("levels[1].name is not a name", "None", "text")),
        (("levels", 0, "count"), 0, ("levels[0].count", "0", "a whole number from 1")),
        (("levels", 0, "count"), -2, ("levels[0].count", "-2", "a whole number from 1")),
        (("levels", 0, "count"), 2.5, ("levels[0].count", "2.5", "a whole number from 1")),
        (("levels", 0, "count"), True, ("levels[0].count", "True", "a whole number from 1")),
        (("levels", 0, "count"), MISSING, ("levels[0].count is missing", "the keys name, count, link")),
        (("levels", 0, "size"), 3, ("levels[0].size is an unknown key", "only name, count, link")),
        (
            ("levels", 1, "link"),
            "1 GB/s",
            ("levels[1].link has the wrong form", "bandwidth, latency, shared (optional)"),
        ),
        (("levels", 1, "link", "bandwidth"), MISSING, ("levels[1].link.bandwidth is missing", "bandwidth, latency")),
        (("levels", 1, "link", "bandwidth"), 25, ("levels[1].link.bandwidth has no unit", "25", "as in '25 GB/s'")),
        (("levels", 1, "link", "bandwidth"), "0 GB/s", ("levels[1].link.bandwidth is not", "'0 GB/s'", "above zero")),
        (("levels", 1, "link", "bandwidth"), "3 us", ("levels[1].link.bandwidth has the unknown unit 'us'", "GB/s")),
        (("levels", 1, "link", "latency"), float("nan"), ("levels[1].link.latency", "nan", "as in '3.4 us'")),
        (("levels", 1, "link", "latency"), "-1 us", ("levels[1].link.latency", "'-1 us'", "above zero")),
        (("levels", 1, "link", "speed"), 1, ("levels[1].link.speed is an unknown key", "bandwidth, latency")),
        (("levels", 1, "link", "shared"), "maybe", ("levels[1].link.shared", "'maybe'", "true or false")),
        (("levels", 1, "link", "shared"), 1, ("levels[1].link.shared", "1", "true or false")),
        (("device",), MISSING, ("device is missing", "name, levels", "the keys name, levels, device")),
        (("device",), {}, ("device.name is missing", "no keys", "memory_bandwidth")),
        (("device", "name"), [], ("device.name is not a name", "[]", "text")),
        (("device", "flops"), {}, ("device.flops is empty", "by dtype: float64, float32, bfloat16")),
        (("device", "flops"), "1 TFLOP/s", ("device.flops has the wrong form", "float32, bfloat16")),
        (("device", "flops", "bf16"), "1 TFLOP/s", ("device.flops.bf16 is an unknown key", "bfloat16")),
        (("device", "flops", "float32"), "1 TB/s", ("device.flops.float32", "'TB/s'", "as in '312 TFLOP/s'")),
        (("device", "memory"), "1 GB/s", ("device.memory has the unknown unit 'GB/s'", "as in '80 GiB'")),
        (("device", "memory_bandwidth"), "1 GB", ("device.memory_bandwidth", "'GB'", "as in '25 GB/s'")),
        (("device", "launch"), 0, ("device.launch has no unit", "0", "as in '3.4 us'")),
        (("device", "cores"), 1, ("device.cores is an unknown key", "name, flops, memory")),
    ],
)
def test_wrong_files_name_the_key_and_what_is_expected(
    tmp_path: Path, keys: tuple[str | int, ...], new: object, messages: tuple[str, ...]
) -> None:
    with pytest.raises(ClusterError) as caught:
        load_text(tmp_path, yaml.safe_dump(changed(GOOD, keys, new)))
    assert_says(caught.value, "mine.yaml: ", *messages)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("", ("the file has the wrong form", "None", "name, levels, device")),
        ("name: [", ("it is not YAML", "line 1", "one YAML document")),
        ("name: a\n---\nname: b\n", ("it is not YAML", "one YAML document")),
        ("name: !!python/name:os.system x\n", ("it is not YAML", "one YAML document")),
        ("name: 2020-13-45\n", ("it is not YAML", "month", "one YAML document")),
        ("name: a\nname: b\n", ("name is given twice", "line 2", "every key once")),
        ("levels:\n- link: {latency: 1 us, latency: 2 us}\n", ("levels[0].link.latency is given twice", "line 2")),
        ("name: &a [*a]\n", ("it has an alias", "*a", "write out")),
        ("? [a]\n: b\n", ("(a mapping or list) is an unknown key", "name, levels, device")),
    ],
)
def test_what_is_no_cluster_file_at_all(tmp_path: Path, text: str, messages: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        load_text(tmp_path, text)
    assert_says(caught.value, "mine.yaml: ", *messages)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster(tmp_path)
    assert_says(caught.value, "cannot be read", "a YAML file in UTF-8")
    (tmp_path / "latin1.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ClusterError) as caught:
        load_cluster(tmp_path / "latin1.yaml")
    assert_says(caught.value, "latin1.yaml", "cannot be read", "a YAML file in UTF-8")
