"""With `--exactness bits` and several ranks: whether their sums are one sum, whatever the rows.

Who brings the shares depends on their number of bytes: peer memory, or a gathering library. What adds them is a kernel
of its own each time, so the ranks try both at the model's width before weights are read. `parallel/exchange.py` says
what the sum is.
"""

import torch
from torch import Tensor

from treetop.checkpoints.loader import LoadContext
from treetop.engine.startup.plan import EnginePlan
from treetop.engine.startup.probed_products import identity
from treetop.exact.probe import adversarial
from treetop.kernels.fused import joined_in_order
from treetop.kernels.table import Ops
from treetop.parallel.exchange import SMALL
from treetop.types.errors import ConfigError

_COUNTS = (1, 2, 3, 7, 16, 33, 64, 256)
_FEWEST = 300
"""Rows among which a row's sum is compared with that among fewer: more than peer memory takes."""
_NONE = 1 << 40


def check_ranks(engine_plan: EnginePlan) -> None:
    """Collective. Raises ConfigError, on all ranks, where ranks could not give one result, or where a sum of theirs
    depends on its rows."""
    place = engine_plan.place
    if not place.profile.sums_in_order or place.parallel.size * place.expert_ranks.size == 1:
        return
    if not _of_all(place, int(place.profile.integers.attention)):
        raise ConfigError(
            "--exactness bits: attention that is exact on one rank is not on another; use --exact-sums integers"
        )
    if place.device.type == "cuda" and not _alike(place):
        raise ConfigError("--exactness bits: ranks have GPUs or libraries of several kinds; use --exactness ties")
    model = engine_plan.target.config
    differ = sums_differ(place.ops, model.hidden_size, model.norm_eps)
    differ = place.expert_ranks.minimum(_NONE if differ is None else differ)
    if differ != _NONE:
        raise ConfigError(
            f"--exactness bits: sums over ranks of {differ} rows are not those of others; use"
            " --disable-custom-all-reduce or --exactness ties"
        )


def _alike(place: LoadContext) -> bool:
    """Whether what bits of an operation depend on is the same for all ranks (`engine.startup.probed_products`)."""
    return _of_all(place, int(identity(place.device)[:15], 16))


def _of_all(place: LoadContext, number: int) -> bool:
    """Collective: whether all ranks have this number."""
    least, negative = (place.expert_ranks.minimum(place.parallel.minimum(each)) for each in (number, -number))
    return least == -negative


def sums_differ(ops: Ops, hidden: int, eps: float) -> int | None:
    """The least number of rows of which a sum over ranks, or its norm, has other bits than it is defined to have.

    Collective: the same on all ranks. None if there is none, or if there is one rank. ops: of a target. hidden: width.
    """
    ranks, device, dtype = ops.parallel, ops.context.device, ops.context.dtype
    if ranks.size == 1:
        return None
    rows = max(_FEWEST, SMALL // (hidden * dtype.itemsize) + 1)
    alike = torch.Generator(device).manual_seed(hidden)
    own = torch.Generator(device).manual_seed(hidden + 1 + ranks.rank)
    x = _numbers((rows, hidden), alike).to(dtype)
    weight = torch.randn(hidden, generator=alike, device=device).to(dtype)
    least = _NONE
    for number in (1, 3):
        parts = torch.stack([_numbers((rows, hidden), own) for _ in range(number)])
        parts = parts.to(dtype) if number == 1 else parts
        shares = ranks.gather(joined_in_order(parts).to(dtype))
        want = ops.add_rms_norm(x[:, None], shares[:, :, None], weight, eps)
        if not torch.equal(want[0][:, 0], _defined(x, shares)):
            least = min(least, rows)
        for count in (*_COUNTS, rows):
            at = torch.randperm(rows, generator=alike, device=device)[:count]
            got = ops.add_rms_norm(x[at][:, None], ranks.share(parts[:, at][:, :, None]), weight, eps)
            summed = _defined(x[at], ranks.sum(parts[:, at]))
            alone = ops.add(x[at][:, None], ranks.share(parts[:, at][:, :, None]))[:, 0]
            pairs = (got[0], want[0][at]), (got[1], want[1][at]), (summed, want[0][at, 0]), (alone, want[0][at, 0])
            if not all(torch.equal(one, other) for one, other in pairs):
                least = min(least, count)
    least = ranks.minimum(least)
    return None if least == _NONE else least


def _defined(x: Tensor, shares: Tensor) -> Tensor:
    """x plus shares [ranks, ...] in the order of the ranks, in float32, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + joined_in_order(shares).to(wide)).to(x.dtype)


def _numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return adversarial(shape, generator).clamp_(-1e3, 1e3)
