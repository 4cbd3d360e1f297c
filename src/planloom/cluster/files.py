"""Cluster files: YAML to `Cluster` and back, and the presets that come with the package.

    name: my-cluster
    library: nccl                 # may be left out; or gloo: whose collectives run here
    levels:                       # outermost first
      - name: node
        count: 4
        link:
          bandwidth: 200 Gbit/s   # of one uplink, in each direction
          latency: 14 us
          shared: true            # may be left out: false, one uplink for each device of the node
          shape: crossbar         # may be left out; or ring, pairs, torus (`planloom.cluster.model`)
          # What is known of single collectives; each may be left out (`planloom calibrate` fits them):
          efficiency:             # the share of the bandwidth that one reaches
            all_reduce: 0.92
            all_gather: {2: 0.7, 4: 0.8}  # among so many members of the level
          hop: {all_to_all: 9 us} # the latency of a hop where it differs
          start: {all_reduce: 8.4 us}  # before the first hop
          flow: {all_to_all: 0.02}  # by which share each flow on an uplink beside the first prolongs it
      - name: gpu
        count: 8
        link: {bandwidth: 300 GB/s, latency: 3.4 us}
    device:
      name: A100-SXM4-80GB
      flops: {bfloat16: 312 TFLOP/s, float32: 19.5 TFLOP/s}
      memory: 80 GiB
      memory_bandwidth: 2.039 TB/s
      launch: 5 us                # what launching one kernel costs

Reading is strict. Unknown, missing and repeated keys, contradictions and wrong units are errors that name the file, the
path of the key (`levels[1].link.bandwidth`) and what is expected there. YAML's aliases are refused: a file says what it
says in the place where it says it. Each `_read_*` below reads one of the mappings above into one value of `model`.
"""

import dataclasses
import importlib.resources
from collections.abc import Mapping
from pathlib import Path

import yaml

from planloom.cluster import units
from planloom.cluster.model import (
    COLLECTIVES,
    DTYPES,
    LIBRARIES,
    MAX_EFFICIENCY,
    SHAPES,
    Cluster,
    Device,
    Level,
    Link,
)
from planloom.errors import ClusterError

_ANY = "any"
_PRESETS = importlib.resources.files("planloom.cluster") / "presets"


def list_presets() -> tuple[str, ...]:
    """The names that `load_cluster` knows without a file."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _PRESETS.iterdir() if entry.name.endswith(".yaml"))
    )


def load_cluster(source: str | Path, *, num_outer: int | None = None) -> Cluster:
    """The cluster of a preset's name or of a YAML file's path, with `num_outer` members of its outermost level.

    A string that is the name of a preset is that preset; every other string and every `Path` is a file.
    """
    cluster = cluster_from_yaml(_read_text(source), name=str(source))
    if num_outer is None:
        return cluster
    if num_outer < 1:
        raise ClusterError(
            f"the number of members of the outermost level {cluster.levels[0].name!r} (--nodes) is too small",
            given=str(num_outer),
            required="a whole number from 1",
        )
    outermost = dataclasses.replace(cluster.levels[0], count=num_outer)
    return dataclasses.replace(cluster, levels=(outermost, *cluster.levels[1:]))


def cluster_from_yaml(text: str, *, name: str) -> Cluster:
    """The cluster of a file's text; `name` is what errors call it."""
    try:
        return _read_cluster(_parse_yaml(text))
    except ClusterError as error:
        raise ClusterError(
            f"cluster {name}: {error.what}", given=error.given, required=error.required, todo=error.todo
        ) from None


