"""Latencies, bandwidths and efficiencies of a cluster's links, fitted to measured collectives.

For one collective and one level l, from the innermost outwards, the measurements whose groups cross l and nothing
outside it give

    start_l          what it costs before the first hop, beside what levels inside cost
    hop_l            the latency of a hop
    rate_l(m)        bytes a second among m members
    flow_l           by what share each further flow on an uplink prolongs it (for direct messages, where flows differ)

as the minimum of the squared logarithms of predicted over measured seconds, with all that `pricing` says about these
groups and what was fitted inside held fixed. Two sizes of a few group sets are enough: a small one fixes the latencies
and a large one the rates. The bandwidth of a link becomes the best rate of any collective on it, and the efficiencies
are shares of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from planloom.cluster import MAX_EFFICIENCY, Cluster, Link
from planloom.collective.geometry import geometry_of_groups
from planloom.collective.measurements import Measurement
from planloom.collective.pricing import cost_of_traffic
from planloom.collective.steps import StepKind
from planloom.collective.traffic import ALGORITHMS, Algorithm, LevelTraffic, level_traffic, routed_traffic
from planloom.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cluster, and how well it repeats what it was fitted to: mean of |predicted / measured - 1|."""

    cluster: Cluster
    errors: Mapping[StepKind, tuple[float, ...]]
    """By collective."""

    @property
    def num_measurements(self) -> int:
        return sum(map(len, self.errors.values()))

    @property
    def error(self) -> float:
        return sum(map(sum, self.errors.values())) / self.num_measurements


@dataclass(frozen=True, slots=True)
class _Point:
    """A measurement with its traffic by every algorithm."""

    kind: StepKind
    group_size: int
    num_bytes: float
    seconds: float
    traffic: dict[Algorithm, tuple[LevelTraffic, ...]]

    @property
    def outermost(self) -> LevelTraffic:
        return next(iter(self.traffic.values()))[0]


def calibrate(cluster: Cluster, measurements: Sequence[Measurement]) -> Fit:
    """The cluster with the links that these measurements show; links that none crosses stay as they are."""
    points = [point for m in measurements if (point := _point(cluster, m)) is not None]
    if not points:
        raise ClusterError(
            "nothing to calibrate from",
            given=f"{len(measurements)} measurements",
            required="collectives of two devices or more, of two sizes or more, with seconds above zero",
        )
    fitted = _without_figures(cluster, points)
    for level in reversed(range(len(cluster.levels))):
        rates: dict[tuple[str, int], float] = {}
        for kind in _ORDER:
            own = [p for p in points if p.kind == kind and p.outermost.level == level]
            if own:
                fitted, found = _fit_level(fitted, kind, level, own, rates)
                rates |= found
        fitted = _with_rates(fitted, level, rates)
    errors: dict[StepKind, tuple[float, ...]] = {}
    for p in points:
        errors[p.kind] = (*errors.get(p.kind, ()), abs(_predicted(fitted, p) / p.seconds - 1))
    return Fit(cluster=fitted, errors=errors)


# Direct messages come last: how fast a link is, the rings have shown by then.
_ORDER: tuple[StepKind, ...] = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "rotate",
)


def _point(cluster: Cluster, m: Measurement) -> _Point | None:
    if len(m.groups[0]) < 2 or m.num_bytes <= 0 or m.seconds <= 0:
        return None
    geometry = geometry_of_groups(cluster, m.groups)
    traffic = {}
    for algorithm in ALGORITHMS[cluster.library][m.kind]:
        if geometry is not None and all(level.link.shape != "torus" for level in cluster.levels):
            traffic[algorithm] = level_traffic(cluster, m.kind, algorithm, geometry)
        else:
            traffic[algorithm] = routed_traffic(cluster, m.kind, algorithm, m.groups, geometry)
    return _Point(m.kind, len(m.groups[0]), m.num_bytes, m.seconds, traffic)


def _predicted(cluster: Cluster, point: _Point) -> float:
    return cost_of_traffic(cluster, point.kind, point.group_size, point.traffic).seconds(point.num_bytes)


def _without_figures(cluster: Cluster, points: Sequence[_Point]) -> Cluster:
    """The cluster without figures for the collectives that were measured at a level."""
    for level in {p.outermost.level for p in points}:
        kinds = {p.kind for p in points if p.outermost.level == level}
        link = cluster.levels[level].link
        cluster = _with_link(
            cluster,
            level,
            replace(
                link,
                hop_seconds={k: v for k, v in link.hop_seconds.items() if k not in kinds},
                start_seconds={k: v for k, v in link.start_seconds.items() if k not in kinds},
                flow={k: v for k, v in link.flow.items() if k not in kinds},
                efficiency={k: v for k, v in link.efficiency.items() if k[0] not in kinds},
            ),
        )
    return cluster


def _with_link(cluster: Cluster, level: int, link: Link) -> Cluster:
    levels = [*cluster.levels]
    levels[level] = replace(levels[level], link=link)
    return replace(cluster, levels=tuple(levels))


