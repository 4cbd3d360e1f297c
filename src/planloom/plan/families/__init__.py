"""Plans with a name of their own: `megatron:tp=2,pp=2,dp=2`. A new one is a function and a line in `FAMILIES`."""

from collections.abc import Mapping
from types import MappingProxyType

from planloom.errors import PlanError
from planloom.plan.families.axial import AXIAL
from planloom.plan.families.context import CONTEXT
from planloom.plan.families.interlaced import INTERLACED
from planloom.plan.families.pieces import PIECES
from planloom.plan.families.recipe import Family, Option, Recipe
from planloom.plan.families.recycled import RECYCLED
from planloom.plan.families.usual import USUAL

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (*USUAL, *CONTEXT, INTERLACED, *PIECES, RECYCLED, AXIAL)}
)


def parse_recipe(text: str) -> Recipe:
    """`megatron:tp=2,sequence` → `Recipe`."""
    name, _, rest = text.partition(":")
    family = FAMILIES.get(name)
    if family is None:
        raise PlanError(f"no plans are named {name!r}", given=text, required=f"one of {', '.join(FAMILIES)}")
    options = dict(family.options)
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        options.update(_option(family, key, value if equals else None, text))
    return Recipe(family=family, options=MappingProxyType(options))


def _option(family: Family, key: str, value: str | None, text: str) -> Mapping[str, Option]:
    default = family.options.get(key)
    if value is not None and default is not None and not isinstance(default, bool):
        if value.isascii() and value.isdigit() and int(value) > 0:
            return {key: int(value)}
    elif value is None and isinstance(default, bool):
        return {key: True}
    elif value is None and isinstance(family.options.get(key.removeprefix("no-")), bool):
        return {key.removeprefix("no-"): False}
    known = (f"{n} or no-{n}" if isinstance(v, bool) else f"{n}=N" for n, v in family.options.items())
    raise PlanError(
        f"unknown option {key!r} of plan {family.name}",
        given=text,
        required=f"{family.name}: and options by commas: {', '.join(known)}",
    )
