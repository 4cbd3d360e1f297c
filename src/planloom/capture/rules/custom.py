"""Rules that users give for their own operators.

    @dimension_rule("mylib::scale_rows")
    def scale_rows(call):
        return "row column, row -> row column"

or, where the notation does not depend on the call,

    dimension_rule("mylib::project", "... in, out in -> ... out", linear=((0,), (1,)))

A rule is registered for the process, before the model is captured: the model's file is the place for it. A function
gets the call (`call.op`, and the shapes `call.inputs` and `call.output`) and returns notation or a `Rule`. An operator
that has a written rule keeps it. An operator without any rule is discovered by execution (`discover.py`).

A registered rule is tried before it is believed, once for every kind of call (`require_registered_rules`): on small
random inputs, every factor that can be split and every linear group, forward and backward. Dims that are products are
taken apart first: the trials see a tensor with one dim for every factor. Where the operator cannot be tried (it is
random, too large, or runs on another device only) the rule is believed, and `rule_source` says that it is not checked.
"""

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch

from planloom.capture.rules.discover import operator_key
from planloom.capture.rules.trials import Factor, Refusal, Trials, Way, find_function
from planloom.errors import CaptureError
from planloom.graph import Op, Rule, Tensor, notate
from planloom.graph.rules import ONE_HOT_FACTOR, Kind, Rewrite, Term, flat
from planloom.layout import Combine

if TYPE_CHECKING:  # rules.py asks this module
    from planloom.capture.rules.written import Call

UserRule = Callable[["Call"], "str | Rule"]
RuleSource = Literal["written", "family", "registered", "registered, not checked", "discovered"]
_TERM = re.compile(r"(\s*(\.\.\.|\w[\w.]*!?|\(\s*(\w[\w.]*!?\s*)+\)))*\s*")
_LOG = logging.getLogger(__name__)


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
        terms = [term for side in text.split("->") for term in side.split(",")]
        if len(terms) != len(call.shapes):
            raise ValueError(f"{len(terms)} terms for {len(call.shapes)} tensors, inputs and output")
        rule = notate(text, *call.shapes, **self.fields)
        if "kind" in self.fields:
            return rule
        return replace(rule, kind="contraction" if rule.contracted else "pointwise")


class Registry:
    """Users' rules by target."""

    def __init__(self) -> None:
        self._rules: dict[str, Registered] = {}
        self.tried: dict[str, str] = {}
        """By kind of call: why a rule could not be checked, or nothing if it holds."""
        self.unchecked: dict[str, str] = {}
        """By target: why some call's rule could not be checked."""

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
        self.unchecked.pop(rule.target, None)

    def remove(self, target: str) -> None:
        self._rules.pop(_canonical(target), None)
        self.unchecked.pop(_canonical(target), None)


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
    _require_operator(target)
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
        if text.count("->") != 1 or not all(_TERM.fullmatch(term) for term in re.split(",|->", text)):
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
        return "registered, not checked" if target in _REGISTRY.unchecked else "registered"
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
        RuleGroup(name=target, about=rule.name, source=rule_source(target), targets=(target,))
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


def _require_operator(target: str) -> None:
    """Raise if torch has no such operator, with those that are spelt alike."""
    try:
        find_function(target)
    except Refusal:
        names = [name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()]
        known = [name if name.count(".") == 2 else f"{name}.default" for name in names]
        near = difflib.get_close_matches(target, known)
        raise CaptureError(
            f"torch has no operator {target}",
            given=f"dimension_rule({target!r})",
            required="an operator that is defined before its rule, as by torch.library.custom_op",
            todo=f"did you mean {' or '.join(near)}?" if near else "define the operator first, or correct the name",
        ) from None


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


# --- rules are tried before they are believed -------------------------------------------------------------------------


def require_registered_rules(ops: Sequence[Op], tensors: Mapping[str, Tensor]) -> None:
    """Raise a `CaptureError` if a registered rule of one of these operators does not hold on small random inputs."""
    for op in ops:
        user, rule = registered(op.target), op.rule
        if user is None or rule is None or rule_source(op.target) == "written":
            continue
        key = f"{operator_key(op, tensors)} {rule!r}"
        if key not in _REGISTRY.tried:
            _REGISTRY.tried[key] = _try_rule(user, op, rule, tensors)
        if reason := _REGISTRY.tried[key]:
            _LOG.warning("the rule registered for %s is not checked: %s", op.target, reason)
            _REGISTRY.unchecked[op.target] = reason


