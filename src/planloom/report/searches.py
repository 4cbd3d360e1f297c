"""What a search found, for a terminal: the plan, why it, and what the others lose."""

from collections.abc import Sequence
from math import prod

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.cluster import Cluster, format_bytes, format_seconds
from planloom.search import Best, Certificate, Finalist
from planloom.search.explain import Alternative, BlockShare
from planloom.simulate import Summary

_MAX_STAGES = 8


def best_tables(best: Best, cluster: Cluster, *, tokens: int) -> list[Table]:
    """The winner: degrees and placement, stages, step and memory; then the other finalists."""
    tables = [_winner_table(best, cluster, tokens), _placement_table(best.winner, cluster), _stages_table(best.winner)]
    if len(best.finalists) > 1:
        tables.append(_others_table(best))
    return tables


def _plain(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def _winner_table(best: Best, cluster: Cluster, tokens: int) -> Table:
    winner, summary = best.winner, _summary(best.winner)
    table = _plain(f"Best plan for {escape(cluster.name)}, {cluster.num_devices} devices")
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("plan", f"[bold]{escape(winner.plan.name)}[/bold], schedule {winner.plan.schedule}")
    deviation = f" ± {summary.uncertainty:.0%}" if summary.uncertainty else ""
    table.add_row("step, simulated", f"[bold]{format_seconds(winner.step_seconds)}[/bold]{deviation}")
    if tokens:
        rate = tokens / winner.step_seconds
        table.add_row("tokens a second", f"{rate:,.0f}, {rate / cluster.num_devices:,.0f} a device")
    table.add_row("MFU", f"{summary.mfu:.1%}, bubble {summary.bubble:.1%}")
    waits = {axis: seconds for axis, seconds in summary.exposed_communication.items() if seconds > 0}
    shown = [f"{axis} {format_seconds(s)}" for axis, s in sorted(waits.items(), key=lambda item: -item[1])[:4]]
    table.add_row("waits for communication", ", ".join(shown) or "none")
    role = max(summary.memory, key=lambda own: own.peak_bytes)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in role.parts.items() if size >= 1 << 20)
    table.add_row(
        "memory of a device", f"{format_bytes(role.peak_bytes)} of {format_bytes(cluster.device.memory_bytes)}: {parts}"
    )
    stored = _storage_words(winner)
    if stored:
        table.add_row("parameters", stored)
    if winner.plan.recompute:
        table.add_row("recomputed", f"{len(winner.plan.recompute)} segments")
    table.add_row("prices", ", ".join(winner.timeline.sources))
    table.add_row("certificate", certificate_words(best.certificate, winner))
    table.add_row("variants", trials_words(best))
    return table


def certificate_words(certificate: Certificate, winner: Finalist) -> str:
    if not certificate.has_plans:
        return f"none: nothing fits of {certificate.space}"
    own = "not estimated" if winner.estimate is None else f"estimate {format_seconds(winner.estimate.step_seconds)}"
    best = format_seconds(certificate.best_seconds)
    return f"{own}; best estimate found {best}, at most {certificate.gap:.1%} from the best of {certificate.space}"


def trials_words(best: Best) -> str:
    """What was tried beside the proven space, and whether the winner is of it."""
    words, winner = best.trials.sentence, best.winner
    if not winner.variant:
        return words
    proven = next((own for own in best.finalists if not own.variant), None)
    if proven is None:
        return f"[bold]{winner.variant}[/bold] was taken: no plan of the proven space fits; {words}"
    gain = 1 - winner.step_seconds / proven.step_seconds
    return f"[bold]{winner.variant}[/bold] was taken: {gain:.1%} less than {escape(proven.plan.name)}; {words}"


def _storage_words(finalist: Finalist) -> str:
    counts: dict[str, int] = {}
    for storage in finalist.plan.storage.values():
        words = f"{storage.kind} over {storage.over}"
        counts[words] = counts.get(words, 0) + 1
    return ", ".join(f"{count} {words}" for words, count in counts.items())


def _placement_table(finalist: Finalist, cluster: Cluster) -> Table:
    """The parallelism matrix: a row an axis, a column a level."""
    table = _plain("Placement")
    table.add_column("axis")
    for level in cluster.levels:
        table.add_column(escape(level.name), justify="right")
    table.add_column("size", justify="right", style="dim")
    table.add_column("splits", style="dim")
    used = axis_uses(finalist)
    for words in filter(None, finalist.placement.split(", ")):
        name, row = words.split(" ")
        entries = [int(entry) for entry in row.split("×")]
        if prod(entries) > 1:
            splits = "stages" if name == "pp" else ", ".join(used.get(name, ()))
            table.add_row(name, *(str(e) if e > 1 else "[dim]1[/dim]" for e in entries), str(prod(entries)), splits)
    return table


def axis_uses(finalist: Finalist) -> dict[str, list[str]]:
    """For every axis the dims that it splits, most often first."""
    counts: dict[str, dict[str, int]] = {}
    for strategy in finalist.plan.strategies:
        for dim, axes in strategy.items():
            for axis in axes:
                own = counts.setdefault(axis, {})
                word = dim.split(".")[0]
                own[word] = own.get(word, 0) + 1
    return {axis: sorted(own, key=lambda word: -own[word]) for axis, own in counts.items()}


