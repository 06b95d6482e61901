"""Writes `speculators/`: tiny EAGLE-3 heads, saved by the `speculators` library, and what the library computes of them.

Run it in an environment with speculators 0.9.0: `python tests/checkpoints/write_speculators.py`. The tests need only
what it wrote. `NAME.expected.safetensors` holds features of n tokens, the tokens after each, and logits of every
position: `first` of the head on the features, `second` of the head on its own states, one token on.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

HERE = Path(__file__).parent / "speculators"
SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HEADS = {
    "llama": (
        LlamaConfig(num_hidden_layers=1, rope_parameters=LLAMA3, **SIZES),
        {"draft_vocab_size": 24, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
    ),
    "qwen3-deep": (
        Qwen3Config(num_hidden_layers=2, attention_bias=True, **SIZES),
        {"draft_vocab_size": 48, "fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3]},
    ),
    "llama-joined": (
        LlamaConfig(num_hidden_layers=2, mlp_bias=True, **SIZES),
        {"draft_vocab_size": 24, "norm_before_fc": True, "norm_before_residual": False},
    ),
}


def write(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    layers, options = HEADS[name]
    layers._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=5)
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    of = SpeculatorsConfig(
        algorithm="eagle3", default_proposal_method="greedy", proposal_methods=[proposal], verifier=verifier
    )
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(transformer_layer_config=layers, speculators_config=of, **options))
    with torch.no_grad():
        for tensor, weight in model.named_parameters():
            if "norm" in tensor:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.3 if tensor.endswith("bias") else weight.shape[-1] ** -0.5)
    if options["draft_vocab_size"] < layers.vocab_size:
        chosen = torch.randperm(layers.vocab_size)[: options["draft_vocab_size"]].sort().values
        model.d2t.copy_(chosen - torch.arange(len(chosen)))
        model.t2d.zero_()[chosen] = True
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "config.py").unlink()  # the library's source, which it saves beside the weights

    n, seen = 7, []
    features = torch.randn(1, n, model.fc.in_features)
    tokens = torch.randint(0, layers.vocab_size, (1, n))
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out[0].detach().clone()))
    with torch.no_grad():
        model(features, tokens, document_ids=torch.zeros(1, n, dtype=torch.long), ttt_steps=2)
    told = {"features": features[0], "tokens": tokens[0], "first": seen[0], "second": seen[1]}
    save_file(told, HERE / f"{name}.expected.safetensors")


if __name__ == "__main__":
    for number, each in enumerate(HEADS):
        write(each, number)
