"""Settings that all tests share."""

import os

from hypothesis import settings

# No deadline: two cores and several processes make the time of one example mean nothing. In CI the examples are the
# same in every run, so that a failure is the change's and not the dice's.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
