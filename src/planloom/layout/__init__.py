"""Axes, meshes, placements and layouts: where the pieces of a tensor are."""

from planloom.layout.boxes import Box, intersect, volume
from planloom.layout.layout import Combine, Layout
from planloom.layout.mesh import Axis, Digit, Mesh
from planloom.layout.placement import Placement, enumerate_placements, mesh_of

__all__ = [
    "Axis",
    "Box",
    "Combine",
    "Digit",
    "Layout",
    "Mesh",
    "Placement",
    "enumerate_placements",
    "intersect",
    "mesh_of",
    "volume",
]
