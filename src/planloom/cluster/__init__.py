"""YAML files and presets to a `Cluster`: levels, links and devices.

`model` has the values, `units` the figures with human units, `files` the reading and writing, `presets` the machines.
"""

from planloom.cluster.files import cluster_from_yaml, cluster_to_yaml, list_presets, load_cluster
from planloom.cluster.model import (
    COLLECTIVES,
    DTYPES,
    LIBRARIES,
    MAX_EFFICIENCY,
    SHAPES,
    Cluster,
    Device,
    Level,
    Library,
    Link,
    Shape,
)
from planloom.cluster.routes import Message, exchange_seconds
from planloom.cluster.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes, parse_rate, parse_seconds

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "LIBRARIES",
    "MAX_EFFICIENCY",
    "SHAPES",
    "Cluster",
    "Device",
    "Level",
    "Library",
    "Link",
    "Message",
    "Shape",
    "cluster_from_yaml",
    "cluster_to_yaml",
    "exchange_seconds",
    "format_bytes",
    "format_seconds",
    "list_presets",
    "load_cluster",
    "parse_bandwidth",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
]
