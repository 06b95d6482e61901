"""What one budget of nodes for a batch could gain over one shape for all its rows, in modelled time.

    python benchmarks/node_budget.py [--profile builtin:llama-3.1-8b] [--rows 32 64 128 256] [--spread 0 1] [--json]

Trees are grown as in production on what a profile draws (`treetop.speculative.profile`), with chances that are known
exactly, which no head's are: so this is more than a budget can gain. A shape gives each row its best T nodes; a budget
of N gives all rows together their best N, a root each, by the chance of the path to a node. Rounds take what
`treetop.bench.modelled_costs` says of an 8B model on a GPU, a budget's as those of a shape with as many nodes; what
choosing, ragged attention and padding to a grid of captured sizes add is left out.

spread: standard deviation, among rows, of the logit of how often a head is right. Prints for each number of rows
tokens/s of plain rounds, of the best of `auto`'s shapes, of the best of any chain or tree, and of the best budgets of
chains alone and of trees, with their nodes a row; and what budgets have over the best of any shape.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from treetop.bench.modelled_costs import nodes_seconds
from treetop.speculative.profile import AcceptanceProfile, read_profile
from treetop.types.layout import PLAIN, SpecShape, shapes_beside

CONTEXT, _NODES = 1024, 1 << 18
"""Tokens that each row has; nodes of candidates that are drawn for a number of rows, about."""
BUDGETS = (1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
"""Nodes a row, in the mean."""


@dataclass(frozen=True, slots=True)
class Figure:
    """tokens/s. over_best: of budgets of chains and of trees, over the best of any shape."""

    rows: int
    spread: float
    plain: float
    of_auto: tuple[str, float]
    of_any: tuple[str, float]
    chains: tuple[str, float]
    trees: tuple[str, float]

    @property
    def over_best(self) -> tuple[float, float]:
        return self.chains[1] / self.of_any[1], self.trees[1] / self.of_any[1]

    def line(self) -> str:
        listed = self.of_auto, self.of_any, self.chains, self.trees
        named = "  ".join(f"{name:>11} {rate:7.0f}" for name, rate in listed)
        over = " ".join(f"{each:.3f}" for each in self.over_best)
        return f"{self.rows:5} {self.spread:6.1f} {self.plain:7.0f}  {named}   {over}"


def grown(profile: AcceptanceProfile, ease: Tensor, steps: int, topk: int) -> Tensor:
    """Path chances of each row's candidates, best first: [rows, k + (S - 1) k^2]. ease: [rows], added to logits."""
    rows, least = len(ease), profile.least
    further = profile.share * (1 - profile.share) ** torch.arange(topk - 1, dtype=torch.float64)
    path, found = torch.ones((rows, 1), dtype=torch.float64), []
    for depth in range(steps):
        mean = (profile.chances[min(depth, len(profile.chances) - 1)] - least) / (1 - least)
        own = torch.sigmoid(ease + torch.tensor(mean, dtype=torch.float64).logit())[:, None].expand_as(path)
        sure = torch.distributions.Beta(profile.sureness * own, profile.sureness * (1 - own)).sample()
        best = least + (1 - least) * sure
        chances = torch.cat([best[..., None], (1 - best)[..., None] * further], dim=-1)
        candidates = (path[..., None] * chances).flatten(1)
        found.append(candidates)
        path = candidates.topk(min(topk, candidates.shape[1]), dim=1).values
    return torch.cat(found, dim=1).sort(dim=1, descending=True).values


def any_shapes() -> Iterator[SpecShape]:
    for steps in range(1, 7):
        yield SpecShape(1, steps, steps + 1)
        for topk in (2, 4):
            yield from (
                SpecShape(topk, steps, nodes)
                for nodes in (4, 6, 8, 12, 16)
                if steps + 1 < nodes <= 1 + topk + (steps - 1) * topk**2
            )


def figure(profile: AcceptanceProfile, rows: int, spread: float) -> Figure:
    groups = max(_NODES // (rows * 64), 8)
    ease = spread * torch.randn(groups * rows, dtype=torch.float64)
    by_growth: dict[tuple[int, int], Tensor] = {}

    def candidates(steps: int, topk: int) -> Tensor:
        if (steps, topk) not in by_growth:
            by_growth[steps, topk] = grown(profile, ease, steps, topk)
        return by_growth[steps, topk]

    def rate(tokens: float, nodes: float, steps: int, topk: int) -> float:
        return rows * tokens / nodes_seconds(rows, round(rows * nodes), steps, topk, CONTEXT)

    def of_shape(shape: SpecShape) -> float:
        if shape == PLAIN:
            return rate(1.0, 1, 0, 1)
        nodes = shape.num_draft_tokens
        best = candidates(shape.num_steps, shape.topk)[:, : nodes - 1]
        return rate(1.0 + float(best.sum(1).mean()), nodes, shape.num_steps, shape.topk)

    def best_budget(topks: tuple[int, ...]) -> tuple[str, float]:
        found = {}
        for steps in range(1, 7):
            for topk in topks:
                flat = candidates(steps, topk).view(groups, -1)
                for each in BUDGETS:
                    count = round(rows * (each - 1))
                    if count <= flat.shape[1]:
                        tokens = 1.0 + float(flat.topk(count, dim=1).values.sum(1).mean()) / rows
                        found[f"{steps},{topk},{each:g}B"] = rate(tokens, each, steps, topk)
        return max(found.items(), key=lambda item: item[1])

    def best_shape(shapes: list[SpecShape]) -> tuple[str, float]:
        rates = {f"{each.num_steps},{each.topk},{each.num_draft_tokens}": of_shape(each) for each in shapes}
        return max(rates.items(), key=lambda item: item[1])

    of_auto = list(shapes_beside(SpecShape(4, 5, 16)))
    return Figure(
        rows,
        spread,
        of_shape(PLAIN),
        best_shape(of_auto),
        best_shape([*of_auto, *any_shapes()]),
        best_budget((1,)),
        best_budget((1, 2, 4)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="builtin:llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--spread", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    profile, found = read_profile(args.profile), []
    torch.manual_seed(0)
    for spread in args.spread:
        for rows in args.rows:
            found.append(figure(profile, rows, spread))
            if not args.json:
                if len(found) == 1:
                    columns = "  ".join(f"{each:>19}" for each in ("of auto", "any shape", "budget, chains", "trees"))
                    print(f" rows spread   plain  {columns}   over any")
                print(found[-1].line(), flush=True)
    if args.json:
        print(json.dumps([{**asdict(each), "over_best": each.over_best} for each in found]))


if __name__ == "__main__":
    main()
