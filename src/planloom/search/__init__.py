"""`blocks` × `Cluster` × cost → `Plan`: here, exhaustive over the library of named plans and their placements."""

from planloom.search.exhaustive import Candidate, candidate_plans, price_plans

__all__ = ["Candidate", "candidate_plans", "price_plans"]
