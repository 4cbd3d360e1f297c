"""Rules that users give for their own operators.

    @dimension_rule("mylib::scale_rows")
    def scale_rows(call):
        return "row column, row -> row column"

or, where the notation does not depend on the call,

    dimension_rule("mylib::project", "... in, out in -> ... out", linear=((0,), (1,)))

A rule is registered for the process, before the model is captured: the model's file is the place for it. A function
gets the call (`call.op`, and the shapes `call.inputs` and `call.output`) and returns notation or a `Rule`. An operator
that has a written rule keeps it. An operator without any rule is discovered by execution (`discover.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch

from planloom.errors import CaptureError
from planloom.graph import Rule, notate
from planloom.graph.rules import Kind, Rewrite
from planloom.layout import Combine

if TYPE_CHECKING:  # rules.py asks this module
    from planloom.capture.rules.written import Call

UserRule = Callable[["Call"], "str | Rule"]
RuleSource = Literal["written", "family", "registered", "discovered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A user's rule: a function, or notation with the fields of the rule."""

    target: str
    function: UserRule
    name: str
    fields: dict[str, Any]

    def __call__(self, call: "Call") -> Rule:
        made = self.function(call)
        try:
            rule = made if isinstance(made, Rule) else self._notated(made, call)
            _require_fit(rule, call)
        except ValueError as error:
            raise CaptureError(
                f"the rule registered for {self.target} does not fit",
                given=f"{made} for shapes {call.inputs} -> {call.output} ({call.op.name}): {error}",
                required="a term for every tensor input and for the output, with the sizes of its dims",
                todo=f"correct {self.name}",
            ) from None
        return rule

    def _notated(self, text: str, call: "Call") -> Rule:
        rule = notate(text, *call.shapes, **self.fields)
        if "kind" in self.fields:
            return rule
        return replace(rule, kind="contraction" if rule.contracted else "pointwise")


class Registry:
    """Users' rules by target."""

    def __init__(self) -> None:
        self._rules: dict[str, Registered] = {}

    def find(self, target: str) -> Registered | None:
        return self._rules.get(target)

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self._rules)

    def add(self, rule: Registered, *, replacing: bool) -> None:
        """Keep a rule; the same one again (a file loaded twice) replaces the first."""
        before = self._rules.get(rule.target)
        if before is not None and not replacing and (before.name, before.fields) != (rule.name, rule.fields):
            raise CaptureError(
                f"operator {rule.target} has two rules",
                given=f"{before.name} and {rule.name}",
                required="one rule an operator",
                todo="remove one of them, or register the second with replacing=True",
            )
        self._rules[rule.target] = rule

    def remove(self, target: str) -> None:
        self._rules.pop(_canonical(target), None)


# The one registry of a process: what decorators in the user's files fill.
_REGISTRY = Registry()


def dimension_rule(
    target: str,
    notation: str | None = None,
    *,
    linear: tuple[tuple[int, ...], ...] = (),
    combine: Combine = "sum",
    kind: Kind | None = None,
    rewrite: Rewrite = "none",
    differentiable: bool = True,
    replacing: bool = False,
) -> Callable[[UserRule], UserRule]:
    """Register the rule of an operator: notation, or a decorator of a function from a call to notation or a rule.

    `linear`, `combine`, `kind`, `rewrite` and `differentiable` are those of `Rule` and go with notation, also with that
    which a function returns. Without `kind`, an operator that contracts a factor is a contraction.
    """
    target = _canonical(target)
    source = rule_source(target)
    if source in ("written", "family"):
        raise CaptureError(
            f"operator {target} already has a rule",
            given=f"dimension_rule({target!r})",
            required="an operator of your own, or one without a written rule (see `planloom rules`)",
        )
    fields: dict[str, Any] = {
        "linear": tuple(map(tuple, linear)),
        "combine": combine,
        "rewrite": rewrite,
        "differentiable": differentiable,
        **({"kind": kind} if kind is not None else {}),
    }

    def register(function: UserRule) -> UserRule:
        name = f"{function.__module__}.{function.__qualname__}"
        _REGISTRY.add(Registered(target=target, function=function, name=name, fields=fields), replacing=replacing)
        return function

    if notation is not None:
        text = notation
        if "->" not in text:
            raise CaptureError(
                f"the rule of {target} is not notation",
                given=text,
                required="inputs, an arrow, the output, as in '... in, out in -> ... out'",
            )
        _REGISTRY.add(
            Registered(target=target, function=lambda call: text, name=repr(text), fields=fields), replacing=replacing
        )
    return register


