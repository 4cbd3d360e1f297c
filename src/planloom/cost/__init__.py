"""Prices: measured where a store has them, else from the cluster's figures; every price says which."""

from planloom.cost.keys import collective_key, run_fingerprint, run_key, update_key
from planloom.cost.memory import RunMemory
from planloom.cost.prices import Price, Prices
from planloom.cost.store import PriceStore

__all__ = [
    "Price",
    "PriceStore",
    "Prices",
    "RunMemory",
    "collective_key",
    "run_fingerprint",
    "run_key",
    "update_key",
]