def _stages_table(finalist: Finalist) -> Table:
    table = _plain("Stages")
    for name in ("stage", "blocks", "a micro-batch", "once a step", "memory, estimated", "memory, simulated"):
        table.add_column(name, justify="right")
    memory, num_blocks = _summary(finalist).memory, [0] * len(finalist.plan.meshes)
    for stage in finalist.plan.stages:
        num_blocks[stage] += 1
    estimates = finalist.estimate.stages if finalist.estimate is not None else ()
    for s, count in enumerate(num_blocks):
        if _MAX_STAGES // 2 <= s < len(num_blocks) - _MAX_STAGES // 2:
            if s == _MAX_STAGES // 2:
                table.add_row("…")
            continue
        estimated = ["", "", ""]  # a variant has no estimate
        if estimates:
            seconds = (estimates[s].micro_seconds, estimates[s].step_seconds)
            estimated = [*map(format_seconds, seconds), format_bytes(round(estimates[s].num_bytes))]
        roles = finalist.plan.members(finalist.plan.group_of(s))
        held = max(memory[role].peak_bytes for role in roles)
        table.add_row(str(s), str(count), *estimated, format_bytes(held))
    return table


def _others_table(best: Best) -> Table:
    table = _plain("The best others, and what each loses")
    table.add_column("plan and placement", overflow="fold")
    for name in ("step", "loses"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because of")
    for other in best.finalists[1:]:
        table.add_row(
            f"{escape(other.plan.name)}\n[dim]{escape(other.placement)}[/dim]",
            format_seconds(other.step_seconds),
            f"{other.step_seconds / best.winner.step_seconds - 1:.1%}",
            why_slower(other, best.winner),
        )
    return table


def why_slower(other: Finalist, winner: Finalist) -> str:
    """The largest differences of what a step consists of."""
    theirs, ours = _shares(other), _shares(winner)
    more = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in {*theirs, *ours}}
    worst = sorted(((seconds, name) for name, seconds in more.items() if seconds > 0), reverse=True)[:2]
    return ", ".join(f"{name} +{format_seconds(seconds)}" for seconds, name in worst) or "nothing"


def _shares(finalist: Finalist) -> dict[str, float]:
    """Seconds of a step, the mean of all devices: waiting by axis, bubble, and the rest, which is computing."""
    summary = _summary(finalist)
    shares = {f"waiting for {axis}": seconds for axis, seconds in summary.exposed_communication.items()}
    shares["bubble"] = summary.bubble * summary.step_seconds
    shares["computing"] = summary.step_seconds - sum(shares.values())
    return shares


def _summary(finalist: Finalist) -> Summary:
    assert finalist.timeline.summary is not None
    return finalist.timeline.summary


def shares_table(shares: Sequence[BlockShare], name: str) -> Table:
    """The blocks of a plan, equal ones once."""
    table = _plain(f"Blocks of {escape(name)}: strategy, and seconds of a micro-batch")
    table.add_column("block", overflow="fold")
    table.add_column("×", justify="right")
    table.add_column("strategy")
    table.add_column("parameters")
    for column in ("compute", "communication"):
        table.add_column(column, justify="right", no_wrap=True)
    for share in shares:
        table.add_row(
            escape(share.name),
            str(share.count),
            strategy_words(share.strategy) + (" (recomputed)" if share.is_recomputed else ""),
            share.storage,
            format_seconds(share.compute_seconds),
            format_seconds(share.communication_seconds),
        )
    return table


def alternatives_table(alternatives: Sequence[Alternative], name: str, *, num_shown: int = 12) -> Table:
    """The strategies of one block, and what the step would lose with each."""
    table = _plain(f"Strategies of {escape(name)}: what the best plan with each loses, memory left aside")
    table.add_column("strategy")
    table.add_column("loses a step", justify="right")
    table.add_column("compute, a micro-batch", justify="right")
    shown = list(alternatives[:num_shown])
    shown += [own for own in alternatives[num_shown:] if own.is_chosen]
    for own in shown:
        table.add_row(
            strategy_words(own.strategy),
            format_seconds(own.lost_seconds) if own.lost_seconds > 0 else "nothing",
            format_seconds(own.compute_seconds),
            style="bold green" if own.is_chosen else "",
        )
    if len(alternatives) > len(shown):
        table.caption = f"and {len(alternatives) - len(shown)} more; the plan's own in green"
    return table


def strategy_words(strategy: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{dim} → {'·'.join(axes)}" for dim, axes in strategy.items()) or "not split"


def comparison_table(names: Sequence[str], summaries: Sequence[Summary], num_devices: Sequence[int]) -> Table:
    """Two simulated plans side by side."""
    table = _plain("Comparison")
    table.add_column("")
    for name in names:
        table.add_column(escape(name), justify="right")
    table.add_column("second over first", justify="right")

    def row(label: str, values: Sequence[float], shown: Sequence[str]) -> None:
        ratio = f"{values[1] / values[0]:.3f}" if values[0] else ""
        table.add_row(label, *shown, ratio)

    steps = [summary.step_seconds for summary in summaries]
    row("step", steps, [format_seconds(step) for step in steps])
    row("devices", num_devices, [str(count) for count in num_devices])
    seconds = [step * count for step, count in zip(steps, num_devices, strict=True)]
    row("device-seconds a step", seconds, [f"{value:,.1f}" for value in seconds])
    row("MFU", [s.mfu for s in summaries], [f"{s.mfu:.1%}" for s in summaries])
    row("bubble", [s.bubble for s in summaries], [f"{s.bubble:.1%}" for s in summaries])
    for axis in dict.fromkeys(axis for s in summaries for axis in s.exposed_communication):
        waits = [s.exposed_communication.get(axis, 0.0) for s in summaries]
        row(f"waits for {axis}", waits, [format_seconds(wait) for wait in waits])
    peaks = [s.peak_memory_bytes for s in summaries]
    row("memory of a device", peaks, [format_bytes(peak) for peak in peaks])
    return table
