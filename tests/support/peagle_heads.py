"""P-EAGLE heads in their layouts, with random weights."""

from dataclasses import dataclass, field

import torch

from support.head_layouts import VOCAB, WIDTH, head_config, layer_shapes, random_tensors, save_head

MASK = 7
IDS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


def shapes_of(layers: tuple[str, ...], vocab: int = VOCAB, mask: tuple[int, ...] = (1, 1, 3 * WIDTH)) -> dict:
    first, *deeper = layers
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "mask_hidden": mask,
        f"{first}.hidden_norm.weight": (WIDTH,),
        f"{first}.input_layernorm.weight": (WIDTH,),
        **layer_shapes(first, 2 * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (vocab, WIDTH),
    }
    for each in deeper:
        shapes |= {f"{each}.input_layernorm.weight": (WIDTH,), **layer_shapes(each, WIDTH)}
    return shapes


def speculators(**changes) -> dict:
    body = head_config(num_hidden_layers=2)
    del body["draft_vocab_size"]
    said = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}
    of_all = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "draft_vocab_size": VOCAB, "norm_before_residual": False}
    return {"transformer_layer_config": body, **said, **of_all, **changes}


@dataclass(frozen=True)
class Layout:
    """config; the prefixes of its layers; what else its file has; the draft's tokens, None for the target's."""

    config: dict
    layers: tuple[str, ...] = ("layers.0", "layers.1")
    more: dict = field(default_factory=dict)
    mask: tuple[int, ...] = (1, 1, 3 * WIDTH)
    before_residual: bool = False
    vocab: int = VOCAB


OWN_EMBEDDING = {"embed_tokens.weight": (VOCAB, WIDTH)}
LAYOUTS = {
    "amazon": Layout(head_config(num_hidden_layers=2, ptd_token_id=MASK, **IDS), more=OWN_EMBEDDING),
    "amazon, midlayer and three more": Layout(
        head_config(num_hidden_layers=4, pard_token=MASK, norm_before_residual=True, **IDS),
        ("midlayer", "layers.1", "layers.2", "layers.3"),
        mask=(1, 3 * WIDTH),
        before_residual=True,
    ),
    "amazon, norms of heads": Layout(
        head_config(num_hidden_layers=2, mask_token_id=MASK, **IDS),
        more={f"layers.{i}.self_attn.{q}_norm.weight": (16,) for i in range(2) for q in "qk"},
    ),
    "speculators": Layout(speculators(), more=OWN_EMBEDDING),
    "speculators, norms before and after, own vocabulary": Layout(
        speculators(norm_before_residual=True, norm_output=True, draft_vocab_size=70),
        more=OWN_EMBEDDING,
        before_residual=True,
        vocab=70,
    ),
}


def saved(tmp_path, layout: Layout):
    tensors = random_tensors({**shapes_of(layout.layers, layout.vocab, layout.mask), **layout.more})
    tensors["mask_hidden"] = 3 * torch.randn(layout.mask, generator=torch.Generator().manual_seed(9))
    if layout.vocab != VOCAB:
        used = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: layout.vocab].sort().values
        marks = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, used, True)
        tensors |= {"d2t": used - torch.arange(layout.vocab), "t2d": marks}
    return save_head(tmp_path / "head", layout.config, tensors), tensors
