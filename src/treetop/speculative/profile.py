"""Profiles of acceptance: what a target chooses and what its head says of it, drawn from one distribution.

A profile is fitted to published accept lengths. At each node, independently of all others:

- how sure the node is, the chance of the best proposal, has a mean by depth that gives the accept lengths of chains: a
  Beta distribution of concentration `sureness` between the least that the best can have, and 1;
- each further proposal takes `share` of what is left. The head knows the order of its proposals;
- the head's logits are the log of the true chances times `scale`, with what is left after `RANKS` proposals spread over
  `tail` tokens. A chain is the same at any scale; the scale is fitted so that a tree ranked by the head's
  log-probabilities as they are accepts what was measured.

`sureness` is assumed, and so is `share` where one can be: accept lengths say nothing of them. So is `spread`, which no
profile of the package has: requests then differ in how often the head is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from treetop.checkpoints.json_file import read_object
from treetop.types.errors import CheckpointError, ConfigError, shown
from treetop.types.layout import SpecShape

FLAG, BUILTIN = "--simulate-acceptance", "builtin:"
RANKS = 16
"""Proposals that have a chance of their own."""
KINDS = 16
"""Of requests, where these differ."""
_LEAST, _SMALL = 1e-4, 1e-30
"""What the best proposal leaves to others; chances that are 0."""


@dataclass(frozen=True, slots=True)
class AcceptanceProfile:
    """chances: the mean chance of the best proposal at depth 1, 2, ...; the last holds for all that are deeper.
    measured: accept lengths that were published, by shape "S,k,T".
    spread: standard deviation, among requests, of the logit of these chances.
    """

    name: str
    source: str
    chances: tuple[float, ...]
    sureness: float
    share: float
    tail: int
    scale: float
    measured: Mapping[SpecShape, float]
    spread: float = 0.0

    @property
    def least(self) -> float:
        """Chance of a best proposal that is no better than the next."""
        return self.share / (1 + self.share)

    @property
    def kinds(self) -> "tuple[AcceptanceProfile, ...]":
        """Of requests, each as frequent: this profile if all are alike."""
        if not self.spread:
            return (self,)
        quantiles = (NormalDist().inv_cdf((kind + 0.5) / KINDS) for kind in range(KINDS))
        return tuple(self._eased(self.spread * each) for each in quantiles)

    def _eased(self, ease: float) -> "AcceptanceProfile":
        """ease: added to the logit of where chances stand between the least and 1."""
        least = self.least
        parts = torch.tensor([(chance - least) / (1 - least) for chance in self.chances], dtype=torch.float64)
        chances = least + (1 - least) * torch.sigmoid(parts.logit() + ease)
        return replace(self, chances=tuple(chances.tolist()), spread=0.0)


@dataclass(frozen=True, slots=True)
class NodeDraws:
    """Draws of nodes at one depth: what the head says of its proposals, best first, and which of them is chosen.

    logits: [n, RANKS + 1] float32; the last is that of each of all other tokens.
    rank: [n] int64; RANKS where none of them is chosen.
    """

    logits: Tensor
    rank: Tensor


def profile_names() -> list[str]:
    """Those that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def read_profile(name: str) -> AcceptanceProfile:
    """The profile in a file, or `builtin:NAME` of the package. Raises ConfigError unless it is one."""
    known = [BUILTIN + each for each in profile_names()]
    if name.startswith(BUILTIN) and name not in known:
        raise ConfigError(f"{FLAG} {shown(name)}: no such profile; known are {', '.join(known)}")
    path = _folder() / f"{name.removeprefix(BUILTIN)}.json" if name in known else Path(name)
    try:
        return _profile(path.stem, read_object(path))
    except CheckpointError as error:
        raise ConfigError(f"{FLAG} {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} {path}: no profile of acceptance ({error!r}); docs/policy.md says what one has"
        ) from None


def _folder() -> Path:
    return Path(str(resources.files("treetop") / "speculative" / "profiles"))


def _profile(name: str, held: dict[str, Any]) -> AcceptanceProfile:
    """Raises what a value of another kind makes."""
    found = AcceptanceProfile(
        name,
        str(held["source"]),
        tuple(map(float, held["chances"])),
        *(float(held["sureness"]), float(held["share"]), int(held["tail"]), float(held["scale"])),
        {SpecShape.parse(shape, "measured"): float(length) for shape, length in held["measured"].items()},
        float(held.get("spread", 0.0)),
    )
    for what, good in (
        ("sureness", 0 < found.sureness < float("inf")),
        ("share", 0 <= found.share < 1),
        ("chances", bool(found.chances) and all(found.least < chance < 1 for chance in found.chances)),
        ("tail", 1 <= found.tail <= 2**24),
        ("scale", 0 < found.scale <= 64),
        ("spread", 0 <= found.spread <= 8),
    ):
        if not good:
            raise ValueError(f"{what}: {shown(held[what])}")
    return found


def draw_nodes(profile: AcceptanceProfile, depth: int, count: int) -> NodeDraws:
    """`count` nodes whose proposals stand at `depth`, 0 for those of the root. By PyTorch's generator of the CPU."""
    least = profile.least
    mean = (profile.chances[min(depth, len(profile.chances) - 1)] - least) / (1 - least)
    of_best = profile.sureness * torch.tensor([mean, 1 - mean], dtype=torch.float64)
    sure = least + (1 - least) * torch.distributions.Beta(*of_best).sample((count,)).clamp(max=1 - _LEAST)
    further = profile.share * (1 - profile.share) ** torch.arange(RANKS - 1, dtype=torch.float64)
    rest = 1 - further.sum()
    chances = torch.cat([sure[:, None], (1 - sure[:, None]) * torch.cat([further, rest[None]])], dim=1)
    rank = torch.searchsorted(chances.cumsum(dim=1), torch.rand(count, 1, dtype=torch.float64))[:, 0].clamp(max=RANKS)
    each = torch.cat([chances[:, :RANKS], chances[:, RANKS:] / profile.tail], dim=1)
    return NodeDraws((each.clamp(min=_SMALL).log() * profile.scale).float(), rank)
