"""Parameters declared once: what is loaded, what a rank would have of it, and what loading keeps in memory."""

import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.refusing import refused
from support.tiny_models import save_random_head, save_random_llama, save_random_qwen3
from treetop.checkpoints import checkpoint
from treetop.checkpoints.loader import LoadContext, load_weights, random_weights, weight_bytes
from treetop.checkpoints.params import Param, cut, of_vocab, stored_tensors
from treetop.drafts.registry import drafter_spec
from treetop.models.embedding import part_of
from treetop.models.registry import target_spec
from treetop.parallel.exchange import ExchangeRank
from treetop.types.errors import ConfigError
from treetop.weights.format import MAIN, CheckpointTensor
from treetop.weights.plain import Plain

PLACE = LoadContext(torch.float64, torch.device("cpu"), 1)
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48, "vocab_size": 208}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Specs of models with biases, with norms of heads, and of a head."""
    folder = tmp_path_factory.mktemp("params")
    llama = save_random_llama(folder / "llama", attention_bias=True, mlp_bias=True, **SIZES)
    qwen3 = save_random_qwen3(folder / "qwen3", **{**SIZES, "tie_word_embeddings": True})
    head = save_random_head(folder / "head", llama, draft_vocab=104)
    targets = {"llama": target_spec(llama), "qwen3": target_spec(qwen3)}
    return {**targets, "head": drafter_spec(head, targets["llama"].config)}


def ignored(spec):
    return spec.family.unused(spec.config) if hasattr(spec, "family") else ()


@pytest.mark.parametrize("name", ["llama", "qwen3", "head"])
def test_a_parameter_is_its_stored_tensors_one_below_the_other(checkpoints, name):
    """q, k and v, gate and up, and the norms of heads are fused; the file's tensors are all used, each once."""
    spec = checkpoints[name]
    stored = load_file(spec.folder / "model.safetensors")
    weights = load_weights(spec.folder, spec.params, PLACE, ignored(spec))
    for param in spec.params:
        parts = [stored.pop(source.name).to(weights[param.name].dtype) for source in param.sources]
        assert torch.equal(weights[param.name].flatten(), torch.cat([part.flatten() for part in parts]))
        assert weights[param.name].shape == param.shape
    assert not stored


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3", "head"])
def test_the_shards_of_the_ranks_join_to_the_whole(checkpoints, name, size):
    """Each loaded by its own declaration. With more ranks than KV heads, neighbours share one."""
    spec = checkpoints[name]
    whole = load_weights(spec.folder, spec.params, PLACE, ignored(spec))
    cuts = [[cut(param, rank, size) for param in spec.params] for rank in range(size)]
    shards = [
        load_weights(spec.folder, [p for p in each if p is not None], PLACE, stored_tensors(spec.params))
        for each in cuts
    ]
    for index, param in enumerate(spec.params):
        pieces = [shard[param.name] for shard in shards if param.name in shard]
        if param.shard in ("whole", "first"):
            assert len(pieces) == (size if param.shard == "whole" else 1)
            assert all(torch.equal(piece, whole[param.name]) for piece in pieces)
            continue
        by_source = [[] for _ in param.sources]
        for rank, piece in enumerate(pieces):
            spans = [source.span for source in cuts[rank][index].sources]
            lengths = [span.stop - span.start for span in spans]
            split = piece.split(lengths) if param.shard == 0 else [piece] * len(spans)
            for rows, span, part in zip(by_source, spans, split, strict=True):
                if not rows or rows[-1][0] != span:
                    rows.append((span, part))
        joined = torch.cat([torch.cat([part for _, part in rows], param.shard) for rows in by_source])
        assert torch.equal(joined, whole[param.name]), param.name
        assert sum(map(torch.numel, pieces)) < 2 * param.numbers


def test_a_rank_has_whole_heads_and_the_kv_heads_that_they_need(checkpoints):
    """8 ranks, 8 query heads and 4 KV heads: rank 5 has query head 5 and KV head 2."""
    qkv = next(param for param in checkpoints["llama"].params if param.name == "layers.0.attention.qkv")
    spans = [(source.span.start, source.span.stop) for source in cut(qkv, 5, 8).sources]
    assert spans == [(5 * 8, 6 * 8), (2 * 8, 3 * 8), (2 * 8, 3 * 8)]


