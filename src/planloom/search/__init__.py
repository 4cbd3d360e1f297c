"""`blocks` × `Cluster` × cost → `Plan`: here, exhaustive over the library of named plans and their placements."""

from planloom.search.exhaustive import Candidate, LazyPlans, candidate_plans, plan_lazily, price_plans

__all__ = ["Candidate", "LazyPlans", "candidate_plans", "plan_lazily", "price_plans"]
