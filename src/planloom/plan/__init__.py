"""The `Plan` value, its file, the split/assign/order primitives and the library of named plans."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from planloom.plan.checks import require_plan
from planloom.plan.draft import Draft, draft, edit
from planloom.plan.families import FAMILIES
from planloom.plan.families.recipe import Recipe
from planloom.plan.files import load_plan, save_plan
from planloom.plan.library import NamedPlan, axis_sizes, find_named, library, named_plan, parse_named
from planloom.plan.orders import Call, OrderFunction, Orders, gpipe, one_forward_one_backward
from planloom.plan.schedules import ORDERS
from planloom.plan.values import Plan, Storage, StorageKind, TimeAxis, require_model

__all__ = [
    "FAMILIES",
    "ORDERS",
    "Call",
    "Draft",
    "NamedPlan",
    "OrderFunction",
    "Orders",
    "Plan",
    "Recipe",
    "Storage",
    "StorageKind",
    "TimeAxis",
    "axis_sizes",
    "draft",
    "edit",
    "find_named",
    "gpipe",
    "library",
    "load_plan",
    "named_plan",
    "one_forward_one_backward",
    "parse_named",
    "require_model",
    "require_plan",
    "save_plan",
]


class _CallableModule(ModuleType):
    """`planloom.plan(model, batch, cluster=…)` and `planloom.plan.load_plan` are both meant: one name, two things.

    What is called lies at the other end of the house, with torch, and is looked up only then.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("planloom.train").plan_model(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