class _Factored:
    """An operator on tensors with one dim for every factor; `forward_only` leaves its gradients out."""

    def __init__(self, op: Op, rule: Rule, *, forward_only: bool) -> None:
        self.function, self.rule, self.forward_only = find_function(op.target), rule, forward_only
        self._schema, self.tags = getattr(self.function, "_schema", None), getattr(self.function, "tags", ())
        self.failure = ""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        terms, sizes = iter(self.rule.inputs), dict[str, int]()

        def whole(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [whole(item) for item in value]
            if not isinstance(value, torch.Tensor):
                return value
            term = next(terms)
            sizes.update(zip(flat(term), value.shape, strict=True))
            return value.reshape(_shape(term, sizes))

        values = [whole(value) for value in args]
        named = {key: whole(value) for key, value in kwargs.items()}
        (term,) = self.rule.outputs
        if self.rule.rewrite == "shape":
            sizes.update(zip(flat(term), args[1], strict=True))
            values[1] = _shape(term, sizes)
        try:
            result = self.function(*values, **named)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise
        result = result if isinstance(result, torch.Tensor) else result[0]
        for names, size in zip(term, result.shape, strict=True):  # a factor that no input has: what the others leave
            for name in [name for name in names if name not in sizes]:
                sizes[name] = size // prod(sizes.get(n, self.rule.sizes[n]) for n in names if n != name)
        result = result.reshape([sizes[name] for name in flat(term)])
        return result.detach() if self.forward_only else result


def _shape(term: Term, sizes: Mapping[str, int]) -> list[int]:
    return [prod(sizes[name] for name in names) for names in term]


def _try_rule(user: Registered, op: Op, rule: Rule, tensors: Mapping[str, Tensor]) -> str:
    """Raise if a rule does not hold; the reason if it, or a part of it, cannot be tried."""
    if rule.rewrite in ("slice", "random"):
        return f"rewrite {rule.rewrite!r} cannot be tried"
    if any(len(set(flat(term))) < len(flat(term)) for term in (*rule.inputs, *rule.outputs)):
        return "a factor stands twice in one term"
    try:
        whole = _trials(op, rule, tensors, forward_only=not rule.differentiable)
        forward = _trials(op, rule, tensors, forward_only=True)
    except Refusal as refusal:
        return str(refusal)
    skipped = []
    (kept,) = map(flat, rule.outputs)
    for name, size in rule.sizes.items():
        if name in rule.fixed or size < 2:
            continue
        if name == ONE_HOT_FACTOR and rule.rewrite == "one_hot":
            skipped.append(f"factor {name!r} of a one-hot contraction cannot be tried")
            continue
        inputs = tuple(flat(term).index(name) if name in flat(term) else None for term in rule.inputs)
        factor = Factor(inputs=inputs, outputs=(kept.index(name) if name in kept else None,))
        way: Way = "sum" if name in kept else "mean" if rule.rewrite == "mean" else rule.combine

        def splits(trials: Trials, factor: Factor = factor, way: Way = way) -> bool:
            return trials.splits(factor, way, rewrites_shape=rule.rewrite == "shape")

        _require(splits, whole, forward, user, f"factor {name!r} cannot be split", f"write {name}! in {user.name}")
    for group in rule.linear:

        def is_linear(trials: Trials, group: tuple[int, ...] = group) -> bool:
            return trials.is_linear(group)

        what = f"it is not linear in inputs {list(group)}"
        _require(is_linear, whole, forward, user, what, f"leave {group} out of linear={rule.linear}")
    return "; ".join(skipped)


def _trials(op: Op, rule: Rule, tensors: Mapping[str, Tensor], *, forward_only: bool) -> Trials:
    names = [*(f"input{i}" for i in range(len(op.inputs))), "output"]
    given = dict(zip(names, [tensors[name] for name in (*op.inputs, *op.outputs)], strict=True))
    factored = {
        name: replace(given[name], shape=tuple(rule.sizes[factor] for factor in flat(term)), factors=())
        for name, term in zip(names, (*rule.inputs, *rule.outputs), strict=True)
    }
    args = (op.args[0], list(factored["output"].shape), *op.args[2:]) if rule.rewrite == "shape" else op.args
    inner = replace(op, args=args, inputs=tuple(names[:-1]), outputs=("output",), rule=None)
    return Trials(inner, factored, function=_Factored(op, rule, forward_only=forward_only))


def _require(
    holds: Callable[[Trials], bool], whole: Trials, forward: Trials, user: Registered, what: str, todo: str
) -> None:
    """Raise if what the rule says is not so, telling a wrong result from a wrong gradient and from a failure."""
    for trials in (whole, forward):
        assert isinstance(trials.function, _Factored)
        trials.function.failure = ""
    if holds(whole):
        return
    results_hold = holds(forward)
    assert isinstance(forward.function, _Factored)
    failure = forward.function.failure
    differs = "the results are the same, the gradients differ" if results_hold else "the results differ"
    raise CaptureError(
        f"the rule registered for {user.target} does not hold: {what}",
        given=f"{user.name}; on small random inputs, in parts and as a whole, "
        + (f"the operator fails on a part: {failure}" if failure and not results_hold else differs),
        required="parts that, put together, give the whole, forward and backward",
        todo=todo,
    )
