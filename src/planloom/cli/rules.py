"""`planloom rules`: which dims of which operators can be split, how that is known, and what cannot be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.cli.models import capture_model
from planloom.cli.output import JsonOption, show
from planloom.cluster import format_bytes
from planloom.graph import Graph, Op
from planloom.graph.flops import op_bytes, op_flops

ModelArgument = Annotated[
    str | None, typer.Argument(help="A model, as for `planloom blocks`; without one, all rules that are known.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRule:
    """Operators of a model with one target and one rule; `reason`: why none of their dims can be split."""

    target: str
    rule: str
    source: str
    count: int
    module: str
    is_splittable: bool
    reason: str
    flops: int
    moved_bytes: int


def register(app: typer.Typer) -> None:
    app.command(name="rules", epilog="Example: planloom rules examples/models/gpt.py:small")(rules_command)


def rules_command(model: ModelArgument = None, as_json: JsonOption = False) -> None:
    """Show the dimension rule of every operator of a model, or all rules that are known.

    A rule names the factors of every input and of the output. A factor that the output lacks is contracted: split, it
    leaves a partial result. A factor with an exclamation mark cannot be split.
    """
    if model is None:
        _show_known(as_json)
        return
    rules = operator_rules(capture_model(model).blocks.graph)
    flops, moved = sum(r.flops for r in rules), sum(r.moved_bytes for r in rules)
    documents = [_document(rule, flops, moved) for rule in rules]
    show(
        {"operators": sum(r.count for r in rules), "flops": flops, "bytes": moved, "rules": documents},
        *_tables(rules, flops, moved),
        as_json=as_json,
    )


def operator_rules(graph: Graph) -> list[OperatorRule]:
    """Distinct operators, most frequent first."""
    from planloom.capture.rules.custom import rule_source
    from planloom.capture.rules.discover import explain

    groups: dict[tuple[str, str], list[Op]] = {}
    for op in graph.ops:
        groups.setdefault((op.target, str(op.rule)), []).append(op)
    found = []
    for (target, text), ops in groups.items():
        rule, source = ops[0].rule, rule_source(target)
        assert rule is not None
        is_splittable = len(rule.fixed) < len(rule.sizes) or not rule.sizes
        reason = "" if is_splittable else "its rule fixes every dim"
        if not is_splittable and source == "discovered":
            reason = explain(ops[0], graph.tensors).reason or reason
        found.append(
            OperatorRule(
                target=target,
                rule=text,
                source=source,
                count=len(ops),
                module=ops[0].module,
                is_splittable=is_splittable,
                reason=reason,
                # a discovered rule does not know which of its dims multiply
                flops=sum(op_flops(op, graph.tensors) for op in ops) if source != "discovered" else 0,
                moved_bytes=sum(op_bytes(op, graph.tensors) for op in ops),
            )
        )
    return sorted(found, key=lambda rule: (-rule.count, rule.target, rule.rule))


def _document(rule: OperatorRule, flops: int, moved_bytes: int) -> dict[str, Any]:
    return {
        "target": rule.target,
        "rule": rule.rule,
        "source": rule.source,
        "count": rule.count,
        "module": rule.module,
        "splittable": rule.is_splittable,
        "reason": rule.reason,
        "flops": rule.flops,
        "flops_share": rule.flops / flops if flops else 0.0,
        "bytes": rule.moved_bytes,
        "bytes_share": rule.moved_bytes / moved_bytes if moved_bytes else 0.0,
    }


def _tables(rules: Sequence[OperatorRule], flops: int, moved_bytes: int) -> list[Table]:
    table = _table(f"{sum(r.count for r in rules)} operators, {len(rules)} rules", "operator", "count", "rule", "from")
    for rule in rules:
        table.add_row(escape(rule.target), str(rule.count), escape(rule.rule), rule.source)
    whole = [rule for rule in rules if not rule.is_splittable]
    if not whole:
        table.caption = "every operator can be split"
        return [table]
    title = f"{sum(r.count for r in whole)} operators cannot be split: every device does all of their work"
    costs = _table(title, "operator", "count", "where", "FLOPs", "bytes", "reason")
    for rule in whole:
        share = f"{rule.moved_bytes / moved_bytes:.1%}" if moved_bytes else "–"
        work = f"{rule.flops / flops:.1%}" if flops and rule.flops else "–"
        costs.add_row(
            escape(rule.target),
            str(rule.count),
            escape(rule.module),
            work,
            f"{format_bytes(rule.moved_bytes)} ({share})",
            escape(rule.reason),
        )
    return [table, costs]


def _show_known(as_json: bool) -> None:
    from planloom.capture.rules.custom import known_rules

    groups = known_rules()
    table = _table("Rules", "rule", "operators", "from", "")
    for group in groups:
        shown = " ".join(group.targets[:4]) + (f" … ({len(group.targets)})" if len(group.targets) > 4 else "")
        table.add_row(escape(group.name), escape(shown), group.source, escape(group.about))
    table.caption = "an operator that is not listed is discovered by execution when a model has it"
    document = {
        "rules": [{"name": g.name, "about": g.about, "source": g.source, "targets": list(g.targets)} for g in groups]
    }
    show(document, table, as_json=as_json)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        numeric = name in ("count", "FLOPs", "bytes")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table
