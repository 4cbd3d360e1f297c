"""An independent oracle: the search's problem as a mixed-integer program, solved by HiGHS.

One binary for every choice of a variable, one number in [0, 1] for every pair of choices along an edge:

    Σ_k x[v, k] = 1        Σ_l y[u, v, k, l] = x[u, k]        Σ_k y[u, v, k, l] = x[v, l]

and, where memory is limited, with P the largest peak of all blocks:

    Σ bytes[v, k] · x[v, k] + P ≤ limit        Σ_k peak[v, k] · x[v, k] ≤ P for every v
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

Array = NDArray[np.float64]
_NEVER = 1e3
"""What a choice that is forbidden costs, in shares of the dearest one that is not."""


@dataclass
class IntegerProgram:
    """Variables by number: costs, bytes and peaks of their choices; edges: costs of pairs. Infinite costs forbid."""

    unary: dict[int, Array] = field(default_factory=dict)
    pairs: list[tuple[int, int, Array]] = field(default_factory=list)
    num_bytes: dict[int, Array] = field(default_factory=dict)
    peaks: dict[int, Array] = field(default_factory=dict)

    def least(self, limit_bytes: float | None = None) -> float:
        """The optimum, to 1e-10; infinite if nothing fits."""
        scale = max(float(own[np.isfinite(own)].max()) for own in self.unary.values())
        at, cost, is_choice = dict[int, int](), list[float](), list[bool]()
        rows: list[tuple[dict[int, float], float, float]] = []
        for number, own in self.unary.items():
            at[number] = len(cost)
            cost.extend((np.where(np.isfinite(own), own, _NEVER * scale) / scale).tolist())
            is_choice.extend([True] * len(own))
            rows.append(({at[number] + k: 1.0 for k in range(len(own))}, 1.0, 1.0))
        for source, target, pair in self.pairs:
            margins: dict[tuple[int, int], dict[int, float]] = {}
            for number, count in ((source, len(pair)), (target, len(pair[0]))):
                margins |= {(number, k): {at[number] + k: -1.0} for k in range(count)}
            for k, i in np.argwhere(np.isfinite(pair)).tolist():
                margins[source, k][len(cost)] = margins[target, i][len(cost)] = 1.0
                cost.append(float(pair[k, i]) / scale)
                is_choice.append(False)
            rows += [(row, 0.0, 0.0) for row in margins.values()]
        if limit_bytes is not None:
            peak = len(cost)
            cost.append(0.0)
            is_choice.append(False)
            held = {at[v] + k: float(b) / limit_bytes for v, own in self.num_bytes.items() for k, b in enumerate(own)}
            rows.append((held | {peak: 1.0}, -np.inf, 1.0))
            for v, own in self.peaks.items():
                rows.append(({at[v] + k: float(b) / limit_bytes for k, b in enumerate(own)} | {peak: -1.0}, -np.inf, 0))
        found = milp(
            c=np.array(cost),
            integrality=np.array(is_choice, dtype=int),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(
                _matrix([row for row, _, _ in rows], len(cost)),
                np.array([low for _, low, _ in rows]),
                np.array([high for _, _, high in rows]),
            ),
            options={"mip_rel_gap": 1e-11},
        )
        return float(found.fun) * scale if found.x is not None else float("inf")


def _matrix(rows: list[dict[int, float]], width: int) -> coo_array:
    numbers = np.array([number for row in rows for number in row.values()])
    down = np.array([i for i, row in enumerate(rows) for _ in row])
    across = np.array([column for row in rows for column in row])
    return coo_array((numbers, (down, across)), shape=(len(rows), width))
