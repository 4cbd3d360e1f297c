"""`Plan`, `Timeline` → tables and pictures."""

from planloom.report.pictures import timeline_svg
from planloom.report.tables import blocks_table, candidates_table, cluster_table, plan_tables

__all__ = ["blocks_table", "candidates_table", "cluster_table", "plan_tables", "timeline_svg"]
