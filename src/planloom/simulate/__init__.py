"""`Program` × cost → `Timeline`."""

from planloom.simulate.simulator import simulate, simulate_memory
from planloom.simulate.timeline import Event, RoleMemory, Stream, Summary, Timeline

__all__ = ["Event", "RoleMemory", "Stream", "Summary", "Timeline", "simulate", "simulate_memory"]
