"""Compressed attention in an engine: what a token takes, what a folder's report says, and what is refused."""

import pytest
from safetensors.torch import load_file

from support.engines import build
from support.families import FAMILIES
from treetop.tools.inspect import inspect
from treetop.types.config import EngineConfig
from treetop.types.ids import DRAFT, FULL
from treetop.types.kv import compressed, paired
from treetop_debug.ranks import ranks_on_threads


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return FAMILIES["deepseek v3"].save(tmp_path_factory.mktemp("latents"), seed=5).pair


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_takes_one_plane_on_every_rank(pair, ranks):
    """The latent and the key that turns, whatever the number of heads; the head's K/V are pairs, which ranks divide."""
    with ranks_on_threads():
        llm = build(pair, (2, 3, 6), context_length=64, page_size=4, tp_size=ranks)
        layout, pools = llm.engine.layout, llm.engine.runner.pools
        assert layout.group(FULL).kv == compressed(20, 6)
        assert layout.group(DRAFT).kv == paired(4 // ranks, 6)
        assert pools[FULL].data.shape[2:] == (1, 1, 26)
        llm.close()


def test_a_folders_report_names_the_latent(pair):
    """Two kinds of layers, by their feed-forward; every weight is counted, those that absorb too."""
    report = inspect(EngineConfig(model=str(pair.target), draft=None, context_length=64))
    assert [(kind.count, kind.attention["latent"]["rank"]) for kind in report.target.layers] == [(1, 20), (3, 20)]
    tensors = load_file(pair.target / "model.safetensors")
    assert report.target.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert report.fits
    assert [pool.bytes_per_token for pool in report.memory.pools] == [4 * 26 * 4]
