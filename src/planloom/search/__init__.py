"""`blocks` × `Cluster` × cost → `Plan`: the best plan by elimination over the block graph, with a certificate."""

from planloom.search.best import Best, find_best, find_best_measured
from planloom.search.exhaustive import Candidate, LazyPlans, candidate_plans, plan_lazily, price_plans
from planloom.search.finalists import Finalist, as_candidate
from planloom.search.finished import estimate_plan
from planloom.search.infeasible import LeastMemory, NothingFitsError, least_memory
from planloom.search.planner import Certificate, Planner
from planloom.search.relaxations import Relaxed, try_relaxations, with_relaxations
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
    "NothingFitsError",
    "Planner",
    "Relaxed",
    "Wishes",
    "as_candidate",
    "candidate_plans",
    "estimate_plan",
    "find_best",
    "find_best_measured",
    "least_memory",
    "plan_lazily",
    "price_plans",
    "try_relaxations",
    "with_relaxations",
]
