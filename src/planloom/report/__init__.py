"""`Plan`, `Timeline` → tables and pictures."""

from planloom.report.blocks import blocks_dot, blocks_tables
from planloom.report.pictures import timeline_svg
from planloom.report.tables import candidates_table, cluster_table, plan_tables

__all__ = ["blocks_dot", "blocks_tables", "candidates_table", "cluster_table", "plan_tables", "timeline_svg"]
