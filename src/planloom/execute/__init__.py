"""A run → a callable on local tensors; a collective program → the wire."""

from planloom.execute.given import Given, compute_given, local_slice
from planloom.execute.interpreter import Interpreter
from planloom.execute.local import LocalRun
from planloom.execute.vjp import RunVjp

__all__ = ["Given", "Interpreter", "LocalRun", "RunVjp", "compute_given", "local_slice"]