def cluster_to_yaml(cluster: Cluster) -> str:
    """The text of a file from which `load_cluster` reads an equal cluster."""
    device = cluster.device
    document = {
        "name": cluster.name,
        "library": cluster.library,
        "levels": [
            {"name": level.name, "count": level.count, "link": _link_keys(level.link)} for level in cluster.levels
        ],
        "device": {
            "name": device.name,
            "flops": {dtype: units.write_rate(rate) for dtype, rate in device.flops_per_second.items()},
            "memory": units.write_bytes(device.memory_bytes),
            "memory_bandwidth": units.write_bandwidth(device.memory_bytes_per_second),
            "launch": units.write_seconds(device.launch_seconds),
        },
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _link_keys(link: Link) -> dict[str, object]:
    keys: dict[str, object] = {
        "bandwidth": units.write_bandwidth(link.bandwidth_bytes_per_second),
        "latency": units.write_seconds(link.latency_seconds),
        "shared": link.shared,
        "shape": link.shape,
    }
    for key, figures in (("hop", link.hop_seconds), ("start", link.start_seconds)):
        if figures:
            keys[key] = {collective: units.write_seconds(seconds) for collective, seconds in figures.items()}
    if link.flow:
        keys["flow"] = dict(link.flow)
    efficiency: dict[str, dict[int | str, float]] = {}
    for (collective, members), share in link.efficiency.items():
        efficiency.setdefault(collective, {})[members or _ANY] = share
    if efficiency:
        keys["efficiency"] = efficiency
    return keys


def _read_text(source: str | Path) -> str:
    if isinstance(source, str) and source in list_presets():
        return (_PRESETS / f"{source}.yaml").read_text(encoding="utf-8")
    try:
        return Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ClusterError(
            f"there is no cluster {str(source)!r}",
            given=repr(str(source)),
            required=f"a preset ({', '.join(list_presets())}) or the path of a YAML file that exists",
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ClusterError(
            f"cluster file {str(source)!r} cannot be read", given=str(error), required="a YAML file in UTF-8"
        ) from None


def _parse_yaml(text: str) -> object:
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ClusterError(
                    "it has an alias",
                    given=f"*{event.anchor}",
                    required="YAML without aliases",
                    todo="write out what the alias stands for",
                )
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _plain(loader, node, "")
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a scalar such as the date 2020-13-45
        raise ClusterError("it is not YAML", given=" ".join(str(error).split()), required="one YAML document") from None


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: str) -> object:
    """A YAML node as dicts, lists and scalars. PyYAML's own would let the last of two equal keys win in silence."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, f"{path}[{index}]") for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    mapping: dict[str, object] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "(a mapping or list)"
        if key in mapping:
            raise ClusterError(
                f"{_join(path, key)} is given twice",
                given=f"again in line {key_node.start_mark.line + 1}",
                required="every key once",
            )
        mapping[key] = _plain(loader, value_node, _join(path, key))
    return mapping


def _read_cluster(value: object) -> Cluster:
    keys = _read_keys(value, "", required=("name", "levels", "device"), optional=("library",))
    library = keys.get("library", "nccl")
    if library not in LIBRARIES:
        raise ClusterError("library is unknown", given=repr(library), required=f"one of {', '.join(LIBRARIES)}")
    items = keys["levels"]
    if not isinstance(items, list) or not items:
        raise ClusterError("levels has the wrong form", given=repr(items), required="a list of one level or more")
    levels = tuple(_read_level(item, f"levels[{index}]") for index, item in enumerate(items))
    names = [level.name for level in levels]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ClusterError(
                f"levels[{index}].name is the name of levels[{names.index(name)}] too",
                given=repr(name),
                required="each level with a name of its own",
            )
    name, device = _read_name(keys["name"], "name"), _read_device(keys["device"], "device")
    return Cluster(name=name, levels=levels, device=device, library=library)


def _read_level(value: object, path: str) -> Level:
    keys = _read_keys(value, path, required=("name", "count", "link"))
    count = keys["count"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(
            f"{path}.count is not a number of members", given=repr(count), required="a whole number from 1"
        )
    return Level(
        name=_read_name(keys["name"], f"{path}.name"), count=count, link=_read_link(keys["link"], f"{path}.link")
    )


def _read_link(value: object, path: str) -> Link:
    optional = ("shared", "shape", "hop", "start", "flow", "efficiency")
    keys = _read_keys(value, path, required=("bandwidth", "latency"), optional=optional)
    shared, shape = keys.get("shared", False), keys.get("shape", "crossbar")
    if not isinstance(shared, bool):
        raise ClusterError(f"{path}.shared is neither true nor false", given=repr(shared), required="true or false")
    if shape not in SHAPES:
        raise ClusterError(f"{path}.shape is not a shape", given=repr(shape), required=f"one of {', '.join(SHAPES)}")
    return Link(
        bandwidth_bytes_per_second=units.parse_bandwidth(keys["bandwidth"], key=f"{path}.bandwidth"),
        latency_seconds=units.parse_seconds(keys["latency"], key=f"{path}.latency"),
        shared=shared,
        shape=shape,
        hop_seconds=_read_times(keys.get("hop", {}), f"{path}.hop"),
        start_seconds=_read_times(keys.get("start", {}), f"{path}.start"),
        flow={
            collective: _read_share(share, f"{path}.flow.{collective}", limit=1.0)
            for collective, share in _read_keys(keys.get("flow", {}), f"{path}.flow", optional=COLLECTIVES).items()
        },
        efficiency=_read_efficiency(keys.get("efficiency", {}), f"{path}.efficiency"),
    )


def _read_times(value: object, path: str) -> Mapping[str, float]:
    """`all_reduce: 8.4 us`, by collective."""
    times = _read_keys(value, path, optional=COLLECTIVES)
    return {collective: units.parse_seconds(time, key=f"{path}.{collective}") for collective, time in times.items()}


def _read_share(value: object, path: str, *, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
        raise ClusterError(f"{path} is not a share", given=repr(value), required=f"a number above 0, at most {limit:g}")
    return float(value)


def _read_efficiency(value: object, path: str) -> Mapping[tuple[str, int], float]:
    """`all_reduce: 0.9`, or by the number of members: `all_reduce: {2: 0.8, any: 0.9}`."""
    efficiency = {}
    for collective, shares in _read_keys(value, path, optional=COLLECTIVES).items():
        by_members = shares if isinstance(shares, dict) else {_ANY: shares}
        for members, share in by_members.items():
            where = f"{path}.{collective}" + (f".{members}" if isinstance(shares, dict) else "")
            if members != _ANY and not (members.isdecimal() and int(members) > 1):
                raise ClusterError(
                    f"{where} is not for a number of members", given=repr(members), required=f"2 or more, or {_ANY}"
                )
            key = (collective, 0 if members == _ANY else int(members))
            efficiency[key] = _read_share(share, where, limit=MAX_EFFICIENCY)
    return efficiency


def _read_device(value: object, path: str) -> Device:
    keys = _read_keys(value, path, required=("name", "flops", "memory", "memory_bandwidth", "launch"))
    rates = _read_keys(keys["flops"], f"{path}.flops", optional=DTYPES)
    if not rates:
        raise ClusterError(
            f"{path}.flops is empty", given="{}", required=f"one rate or more, by dtype: {', '.join(DTYPES)}"
        )
    return Device(
        name=_read_name(keys["name"], f"{path}.name"),
        flops_per_second={dtype: units.parse_rate(rate, key=f"{path}.flops.{dtype}") for dtype, rate in rates.items()},
        memory_bytes=units.parse_bytes(keys["memory"], key=f"{path}.memory"),
        memory_bytes_per_second=units.parse_bandwidth(keys["memory_bandwidth"], key=f"{path}.memory_bandwidth"),
        launch_seconds=units.parse_seconds(keys["launch"], key=f"{path}.launch"),
    )


def _read_name(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ClusterError(f"{path} is not a name", given=repr(value), required="printable text, not empty")
    return value


def _read_keys(
    value: object, path: str, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """The value as a mapping that has all required keys and none beside those and the optional ones."""
    expected = ", ".join((*required, *(f"{key} (optional)" if required else key for key in optional)))
    if not isinstance(value, dict):
        raise ClusterError(
            f"{path or 'the file'} has the wrong form",
            given=repr(value),
            required=f"a mapping with the keys {expected}",
        )
    for key in value:
        if key not in required and key not in optional:
            raise ClusterError(f"{_join(path, key)} is an unknown key", given=repr(key), required=f"only {expected}")
    for key in required:
        if key not in value:
            raise ClusterError(
                f"{_join(path, key)} is missing",
                given=f"the keys {', '.join(value)}" if value else "no keys",
                required=f"the keys {expected}",
            )
    return value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
