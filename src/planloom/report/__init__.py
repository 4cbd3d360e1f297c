"""`Plan`, `Timeline` → tables, pictures and traces."""

from planloom.report.blocks import blocks_dot, blocks_tables
from planloom.report.pictures import timeline_svg
from planloom.report.summaries import summary_tables
from planloom.report.tables import candidates_table, cluster_table, families_table, plan_tables
from planloom.report.traces import chrome_trace

__all__ = [
    "blocks_dot",
    "blocks_tables",
    "candidates_table",
    "chrome_trace",
    "cluster_table",
    "families_table",
    "plan_tables",
    "summary_tables",
    "timeline_svg",
]
