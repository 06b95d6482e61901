"""What calibrated ranking makes of trees whose heads say the wrong chances: the profiles that come with the package.

`treetop.speculative.profile` says what a profile draws. Production growing, selecting, accepting and learning run on
what it draws, without a model. Prints JSON: each profile's chain, its tree with raw ranking, and with a calibration
learned on the way, beside what was measured.

`--fit` fits profiles to their `measured` accept lengths, in place: the chances by depth to the chains, then the scale
of the logits so that raw ranking gives the measured tree (7, 4, 8), and `share` where no scale up to 1 does. The tree
(5, 3, 6), where it was measured, checks the fit.

Run: python benchmarks/acceptance_profiles.py [--profiles builtin:kimi-k2] [--fit FILE ...]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.tree.accept import accept_reference
from treetop.kernels.tree.calibration import Calibration, make_calibration
from treetop.kernels.tree.drawn import RoundOfRows, choose_drawn_reference, say_level_reference, say_roots_reference
from treetop.kernels.tree.grow import Children, TreeBuilder, grow_reference, make_growth, start_reference
from treetop.kernels.tree.learn import Observed, learn_reference
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.kernels.tree.select import select_reference
from treetop.speculative.profile import BUILTIN, AcceptanceProfile, profile_names, read_profile
from treetop.speculative.simulation import SimulatedAcceptance
from treetop.types.layout import SpecShape
from treetop.types.tree import Accepted, DraftTree, PathPositions

ROWS, WARM_UP, ROUNDS, VOCAB = 256, 24, 48, 1 << 20
TREE, OTHER, CHAIN = SpecShape(4, 7, 8), SpecShape(3, 5, 6), SpecShape(1, 7, 8)
LEAST_SCALE, LEAST_SHARE, MOST_SHARE = 0.05, 0.05, 0.9


def root_of(value: Callable[[float], float], wanted: float, low: float, high: float, times: int = 40) -> float:
    """Where a rising function has a value, by halving; an end if it has it nowhere between."""
    for _ in range(times):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return (low + high) / 2


def chances_by_depth(chains: dict[int, float]) -> list[float]:
    """The mean chance of the best proposal at each depth, of the accept lengths of chains by their steps: one chance
    for all depths that a chain has and no shorter one. Raises ValueError where no chance below 1 gives a length, as
    of chains that were measured on too few prompts.
    """
    chances: list[float] = []
    length, reached = 1.0, 1.0
    for steps, measured in sorted(chains.items()):
        new, here, before = steps - len(chances), reached, length
        if not before <= measured < before + here * new:
            raise ValueError(
                f"measured: a chain of {steps} steps with an accept length of {measured} after one of {len(chances)} "
                f"with {before}: chances below 1 give at least that and less than {before + here * new:.3f}. "
                "Measure on more prompts, or leave one out"
            )
        chance = root_of(lambda a: before + here * sum(a ** (i + 1) for i in range(new)), measured, 0, 1)  # noqa: B023
        length, reached = measured, here * chance**new
        chances += [chance] * new
    return chances


@dataclass(frozen=True, slots=True)
class Memory:
    """Tensors of rounds of so many rows, used again and again."""

    growth: TreeBuilder
    tree: DraftTree
    places: PathPositions
    accepted: Accepted
    calibration: Calibration

    @classmethod
    def make(cls, shape: SpecShape, rows: int = ROWS, calibration: Calibration | None = None) -> "Memory":
        """calibration: None for one of its own, which has learned nothing."""
        t, w, long = shape.num_draft_tokens, shape.commit_width, torch.int64

        def zeros(*size: int, dtype: torch.dtype = long) -> Tensor:
            return torch.zeros((rows, *size), dtype=dtype)

        if calibration is None:
            calibration = new_calibration(shape.num_steps, shape.topk)
        return cls(
            make_growth(shape, rows, calibration, lambda size, dtype: torch.zeros(size, dtype=dtype)),
            DraftTree(zeros(t), zeros(t), zeros(t), zeros(t, t, dtype=torch.bool), zeros(t, dtype=torch.float32)),
            PathPositions(zeros(), zeros(t), zeros(w)),
            Accepted(zeros(w), zeros(), zeros(w), zeros(), zeros(dtype=torch.bool), zeros(t)),
            calibration,
        )


def new_calibration(depths: int, ranks: int) -> Calibration:
    return make_calibration(depths, ranks, lambda size, dtype: torch.zeros(size, dtype=dtype))


def one_round(simulation: SimulatedAcceptance, index: int, memory: Memory) -> None:
    """Grow a tree from what is drawn, and accept in it what is drawn. A proposal's token is its flat index."""
    growth, tree, shape = memory.growth, memory.tree, memory.growth.shape
    k, n = shape.topk, len(growth.tokens)
    rows, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    at = RoundOfRows(rows, torch.full((n,), index), zeros, rows, n, memory.calibration.inv_temp)
    tokens, drawn = torch.arange(shape.num_candidates).expand(n, -1), simulation.drawn
    draft = DraftState(tokens[:, :k], torch.zeros(n, k), torch.zeros(n, 1))
    say_roots_reference(drawn, at, k, draft.logprob)
    identity = torch.eye(k, dtype=torch.bool)
    frontier = start_reference(RowTables(zeros, zeros, zeros, draft), rows, growth, tree, memory.places, identity)
    for level in range(shape.num_steps - 1):
        first = k + level * k * k
        says = say_level_reference(drawn, at, level + 1, k)
        children = Children(tokens[:, first : first + k * k].view(n, k, k), says, torch.zeros(n, k, 1))
        frontier = grow_reference(growth, level, frontier, children)
    select_reference(growth, tree, memory.places)
    accept_reference(choose_drawn_reference(drawn, at, growth), tree, memory.accepted, None)