@pytest.mark.parametrize(("name", "size"), [("layers.0.attention.qkv", 3), ("layers.1.mlp.down", 5)])
def test_ranks_that_cannot_divide_a_parameter_are_refused(checkpoints, name, size):
    param = next(param for param in checkpoints["llama"].params if param.name == name)
    refused(ConfigError, lambda: cut(param, 0, size), f"--tp-size {size}", param.sources[0].name)


def test_a_vocabulary_that_ranks_cannot_divide_ends_in_padding(tmp_path):
    """Nine rows for four: three each, and the last rank has none. As loaded, and as a whole table is cut."""
    table = torch.randn(9, 5, dtype=torch.float64)
    save_file({"head": table}, tmp_path / "model.safetensors")
    param = of_vocab("head", "head", 9, 5)
    for rank, rows in enumerate([3, 3, 3, 0]):
        place = replace(PLACE, parallel=ExchangeRank(rank, 4, PLACE.device, None, None))
        part = load_weights(tmp_path, [param], place)["head"]
        assert torch.equal(part[:rows], table[3 * rank :][:rows])
        assert part.shape == (3, 5)
        assert not part[rows:].any()
        assert torch.equal(part_of(table, place.parallel), part)


def test_a_format_says_where_a_parameter_may_be_cut(checkpoints):
    """Blocks of 32 columns, as MXFP4 has: 64 columns divide by 2, not by 4."""

    class Blocks(Plain):
        def unit(self, axis):
            return 32 if axis == 1 else 1

    param = Param("down", (4, 64), (CheckpointTensor("down", (4, 64)),), shard=1, stored=Blocks(("F32",)))
    assert cut(param, 1, 2).shape == (4, 32)
    refused(ConfigError, lambda: cut(param, 0, 4), "--tp-size 4", "32")


def test_a_transform_makes_the_rows_of_what_is_stored(tmp_path):
    """Gate and up stored interleaved and transposed, as GPT-OSS has them; a shard takes its part of the result."""
    stored = torch.randn(5, 12, dtype=torch.float64)
    save_file({"both": stored}, tmp_path / "model.safetensors")
    sources = tuple(
        CheckpointTensor("both", (5, 12), lambda tensor, at=at: tensor.T[at::2].contiguous()) for at in (0, 1)
    )
    param = Param("gate_up", (12, 5), tuple(replace(source, rows=6) for source in sources), shard=0)
    whole = load_weights(tmp_path, [param], PLACE)["gate_up"]
    assert torch.equal(whole, torch.cat([stored.T[0::2], stored.T[1::2]]))
    shard = load_weights(tmp_path, [cut(param, 1, 3)], PLACE)["gate_up"]
    assert torch.equal(shard, torch.cat([stored.T[4:8:2], stored.T[5:9:2]]))


def test_loading_keeps_one_stored_tensor_at_a_time(checkpoints, monkeypatch):
    """Fused weights are filled part by part: nothing read is alive when the next is read."""
    read, finite = [], checkpoint._finite

    def watched(tensor, name, path):
        assert not any(reference() is not None for reference in read), name
        read.append(weakref.ref(tensor))
        return finite(tensor, name, path)

    monkeypatch.setattr(checkpoint, "_finite", watched)
    spec = checkpoints["llama"]
    load_weights(spec.folder, spec.params, PLACE)
    assert len(read) == len(stored_tensors(spec.params))


def test_the_memory_count_is_what_loading_takes(checkpoints):
    for name in ("llama", "qwen3", "head"):
        spec = checkpoints[name]
        for dtype in (torch.float64, torch.bfloat16):
            place = replace(PLACE, dtype=dtype)
            weights = load_weights(spec.folder, spec.params, place, ignored(spec))
            assert sum(weight.nbytes for weight in weights.held.values()) == weight_bytes(spec.params, dtype)
            dummies = random_weights(spec.params, place)
            parts = [{n: w.parts[MAIN] for n, w in each.held.items()} for each in (dummies, weights)]
            dummy, real = ({n: (part.shape, part.dtype) for n, part in each.items()} for each in parts)
            assert dummy == real
