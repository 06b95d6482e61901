"""The groups of a rank: of those that share its model, and of those of other engines that share its experts.

--tp-size 2 --ep-size 2       engine 0        engine 1
  shares experts ----------->  rank 0  <---->  rank 0        GPU 0, GPU 2
                                 | shares a model |
  shares experts ----------->  rank 1  <---->  rank 1        GPU 1, GPU 3
"""

from pathlib import Path

import msgspec
import torch

from treetop.checkpoints.loader import compute_dtype
from treetop.kernels.profile import profile_of
from treetop.parallel.exchange import Group, Rendezvous
from treetop.types.config import EngineConfig
from treetop.types.parallel import SINGLE_RANK, Parallel


class ExpertEngines(msgspec.Struct, frozen=True):
    """The engines that share experts, and which of them this is.

    folder: where their ranks meet, of their owner alone.
    rank: of `size`.
    """

    folder: str
    rank: int
    size: int


def use_gpu_of(config: EngineConfig, rank: int, device: torch.device, engines: ExpertEngines | None) -> None:
    """The calling thread's GPU becomes the rank's. rank: of `--tp-size`."""
    if device.type == "cuda":
        torch.cuda.set_device(rank if engines is None else engines.rank * config.tp_size + rank)


class RankGroups:
    """What a rank exchanges with others. parallel, expert_ranks: see `Engine`."""

    def __init__(
        self, config: EngineConfig, rank: int, device: torch.device, folder: str, engines: ExpertEngines | None
    ) -> None:
        """Waits until all ranks have come; of a GPU the calling thread gets the rank's.

        rank: of `--tp-size`. folder: where these meet. Raises as `Group`. With `--exactness bits` shares of a sum are
        sent in the dtype of the engine.
        """
        use_gpu_of(config, rank, device, engines)  # also where ranks meet on a thread of its own
        self.parallel: Parallel = SINGLE_RANK
        self.expert_ranks: Parallel = SINGLE_RANK
        self._groups: list[Group] = []
        try:
            if config.tp_size > 1:
                place = Rendezvous(Path(folder) / "meeting", rank, config.tp_size)
                in_order = profile_of(config.exactness, device).sums_in_order
                exact = compute_dtype(config.dtype, device) if in_order else None
                self._groups.append(Group(place, device, not config.disable_custom_all_reduce, exact))
                self.parallel = self._groups[-1].parallel
            if engines is not None:
                place = Rendezvous(Path(engines.folder) / f"meeting-{rank}", engines.rank, engines.size)
                self._groups.append(Group(place, device))
                self.expert_ranks = self._groups[-1].parallel
        except BaseException:
            self.close(0.0)
            raise

    def set_deadline(self, seconds: float) -> None:
        """See `Group`."""
        for group in self._groups:
            group.set_deadline(seconds)

    def close(self, patience_s: float | None = None) -> None:
        """See `Group`."""
        for group in self._groups:
            group.close() if patience_s is None else group.close(patience_s)