def registered(target: str) -> Registered | None:
    """The user's rule of an operator: a function from a call to a `Rule`."""
    return _REGISTRY.find(target)


def registered_targets() -> tuple[str, ...]:
    return _REGISTRY.targets


def forget_rule(target: str) -> None:
    """Remove a user's rule."""
    _REGISTRY.remove(target)


def rule_source(target: str) -> RuleSource:
    """Where the rule of an operator comes from."""
    from planloom.capture.rules.written import _RULES, _is_pointwise  # rules.py asks this module

    if target in _RULES:
        return "written"
    if registered(target) is not None:
        return "registered"
    try:
        return "family" if _is_pointwise(target) else "discovered"
    except AttributeError:  # torch has no such operator
        return "discovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleGroup:
    """Operators that share a rule."""

    name: str
    about: str
    source: RuleSource
    targets: tuple[str, ...]


def known_rules() -> tuple[RuleGroup, ...]:
    """The pointwise family, the written rules by the function that makes them, and the registered ones."""
    from planloom.capture.rules.written import _RULES  # rules.py asks this module

    groups: dict[str, list[str]] = {}
    about: dict[str, str] = {}
    for target, function in _RULES.items():
        name = function.__name__.strip("_").replace("_", " ")
        groups.setdefault(name, []).append(target)
        about[name] = (function.__doc__ or "").strip().partition("\n")[0]
    family = RuleGroup(
        name="pointwise operators",
        about="Every operator that torch tags pointwise: all dims can be split, broadcast ones excepted.",
        source="family",
        targets=pointwise_targets(),
    )
    written = [
        RuleGroup(name=name, about=about[name], source="written", targets=tuple(targets))
        for name, targets in groups.items()
    ]
    own = [
        RuleGroup(name=target, about=rule.name, source="registered", targets=(target,))
        for target in _REGISTRY.targets
        if (rule := registered(target)) is not None
    ]
    return (family, *written, *own)


def pointwise_targets() -> tuple[str, ...]:
    """Every ATen operator with torch's pointwise tag that returns new tensors."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():  # no public list (tried: torch 2.13.0)
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            if torch.Tag.pointwise in operator.tags and not operator._schema.is_mutable:
                found.append(str(operator))
    return tuple(sorted(found))


def _canonical(target: str) -> str:
    """`mylib::op` and `mylib.op` as the graph spells them: `mylib.op.default`."""
    dotted = target.replace("::", ".")
    if dotted.count(".") not in (1, 2) or not all(dotted.split(".")):
        raise CaptureError(
            f"{target!r} is not the name of an operator",
            given=target,
            required="namespace::name, as in mylib::my_op, or with an overload, mylib::my_op.default",
        )
    return dotted if dotted.count(".") == 2 else f"{dotted}.default"


def _require_fit(rule: Rule, call: "Call") -> None:
    """Raise a `ValueError` if a rule's terms are not those of the call's shapes."""
    terms = (*rule.inputs, *rule.outputs)
    if len(terms) != len(call.shapes):
        raise ValueError(f"{len(terms)} terms for {len(call.shapes)} tensors")
    for term, shape in zip(terms, call.shapes, strict=True):
        if tuple(prod(rule.sizes[name] for name in names) for names in term) != shape:
            raise ValueError(f"a term of sizes {rule.sizes} for a tensor of shape {shape}")
    unknown = {i for group in rule.linear for i in group} - set(range(len(rule.inputs)))
    if unknown:
        raise ValueError(f"linear in inputs {sorted(unknown)}, of which there are {len(rule.inputs)}")
