"""Prices: measured where a store has them, else from the cluster's figures; every price says which."""

from planloom.cost.keys import collective_key, run_fingerprint, run_key, update_key
from planloom.cost.matching import find_profile, is_one_machine, require_serves, serves
from planloom.cost.memory import RunMemory
from planloom.cost.prices import Credit, Price, Prices
from planloom.cost.profile_file import Profile
from planloom.cost.store import PriceStore

__all__ = [
    "Credit",
    "Price",
    "PriceStore",
    "Prices",
    "Profile",
    "RunMemory",
    "collective_key",
    "find_profile",
    "is_one_machine",
    "require_serves",
    "run_fingerprint",
    "run_key",
    "serves",
    "update_key",
]
