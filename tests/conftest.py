"""Settings that all tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.pop("COLUMNS", None)  # xdist sets it in its workers, and rich would read it once, before a test does

ALONE = ("dist", "net", "gpu")
"""Folders of tests with processes of their own, which need the cores for themselves."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).relative_to(Path(__file__).parent).parts[0] in ALONE:
            item.add_marker("alone")


# No deadline: two cores and several processes make the time of one example mean nothing. In CI the examples are the
# same in every run, so that a failure is the change's and not the dice's.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
