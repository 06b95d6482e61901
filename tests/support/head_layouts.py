"""Draft heads of every published layout with random weights, and what each must draft."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.dense_drafts import proposals_of
from support.engines import build, greedy, tokens
from support.oracles import grow, select
from support.tiny_models import Pair

SHAPE = (3, 3, 9)

WIDTH, VOCAB, LAYERS = 64, 211, 4


def assert_drafts(pair: Pair, dense_target, reference, which, **options) -> None:
    """The first round's tree is the reference's; greedy output is plain output, prefix cache on, in small chunks."""
    k, steps, size = SHAPE
    llm = build(pair, SHAPE, page_size=4, chunked_prefill_size=4, **options)
    trees = []
    llm.engine.observer = lambda plan, tree, accepted: trees.append(tree)
    prompts = pair.prompts([9, 3, 14], seed=1)
    outputs = llm.generate(prompts[:1], greedy(14))
    ids = [*prompts[0], outputs[0].token_ids[0]]
    root, born, _ = grow(ids[-1], k, steps, proposals_of(reference, dense_target, which, ids, k))
    nodes = select(root, born, size)
    assert trees[0].tokens[0].tolist() == [node.token for node in nodes]
    assert trees[0].parent[0, 1:].tolist() == [nodes.index(node.parent) for node in nodes[1:]]
    want = torch.tensor([node.score for node in nodes])
    torch.testing.assert_close(trees[0].logprob[0], want, rtol=1e-5, atol=1e-5)
    outputs += llm.generate(prompts[1:], greedy(14))
    assert tokens(outputs) == tokens(build(pair, None).generate(prompts, greedy(14)))


def random_tensors(shapes: dict, seed=0) -> dict:
    """Norms near one, biases and matrices that matter."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        made[name] = 1 + 0.3 * x if "norm" in name else 0.3 * x if name.endswith("bias") else x * shape[-1] ** -0.5
    return made


def layer_shapes(prefix: str, width: int, hidden=WIDTH, heads=4, kv=2, dim=16, inner=40) -> dict:
    """A decoder layer without its input norms. width: of its input."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (heads * dim, width),
        f"{prefix}.self_attn.k_proj.weight": (kv * dim, width),
        f"{prefix}.self_attn.v_proj.weight": (kv * dim, width),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * dim),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def head_config(**changes) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "draft_vocab_size": VOCAB,
        **changes,
    }


def save_head(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def biases(prefix: str, hidden=WIDTH) -> dict:
    return {f"{prefix}.self_attn.{each}_proj.bias": (n,) for each, n in (("q", 64), ("k", 32), ("v", 32))}


EAGLE = {
    "fc.weight": (WIDTH, 2 * WIDTH),
    **layer_shapes("layers.0", WIDTH),
}