def _fit_level(
    cluster: Cluster, kind: StepKind, level: int, points: Sequence[_Point], known: dict[tuple[str, int], float]
) -> tuple[Cluster, dict[tuple[str, int], float]]:
    """One collective at one level: its start, hop and flow in the link, and its rates by number of members."""
    link = cluster.levels[level].link
    shown = max(p.outermost.own_bytes * p.num_bytes / p.seconds for p in points)
    if shown > link.bandwidth_bytes_per_second:  # faster than its data sheet says
        link = _rescaled(link, 2 * shown)
    members = sorted({p.outermost.members for p in points})
    is_direct = "direct" in ALGORITHMS[cluster.library][kind] and link.shared
    has_flows = is_direct and len({p.outermost.num_flows for p in points}) > 1
    has_hops = len({p.outermost.num_hops for p in points}) > 1
    usual = max(known.values(), default=link.bandwidth_bytes_per_second)

    def link_of(x: NDArray[np.float64]) -> Link:
        rates = {(kind, m): exp(x[3 + i]) / link.bandwidth_bytes_per_second for i, m in enumerate(members)}
        return replace(
            link,
            start_seconds={**link.start_seconds, kind: exp(x[0])} if has_hops else link.start_seconds,
            hop_seconds={**link.hop_seconds, kind: exp(x[1])},
            flow={**link.flow, kind: exp(x[2])} if has_flows else link.flow,
            efficiency={**link.efficiency, **{key: min(share, MAX_EFFICIENCY) for key, share in rates.items()}},
        )

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        tried = _with_link(cluster, level, link_of(x))
        errors = [log(_predicted(tried, p) / p.seconds) for p in points]
        # Weak beliefs, so that what the points leave open stays in reason: latencies near the link's own, the rate of
        # direct messages near that of rings.
        errors += [_BELIEF * (x[0] - log(link.latency_seconds)), _BELIEF * (x[1] - log(link.latency_seconds))]
        errors += [_BELIEF * (x[2] - log(0.02))]
        if has_flows and known:
            errors += [float(rate - log(usual)) for rate in x[3:]]
        return np.array(errors)

    start = [log(link.latency_seconds), log(link.latency_seconds), log(0.02)]
    low = [log(1e-9), log(1e-9), log(1e-6), *[log(usual * 1e-4)] * len(members)]
    high = [log(10.0), log(1.0), 0.0, *[log(link.bandwidth_bytes_per_second * MAX_EFFICIENCY)] * len(members)]
    # Where another level is the bottleneck at first, this one's rate shows in nothing: several starts.
    tries = [np.clip([*start, *[log(usual * share)] * len(members)], low, high) for share in (1.0, 0.3, 0.1, 0.03)]
    fits = [least_squares(residuals, first, bounds=(low, high), x_scale=1.0, max_nfev=200) for first in tries]
    solution = min(fits, key=lambda fit: float(fit.cost)).x
    found = link_of(solution)
    found = replace(
        found,
        start_seconds={key: _rounded(seconds) for key, seconds in found.start_seconds.items()},
        hop_seconds={key: _rounded(seconds) for key, seconds in found.hop_seconds.items()},
        flow={key: _rounded(share) for key, share in found.flow.items()},
    )
    rates = {key: share * link.bandwidth_bytes_per_second for key, share in found.efficiency.items() if key[0] == kind}
    return _with_link(cluster, level, found), rates


_BELIEF = 0.01


def _rounded(figure: float) -> float:
    """Four digits: more than measurements hold, and readable in a file."""
    return float(f"{figure:.4g}")


def _rescaled(link: Link, bandwidth: float) -> Link:
    """A link of another bandwidth on which collectives with an efficiency keep their rates, as far as one may go."""
    factor = link.bandwidth_bytes_per_second / bandwidth
    efficiency = {key: min(share * factor, MAX_EFFICIENCY) for key, share in link.efficiency.items()}
    return replace(link, bandwidth_bytes_per_second=bandwidth, efficiency=efficiency)


def _with_rates(cluster: Cluster, level: int, rates: dict[tuple[str, int], float]) -> Cluster:
    """The best rate becomes the bandwidth; a number of members that was not measured takes the most that was."""
    if not rates:
        return cluster
    link = cluster.levels[level].link
    bandwidth = _rounded(max(rates.values()))
    efficiency = {key: share for key, share in _rescaled(link, bandwidth).efficiency.items() if key not in rates}
    efficiency |= {key: _rounded(rate / bandwidth) for key, rate in rates.items()}
    for kind in {kind for kind, _ in rates}:
        most = max(members for other, members in rates if other == kind)
        efficiency[kind, 0] = efficiency[kind, most]
    latency = min([link.latency_seconds, *link.hop_seconds.values()])
    return _with_link(
        cluster,
        level,
        replace(link, bandwidth_bytes_per_second=bandwidth, latency_seconds=latency, efficiency=efficiency),
    )
