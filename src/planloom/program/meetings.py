"""Meetings: a collective happens when every role that takes part has started it and has nothing before it.

A role's collectives are carried out one after another, first in, first out, as gloo does: so roles that start two
common ones in different orders wait for ever, and so does a role that is waited for behind a collective of its own.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable

Key = Hashable


class Meetings:
    """Collectives that have been started and have not happened; `happen` is told of each that does."""

    def __init__(self, happen: Callable[[Key], None] = lambda key: None) -> None:
        self._happen = happen
        self._members: dict[Key, frozenset[int]] = {}
        self._queues: dict[int, deque[Key]] = {}

    def is_idle(self, role: int) -> bool:
        """Is nothing that the role has started left to happen?"""
        return not self._queues.get(role)

    def start(self, role: int, key: Key, members: frozenset[int]) -> None:
        """A role starts one of its collectives, in which these roles take part."""
        self._members[key] = members
        self._queues.setdefault(role, deque()).append(key)
        self._go_on(role)

    def is_over(self, key: Key) -> bool:
        return key not in self._members

    def _go_on(self, role: int) -> None:
        """What is first with all that take part happens, and then what comes behind it."""
        concerned = [role]
        while concerned:
            queue = self._queues.get(concerned[-1])
            members: Iterable[int] = self._members[queue[0]] if queue else ()
            if queue and all(self._first(member) == queue[0] for member in members):
                key = queue[0]
                for member in members:
                    self._queues[member].popleft()
                del self._members[key]
                self._happen(key)
                concerned += members
            else:
                concerned.pop()

    def _first(self, role: int) -> Key:
        queue = self._queues.get(role)
        return queue[0] if queue else None
