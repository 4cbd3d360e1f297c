"""The best order, exactly, for small cases: a stage a group, input- and weight-gradients apart, by branch and bound.

    minimize    the end of the last call
    subject to  what `timing` says a call needs, one call of a group at a time, and at most `max_held` activations

Some best schedule is *active*: no call could begin earlier without delaying another. So it is enough to branch on what
may come next: among the groups' calls that could begin, that with the earliest end decides a group, and every call of
that group that could begin before this end is tried (Giffler and Thompson 1960). Micro-batches of a stage are equal,
so each phase takes them in order. A branch is cut where a bound is not below the best known: for each group, when it is
free, the work that it has left, and the shortest way from its last call to the end. With a bound on held activations
waiting may pay, and a state in which every call is held up is a dead end; the bound is then on what may come next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planloom.errors import PlanError
from planloom.plan.order_checks import require_held
from planloom.plan.orders import Call, Orders, Phase
from planloom.plan.schedules import orders_of
from planloom.plan.timing import Seconds, StageTimes, time_orders

MAX_CALLS = 60
"""Calls of all groups up to which the search is tried: 4 stages × 5 micro-batches."""
MAX_NODES = 300_000
_PHASES: tuple[Phase, ...] = ("forward", "input-gradient", "weight-gradient")


@dataclass(slots=True)
class _Best:
    seconds: Seconds
    orders: Orders
    num_nodes: int = 0


def search_order(times: Sequence[StageTimes], num_micro: int, *, max_held: int | None = None) -> tuple[Orders, str]:
    """The best order of one stage a group, and what was proven about it in words."""
    num_stages = len(times)
    if num_micro < 1 or len(_PHASES) * num_stages * num_micro > MAX_CALLS:
        raise PlanError(
            "this case is too large for an exact search",
            given=f"{num_stages} stages, {num_micro} micro-batches",
            required=f"from 1 to {MAX_CALLS // 3} stages times micro-batches",
            todo="use a ready-made schedule: zb-h1",
        )
    known: dict[str, Seconds] = {}
    best: _Best | None = None
    for name in ("1f1b", "zb-h1"):
        orders = orders_of(name, num_stages, num_micro)
        known[name] = time_orders(orders, times).seconds
        try:
            require_held(orders, max_held or num_micro)
        except PlanError:
            continue
        if best is None or known[name] < best.seconds:
            best = _Best(known[name], orders)
    if best is None:
        raise PlanError(
            "no ready-made order keeps within that many activations",
            given=f"at most {max_held} held",
            required=f"as 1f1b, {min(num_stages, num_micro)}",
        )
    search = _Search(times, num_micro, max_held, best)
    search.branch()
    is_proven = best.num_nodes < MAX_NODES
    against = ", ".join(f"{name} {float(seconds):g}" for name, seconds in known.items())
    verdict = "no order is shorter" if is_proven and max_held is None else "the shortest that was found"
    return best.orders, f"{verdict}: {float(best.seconds):g} after {best.num_nodes:,} states; {against}"


class _Search:
    """Depth first; the state is what every group has called, and when."""

    def __init__(self, times: Sequence[StageTimes], num_micro: int, max_held: int | None, best: _Best) -> None:
        self.times, self.num_micro, self.max_held, self.best = times, num_micro, max_held, best
        count = len(times)
        self.next = [dict.fromkeys(_PHASES, 0) for _ in range(count)]
        self.free: list[Seconds] = [0] * count
        self.ends: dict[tuple[int, Phase, int], Seconds] = {}
        self.calls: list[list[Call]] = [[] for _ in range(count)]

    def branch(self) -> None:
        self.best.num_nodes += 1
        if self.best.num_nodes >= MAX_NODES or self._bound() >= self.best.seconds:
            return
        options = [option for s in range(len(self.times)) for option in self._options(s)]
        if not options:
            if all(len(calls) == len(_PHASES) * self.num_micro for calls in self.calls):
                self.best.seconds, self.best.orders = max(self.free), tuple(map(tuple, self.calls))
            return
        end, group = min((start + self.times[s].of(phase), s) for s, phase, start in options)
        tried = [option for option in options if option[0] == group and option[2] <= end]
        for s, phase, start in sorted(tried, key=lambda option: (option[2], _PHASES.index(option[1]))):
            self._call(s, phase, start)

    def _call(self, s: int, phase: Phase, start: Seconds) -> None:
        micro, before = self.next[s][phase], self.free[s]
        self.next[s][phase] += 1
        self.free[s] = self.ends[s, phase, micro] = start + self.times[s].of(phase)
        self.calls[s].append(Call(phase=phase, micro=micro, stage=s))
        self.branch()
        self.calls[s].pop()
        del self.ends[s, phase, micro]
        self.free[s] = before
        self.next[s][phase] -= 1

    def _options(self, s: int) -> list[tuple[int, Phase, Seconds]]:
        """The calls of a group that could begin, and when."""
        found: list[tuple[int, Phase, Seconds]] = []
        for phase in _PHASES:
            micro = self.next[s][phase]
            arrived = self._arrival(s, phase, micro) if micro < self.num_micro else None
            held = self.next[s]["forward"] - self.next[s]["weight-gradient"]
            is_full = phase == "forward" and self.max_held is not None and held >= self.max_held
            if arrived is not None and not is_full:
                found.append((s, phase, max(self.free[s], arrived)))
        return found

    def _arrival(self, s: int, phase: Phase, micro: int) -> Seconds | None:
        if phase == "weight-gradient":
            return self.ends.get((s, "input-gradient", micro))
        other = s - 1 if phase == "forward" else s + 1
        if not 0 <= other < len(self.times):
            return 0 if phase == "forward" else self.ends.get((s, "forward", micro))
        arrived = self.ends.get((other, phase, micro))
        own = 0 if phase == "forward" else self.ends.get((s, "forward", micro))
        if arrived is None or own is None:
            return None
        later: Seconds = max(own, arrived + self.times[other].exchange)
        return later

    def _bound(self) -> Seconds:
        """No order that goes on from here ends earlier."""
        bounds = []
        for s, times in enumerate(self.times):
            left = sum((self.num_micro - self.next[s][phase]) * times.of(phase) for phase in _PHASES)
            begins = self.free[s]
            if not self.calls[s]:
                begins = max(begins, sum(t.forward + t.exchange for t in self.times[:s]))
            bounds.append(begins + left)
        return max(bounds)
