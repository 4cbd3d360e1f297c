"""The parameters of a module, handed over one at a time."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


class HandedOver(Mapping[str, Tensor]):
    """Reading a parameter takes it out of the module, which keeps an empty one of the same shape on the meta device.

    Whoever reads it decides how long the whole tensor lives.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        held: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for short, parameter in module._parameters.items():  # tied parameters are in several modules
                if parameter is not None:
                    held.setdefault(id(parameter), []).append((module, short))
        for name, parameter in model.named_parameters():
            self._owners[name] = held[id(parameter)]

    def __getitem__(self, name: str) -> Tensor:
        owners = self._owners[name]
        parameter = getattr(*owners[0])
        empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for module, short in owners:
            setattr(module, short, empty)
        return parameter.detach()

    def drop_rest(self) -> None:
        """Take out what nobody has read."""
        for name in self:
            self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
