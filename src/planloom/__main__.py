"""`python -m planloom` is the command `planloom`."""

from planloom.cli import main

main()
