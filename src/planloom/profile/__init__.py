"""Runs and links → measured seconds and bytes, written to the store of `cost` (CFP: real programs, each run once).

`work` says what there is to measure, `runs` and `links` measure it with the clock of `timing`, `measure` goes through
it, `session` does so in this process or on local ones.
"""

from planloom.profile.measure import measure_programs
from planloom.profile.session import local_gpus, local_store, profile_here, profile_locally, require_device
from planloom.profile.work import is_measured, missing_runs, missing_work, work_of

__all__ = [
    "is_measured",
    "local_gpus",
    "local_store",
    "measure_programs",
    "missing_runs",
    "missing_work",
    "profile_here",
    "profile_locally",
    "require_device",
    "work_of",
]
