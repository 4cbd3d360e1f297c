"""Dimension rules: written ones, those of users, and those that are found by execution."""

from planloom.capture.rules.custom import dimension_rule
from planloom.capture.rules.written import attach_rule, attach_rules

__all__ = ["attach_rule", "attach_rules", "dimension_rule"]
