"""Random MTP layers under the names of each layout."""

from support.head_layouts import WIDTH, biases, layer_shapes, random_tensors

NAMES = {  # prefix, names, hidden state first, state after the norm
    "GLM": ("model.layers.4", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), False, False),
    "MiMo": (
        "model.mtp_layers.0",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        True,
        True,
    ),
}


def mtp_tensors(family) -> dict:
    prefix, (embedding, hidden, projection, norm), _, _ = NAMES[family]
    shapes = {
        f"{prefix}.{embedding}.weight": (WIDTH,),
        f"{prefix}.{hidden}.weight": (WIDTH,),
        f"{prefix}.{norm}.weight": (WIDTH,),
        f"{prefix}.{projection}.weight": (WIDTH, 2 * WIDTH),
        f"{prefix}.input_layernorm.weight": (WIDTH,),
        **layer_shapes(prefix, WIDTH, inner=48),
        **(biases(prefix) if family == "MiMo" else {}),
    }
    return random_tensors(shapes, seed=3)
