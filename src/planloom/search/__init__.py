"""`blocks` × `Cluster` × cost → `Plan`: the best plan by elimination over the block graph, with a certificate."""

from planloom.search.best import Best, LeastMemory, find_best, find_best_measured, least_memory
from planloom.search.exhaustive import Candidate, LazyPlans, candidate_plans, plan_lazily, price_plans
from planloom.search.finalists import Finalist, as_candidate
from planloom.search.finished import estimate_plan
from planloom.search.planner import Certificate, Planner
from planloom.search.space import BlockPin, Wishes
from planloom.search.stages import Estimate
from planloom.search.work import Measured

__all__ = [
    "Best",
    "BlockPin",
    "Candidate",
    "Certificate",
    "Estimate",
    "Finalist",
    "LazyPlans",
    "LeastMemory",
    "Measured",
    "Planner",
    "Wishes",
    "as_candidate",
    "candidate_plans",
    "estimate_plan",
    "find_best",
    "find_best_measured",
    "least_memory",
    "plan_lazily",
    "price_plans",
]
