"""The command line. `main` is the entry point; torch is imported only by the commands that need it."""

from planloom.cli.app import main

__all__ = ["main"]
