"""`Program` × cost → `Timeline`."""

from planloom.simulate.simulator import simulate
from planloom.simulate.timeline import Event, Stream, Timeline

__all__ = ["Event", "Stream", "Timeline", "simulate"]
