"""Simulated acceptance: rounds accept what a profile draws, and the head says of it what the profile says."""

import json

import pytest
import torch

from support.engines import build, greedy, sampled
from treetop.engine.startup.plan import plan_engine
from treetop.kernels.tree.calibration import make_calibration
from treetop.kernels.tree.drawn import RoundOfRows, choose_drawn_reference, logprob_of
from treetop.kernels.tree.grow import make_growth
from treetop.speculative.profile import RANKS, draw_nodes, profile_names, read_profile
from treetop.speculative.simulation import SimulatedAcceptance
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.layout import SpecShape

KIMI = "builtin:kimi-k2"


def zeros(size, dtype):
    return torch.zeros(size, dtype=dtype)


def expected_length(profile, steps):
    length, reached = 1.0, 1.0
    for depth in range(steps):
        reached *= profile.chances[min(depth, len(profile.chances) - 1)]
        length += reached
    return length


@pytest.mark.parametrize("name", ["kimi-k2", "qwen3-235b-a22b", "glm-mtp"])
def test_what_a_head_says_at_the_right_heat_is_how_often_it_is_chosen(name):
    """Heated by one over its scale a profile's head is calibrated, rank by rank; and it knows the order."""
    torch.manual_seed(0)
    profile = read_profile(f"builtin:{name}")
    for depth in (0, 4):
        drawn = draw_nodes(profile, depth, 40_000)
        said = logprob_of(drawn.logits, profile.tail, 1 / profile.scale).exp()
        chosen = torch.stack([(drawn.rank == rank).double().mean() for rank in range(RANKS)])
        assert (said.double().mean(dim=0) - chosen).abs().max() < 0.01
        assert float(chosen[0]) == pytest.approx(profile.chances[depth], abs=0.01)
        assert bool((drawn.logits[:, :-2] >= drawn.logits[:, 1:-1]).all())


