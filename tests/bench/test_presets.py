"""The shapes of `benchmarks/presets/`, made small in all that only size is, run as `benchmarks/rounds.py` runs them."""

import json
from pathlib import Path

import pytest

from support.engines import greedy, tokens
from support.grids import few_of
from treetop import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADS = sorted(
    each.name for kind in ("eagle3", "dflash", "dspark") for each in (BENCHMARKS / "presets").glob(f"{kind}-*")
)
SMALL = {
    **{"vocab_size": 512, "draft_vocab_size": 256, "hidden_size": 64, "target_hidden_size": 64, "num_hidden_layers": 6},
    **{"intermediate_size": 96, "moe_intermediate_size": 64, "max_position_embeddings": 4096},
    **{"num_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "moe_layer_end_index": 5},
    **{"top_k_experts": 4, "num_experts_per_tok": 4, "moe_k": 4},
}


def made_small(folder: Path, where: Path, layers: int) -> Path:
    """The folder's config with small sizes where it has such keys; heads, windows and rotations are as they are."""
    config = json.loads((folder / "config.json").read_text())
    small = {key: value for key, value in SMALL.items() if config.get(key) is not None}
    small["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if "eagle_config" in config or "eagle_aux_hidden_state_layer_ids" in config:
        config["eagle_config"] = {}
    block = {"target_layer_ids": [1, 2, 4], "mask_token_id": 3}
    if "dflash_config" in config:
        config["dflash_config"] = block
    elif "target_layer_ids" in config:
        config |= block
    if isinstance(config.get("layer_types"), list):
        small["layer_types"] = config["layer_types"][: small["num_hidden_layers"]]
    where.mkdir()
    (where / "config.json").write_text(json.dumps({**config, **small}))
    return where


@pytest.mark.parametrize("name", few_of(HEADS, 1))
def test_a_preset_runs_plain_as_a_chain_and_as_a_tree(name, tmp_path):
    """Random weights: greedy tokens are the same in each shape that the table has."""
    target = made_small(BENCHMARKS / "presets" / name.partition("-")[2], tmp_path / "target", 6)
    head = made_small(BENCHMARKS / "presets" / name, tmp_path / "head", 1)
    options = {"load_format": "dummy", "dtype": "float64", "device": "cpu", "context_length": 96, "tokenizer": None}
    options = {key: value for key, value in options.items() if value is not None}
    found = []
    for topk, steps, nodes in ((1, 3, 4), (4, 5, 16), (1, 0, 1)):
        shape = {"speculative_eagle_topk": topk, "speculative_num_steps": steps, "speculative_num_draft_tokens": nodes}
        drafted = {"draft": str(head), **shape} if steps else {"draft": None}
        llm = LLM(model=str(target), max_running_requests=2, **drafted, **options)
        found.append(tokens(llm.generate([[5, 6, 7], [9] * 40], greedy(8))))
    assert found[0] == found[1] == found[2]
