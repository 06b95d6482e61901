"""What ranks that share experts take here: to bring rows to all of them and back, and to agree on a step.

python -m treetop.doctor.expert_ranks FOLDER RANK SIZE DEVICE      one rank's side; `expert_rank_times` starts them all
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import zmq

from treetop.distributed.lockstep import StepProposal, StepSync
from treetop.doctor.exchange import ROWS, WIDTH, leave, measured_by_ranks, times_us
from treetop.parallel.exchange import Group, Rendezvous
from treetop.types.parallel import Parallel

_AGREEMENTS, _SKIPPED = 500, 50
_PATIENCE_S = 60.0


def expert_rank_times(size: int, device: str) -> list[tuple[str, str]]:
    """Microseconds, median. Raises EngineError if the ranks cannot exchange."""
    times = measured_by_ranks("treetop.doctor.expert_ranks", size, device)
    return [(f"{what} {size} ranks", f"{us:.1f} us") for what, us in times.items()]


def there_and_back(ranks: Parallel, rows: torch.Tensor) -> torch.Tensor:
    """What a layer of experts exchanges: all ranks' rows [rows, width], and a part of each row from every rank."""
    return ranks.all_to_all(ranks.gather(rows).float())


def main(folder: str, rank: int, size: int, place: str) -> None:
    device = torch.device(place)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    group, dtype = Group(Rendezvous(Path(folder) / "meeting", rank, size), device), torch.bfloat16
    times: dict[str, float] = {}
    with torch.inference_mode():
        for count in ROWS:
            rows = torch.ones((count, WIDTH), dtype=dtype, device=device)
            took = times_us(lambda rows=rows: there_and_back(group.parallel, rows), device)  # type: ignore[misc]  # bound now
            times[f"{count} x {WIDTH} to and from"] = statistics.median(took)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    step_sync = StepSync(folder, rank, size, context)
    group.parallel.minimum(0)  # all listen
    times["agreement of"] = statistics.median([_agreement_us(step_sync) for _ in range(_AGREEMENTS)][_SKIPPED:])
    if rank == 0:
        print(json.dumps(times))
    group.parallel.minimum(0)  # nobody leaves before all have measured
    step_sync.close()
    context.destroy(linger=0)
    group.close()


def _agreement_us(step_sync: StepSync) -> float:
    begun = time.perf_counter()
    step_sync.agree(StepProposal(1), _PATIENCE_S)
    return 1e6 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    leave()
