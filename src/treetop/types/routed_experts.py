"""Which experts tokens went to, as steps tell of them."""

from typing import NamedTuple


class ExpertShape(NamedTuple):
    """Which experts a token may go to.

    layers: that have experts. num_experts: of a layer, those without weights counted.
    """

    layers: int
    top_k: int
    num_experts: int

    @property
    def num_ids(self) -> int:
        """Of a token."""
        return self.layers * self.top_k


class ExpertLayers(NamedTuple):
    """Where a model's layers with experts are: `at`, of all its `total` layers. num_experts: as of `ExpertShape`."""

    total: int
    at: tuple[int, ...]
    num_experts: int


class TokenExperts(NamedTuple):
    """Experts that tokens of a request went to, from position `start` of prompt and output on.

    layers: that have experts, in the order of the model's; its others have no place.
    ids: [tokens, layers, top_k] int16 in the machine's order of bytes, best first in each layer. They count the experts
        of all ranks and those without weights, not those that all tokens take.
    """

    start: int
    layers: int
    top_k: int
    ids: bytes
