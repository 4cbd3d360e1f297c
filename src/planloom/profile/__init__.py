"""Runs and links → measured seconds, written to the store of `cost` (CFP: real programs, each distinct run once)."""

from planloom.profile.measure import is_measured, measure_programs, missing_runs
from planloom.profile.session import local_store, profile_locally

__all__ = ["is_measured", "local_store", "measure_programs", "missing_runs", "profile_locally"]