def accept_length(profile: AcceptanceProfile, shape: SpecShape, learns: bool) -> float:
    """Tokens a round, after a warm-up in which a calibration is learned if it is to be."""
    simulation = SimulatedAcceptance.make(profile, shape.num_steps, VOCAB, torch.device("cpu"))
    memory, total = Memory.make(shape), 0.0
    observed = Observed(torch.arange(ROWS), ROWS, None, True)
    for index in range(WARM_UP * learns + ROUNDS):
        one_round(simulation, index, memory)
        if index >= WARM_UP * learns:
            total += 1 + float(memory.accepted.accept_len.double().mean())
        if learns:
            learn_reference(memory.calibration, memory.growth, memory.accepted, observed)
    return total / ROUNDS


def figures(profile: AcceptanceProfile) -> dict[str, float]:
    """Tokens a round of each way, and what was measured."""
    chain, found = accept_length(profile, CHAIN, False), {"scale": profile.scale, "share": profile.share}
    for name, shape in (("7_4_8", TREE), ("5_3_6", OTHER)):
        found |= {f"measured_{name}": profile.measured[shape]} if shape in profile.measured else {}
        found |= {f"raw_{name}": accept_length(profile, shape, False)}
        found |= {f"calibrated_{name}": accept_length(profile, shape, True)}
    found |= {"measured_chain": profile.measured[CHAIN]} if CHAIN in profile.measured else {}
    return found | {"chain": chain, "calibrated_over_chain": found["calibrated_7_4_8"] / chain}


def fitted(profile: AcceptanceProfile) -> AcceptanceProfile:
    """The profile with chances and scale that give what was measured. Without a tree its head says the true chances."""
    chains = {shape.num_steps: length for shape, length in profile.measured.items() if shape.topk == 1}
    profile = replace(profile, chances=tuple(round(each, 4) for each in chances_by_depth(chains)), scale=1.0)
    wanted = profile.measured.get(TREE)
    if wanted is None:
        return profile
    worst, best = replace(profile, scale=LEAST_SCALE), profile
    for ends, low, high in ((worst, LEAST_SHARE, profile.share), (best, profile.share, MOST_SHARE)):
        length = accept_length(ends, TREE, False)
        if length > wanted if ends is worst else length < wanted:
            share = root_of(lambda each: accept_length(replace(ends, share=each), TREE, False), wanted, low, high, 7)  # noqa: B023
            return replace(ends, share=round(share, 3))
    scale = root_of(lambda each: accept_length(replace(profile, scale=each), TREE, False), wanted, LEAST_SCALE, 1.0, 8)
    return replace(profile, scale=round(scale, 3))


def write(path: Path, profile: AcceptanceProfile) -> None:
    names = "source", "chances", "sureness", "share", "tail", "scale"
    held = {name: getattr(profile, name) for name in names}
    measured = {f"{s.num_steps},{s.topk},{s.num_draft_tokens}": length for s, length in profile.measured.items()}
    path.write_text(json.dumps(held | {"measured": measured}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=[BUILTIN + name for name in profile_names()])
    parser.add_argument("--fit", nargs="+", default=[], help="files to fit, first")
    args = parser.parse_args()
    for name in args.fit:
        try:
            write(Path(name), fitted(read_profile(name)))
        except ValueError as error:
            parser.error(f"--fit {name}: {error}")
    names = args.fit or args.profiles
    print(
        json.dumps({name: {k: round(v, 3) for k, v in figures(read_profile(name)).items()} for name in names}, indent=1)
    )


if __name__ == "__main__":
    main()