def test_choices_are_a_proposal_of_the_rank_that_was_drawn_or_none_of_them():
    """Against a walk over nodes and groups, one by one."""
    shape, rows, vocab = SpecShape(3, 4, 9), 5, 40
    simulation = SimulatedAcceptance.make(read_profile(KIMI), shape.num_steps, vocab, torch.device("cpu"))
    growth = make_growth(shape, rows, make_calibration(4, 3, zeros), zeros)
    generator = torch.Generator().manual_seed(3)
    for group in range(shape.num_candidates // 3):
        for row in range(rows):
            growth.tokens[row, 3 * group : 3 * group + 3] = torch.randperm(vocab, generator=generator)[:3]
    growth.parents[:, :13] = torch.tensor([-1, 0, 1, 2, 3, 7, 11, 12, 16, 17, 21, 22, 26])
    growth.chosen.copy_(torch.tensor([-1, 0, 1, 3, 7, 12, 2, 21, 5]))
    listed, drawn = torch.arange(rows), simulation.drawn
    at = RoundOfRows(listed, torch.full((rows,), 17), torch.zeros(rows).long(), listed, rows, torch.ones(4, 3))
    got = choose_drawn_reference(drawn, at, growth).token
    draws = at.draws(torch.arange(10))
    seen = set()
    for row in range(rows):
        for node, flat in enumerate(growth.chosen[row].tolist()):
            groups = [g for g in range(10) if int(growth.parents[row, g]) == flat]
            for group in groups:
                rank = int(drawn.rank[-(-group // 3), int(draws[row, group]) % drawn.rank.shape[1]])
                children = growth.tokens[row, 3 * group : 3 * group + 3].tolist()
                choice = int(got[row, node])
                assert (children.index(choice) if choice in children else 3) == min(rank, 3)
                seen.add(min(rank, 3))
    assert 0 <= int(got.min()) <= int(got.max()) < vocab
    assert {0, 3} <= seen
    growth.parents[:, :4] = 7  # as kernels leave them: what is always the same is not written
    assert torch.equal(choose_drawn_reference(drawn, at, growth).token, got)


def test_an_engine_accepts_what_a_profile_says(strong_pair):
    """The same rounds eagerly and as graphs, at the level that poisons, and a chain as long as was measured."""
    profile = read_profile(KIMI)
    lengths = []
    for shape, options in (((1, 5, 6), {}), ((1, 5, 6), {"graphs": "sim", "check_level": 3}), ((3, 5, 6), {})):
        llm = build(strong_pair, shape, simulate_acceptance=KIMI, **options)
        outputs = llm.generate(strong_pair.prompts([5, 9] * 4), greedy(160))
        llm.scheduler.check_integrity()
        lengths.append([output.metrics.accept_lens for output in outputs])
    assert lengths[0] == lengths[1]
    (chain, _, tree) = ([n for row in each for n in row[:-1]] for each in lengths)
    assert 1 + sum(chain) / len(chain) == pytest.approx(expected_length(profile, 5), rel=0.06)
    assert sum(tree) / len(tree) < sum(chain) / len(chain)


def test_requests_may_differ_in_how_often_the_head_is_right(strong_pair, tmp_path):
    """By their seeds, wherever they run: what a request accepts is its kind's, and kinds are told apart by chances."""
    held = {"source": "x", "chances": [0.6], "sureness": 1, "share": 0.5, "tail": 100, "scale": 1, "measured": {}}
    alike, unlike = tmp_path / "alike.json", tmp_path / "unlike.json"
    alike.write_text(json.dumps(held))
    unlike.write_text(json.dumps({**held, "spread": 1.5}))
    kinds = read_profile(str(unlike)).kinds
    chances = [kind.chances[0] for kind in kinds]
    assert chances == sorted(chances)
    assert (len(kinds), sum(chances) / 16) == (16, pytest.approx(0.6, abs=0.06))
    assert read_profile(str(alike)).kinds == (read_profile(str(alike)),)
    params = [sampled(seed, 100, whole=True, temperature=1.0) for seed in range(12)]
    means = []
    for profile, options in ((alike, {}), (unlike, {}), (unlike, {"max_running_requests": 3, "graphs": "sim"})):
        outputs = build(strong_pair, (1, 5, 6), simulate_acceptance=str(profile), **options).generate(
            strong_pair.prompts([5] * 12), params
        )
        lengths = [output.metrics.accept_lens[:-1] for output in outputs]
        means.append(torch.tensor([sum(each) / len(each) for each in lengths]))
    assert means[1].std() > 3 * means[0].std()
    assert torch.equal(means[1], means[2])


@pytest.mark.slow
def test_a_calibration_learns_the_scale_of_a_profile(strong_pair):
    """So a tree that raw ranking spoils accepts more than the chain of as many nodes."""
    llm = build(strong_pair, (3, 5, 6), simulate_acceptance=KIMI, speculative_calibration="learn")
    prompts = strong_pair.prompts([5, 9] * 4)
    llm.generate(prompts, greedy(200, whole=True))
    inv_temp = float(llm.engine.runner.state.calibration.inv_temp[0, 0])
    assert inv_temp == pytest.approx(1 / read_profile(KIMI).scale, rel=0.25)
    outputs = llm.generate(prompts, greedy(200, whole=True))
    lengths = [n for output in outputs for n in output.metrics.accept_lens[:-1]]
    assert 1 + sum(lengths) / len(lengths) > expected_length(read_profile(KIMI), 5)


@pytest.mark.parametrize("graphs", ["off", "sim"])
def test_a_fractional_accept_length_is_met_in_the_mean(strong_pair, graphs):
    llm = build(strong_pair, (4, 2, 6), simulate_accept_length=2.75, graphs=graphs)
    outputs = llm.generate(strong_pair.prompts([5, 9] * 4), greedy(160))
    lengths = [n for output in outputs for n in output.metrics.accept_lens[:-1]]
    assert set(lengths) == {1, 2}
    assert 1 + sum(lengths) / len(lengths) == pytest.approx(2.75, abs=0.05)


def test_profiles_that_are_none_are_refused(tmp_path, strong_pair):
    good = {"source": "x", "chances": [0.8], "sureness": 1, "share": 0.5, "tail": 100, "scale": 1, "measured": {}}
    file = tmp_path / "own.json"
    file.write_text(json.dumps(good))
    assert read_profile(str(file)).chances == (0.8,)
    assert {"nestling", "kimi-k2", "glm-mtp"} <= set(profile_names())
    for change in ({"chances": []}, {"chances": [0.2]}, {"scale": 0}, {"share": 1}, {"tail": "x"}, {"measured": 3}):
        file.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=r"--simulate-acceptance .*own\.json: no profile"):
            read_profile(str(file))
    for name, match in (("builtin:x", "known are builtin:glm-mtp"), (str(tmp_path / "none"), "no such file")):
        with pytest.raises(ConfigError, match=match):
            build(strong_pair, (2, 2, 4), simulate_acceptance=name)
    with pytest.raises(ConfigError, match="--speculative-eagle-topk 17: --simulate-acceptance draws 16"):
        plan_engine(EngineConfig.of(None, simulate_acceptance=KIMI, speculative_eagle_topk=17))
    for options, match in (
        ({"simulate_accept_length": 2}, "no --simulate-accept-length"),
        ({"draft": None}, "simulates a draft"),
        ({"draft": None, "speculative_algorithm": "NGRAM"}, "lookup in text"),
        ({"speculative_calibration": "learn", "speculative_calibration_dir": "x"}, "drop it to simulate"),
    ):
        with pytest.raises(ConfigError, match=match):
            EngineConfig(**{"draft": "x", "simulate_acceptance": KIMI, **options})
