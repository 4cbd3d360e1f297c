"""Every error of the testbed's user: what was given, what was required, what to do."""

from planloom.errors import PlanloomError


class TestbedError(PlanloomError):
    """A cluster that cannot be built here, a machine that cannot hold it, or a run that broke."""

    __test__ = False  # not a test class, whatever its name says to pytest
