"""Reduce-scatter and all-gather as two rings of messages, one in either direction, half of every piece in each.

gloo's own reduce-scatter is an all-reduce and a chunk, twice the bytes, and its all-gather goes one way round. Two
rings move as many bytes and use both directions of every link that lies between neighbours: on a crossbar this is as
fast, on a ring or torus twice as fast.

The ring is in the order of ranks. With n members and p one's position, in round r = 0 … n - 2 of a reduce-scatter the
piece p - 1 - r goes up, from p to p + 1, and what arrives is added to the next; after n - 1 rounds piece p has come to
p with all contributions. An all-gather sends on what arrived in the round before. Downwards the signs change.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[["dist.Work | None"], None]


class Rings:
    """The two rings of one group, in the order of its ranks; `tag` tells its messages from all others."""

    def __init__(self, ranks: Sequence[int], rank: int, tag: int, wait: Wait) -> None:
        self.ranks, self.position, self.tag, self.wait = ranks, ranks.index(rank), tag, wait

    def reduce_scatter(self, pieces: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`pieces[q]`: this member's contribution to the piece of member q → the combination of piece `position`."""
        n, p = len(self.ranks), self.position
        held = [[half.clone() for half in _halves(piece)] for piece in pieces]
        for r in range(n - 1):
            going = [(held[(p - way * (1 + r)) % n][i], way) for i, way in enumerate((1, -1))]
            for i, (way, arrived) in enumerate(self._round(going, like=[h[0] for h in going])):
                place = (p - way * (2 + r)) % n
                held[place][i] = combine(held[place][i], arrived)
        return torch.cat(held[p]).reshape(pieces.shape[1:])

    def all_gather(self, piece: Tensor) -> Tensor:
        """The pieces of all members, in the order of their ranks."""
        n, p = len(self.ranks), self.position
        result = piece.new_empty((n, *piece.shape))
        result[p] = piece
        places = [_halves(row) for row in result]  # views of the result
        for r in range(n - 1):
            going = [(places[(p - way * r) % n][i], way) for i, way in enumerate((1, -1))]
            into = [places[(p - way * (r + 1)) % n][i] for i, way in enumerate((1, -1))]
            for i, (_, arrived) in enumerate(self._round(going, like=into)):
                into[i].copy_(arrived)
        return result

    def _round(self, going: list[tuple[Tensor, int]], like: list[Tensor]) -> list[tuple[int, Tensor]]:
        """Send one half up and one down, and receive as much from the other sides."""
        n, works, arriving = len(self.ranks), [], []
        for i, ((_, way), shape) in enumerate(zip(going, like, strict=True)):
            arrived = torch.empty_like(shape)
            arriving.append((way, arrived))
            if arrived.numel():
                source = self.ranks[(self.position - way) % n]
                works.append(dist.irecv(arrived, source, tag=self.tag + i))
        for i, (half, way) in enumerate(going):
            if half.numel():
                works.append(dist.isend(half, self.ranks[(self.position + way) % n], tag=self.tag + i))
        for work in works:
            self.wait(work)
        return arriving


def _halves(piece: Tensor) -> list[Tensor]:
    flat = piece.view(-1)
    return [flat[: (flat.numel() + 1) // 2], flat[(flat.numel() + 1) // 2 :]]
