"""Whether sums over ranks are one sum here, whatever their rows (`engine.startup.exact_ranks`).

python -m treetop.doctor.rank_sums FOLDER RANK SIZE DEVICE WIDTH EPS DTYPE EXACT PEERS
                                                             one rank's side; `rank_sum_differs` starts them all
"""

import json
import sys
from pathlib import Path

import torch

from treetop.checkpoints.loader import compute_dtype
from treetop.doctor.exchange import leave, measured_by_ranks
from treetop.engine.startup.exact_ranks import sums_differ
from treetop.engine.startup.plan import EnginePlan
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.parallel.exchange import Group, Rendezvous

_DIFFER = "rows whose sum differs"


def rank_sum_differs(engine_plan: EnginePlan) -> int | None:
    """The least number of rows of which a sum over the ranks of `--tp-size` has other bits; None if there is none.

    Raises EngineError if the ranks cannot exchange.
    """
    config, place, model = engine_plan.config, engine_plan.place, engine_plan.target.config
    more = (
        *(str(model.hidden_size), str(model.norm_eps), str(place.dtype).removeprefix("torch.")),
        *(str(int(flag)) for flag in (config.exactness == "bits", not config.disable_custom_all_reduce)),
    )
    found = measured_by_ranks("treetop.doctor.rank_sums", config.tp_size, place.device.type, *more)
    return int(found[_DIFFER]) if _DIFFER in found else None


def main(folder: str, rank: int, size: int, place: str, width: int, eps: float, dtype: str, *flags: str) -> None:
    device, (exact, peers) = torch.device(place), (flag == "1" for flag in flags)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    kind = compute_dtype(dtype, device)
    group = Group(Rendezvous(Path(folder) / "meeting", rank, size), device, peers, kind if exact else None)
    with torch.inference_mode():
        context = OpContext(device, kind, profile=profile_of("bits" if exact else "ties", device))
        differ = sums_differ(Ops(context, parallel=group.parallel), width, eps)
    if rank == 0:
        print(json.dumps({} if differ is None else {_DIFFER: differ}))
    group.parallel.minimum(0)  # nobody leaves before all have compared
    group.close()


if __name__ == "__main__":
    asked = sys.argv[1:]
    main(asked[0], int(asked[1]), int(asked[2]), asked[3], int(asked[4]), float(asked[5]), *asked[6:])
    leave()
