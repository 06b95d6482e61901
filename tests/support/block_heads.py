"""Block heads of every published layout with random weights, and what each must draft."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from support.block_oracle import Block, Markov
from support.head_layouts import VOCAB, WIDTH, head_config, layer_shapes, random_tensors

BLOCK, MASK, EPS, RANK = 6, 7, 1e-5, 12
GATES = {"vanilla": None, "gated": ("gate_proj", RANK, WIDTH + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + WIDTH)}


def block_shapes(layers: int, count: int = 3, prefix: str = "") -> dict:
    """Tensors of DFlash, by the names that all layouts give them. count: states of the target that are read."""
    shapes = {"fc.weight": (WIDTH, count * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for index in range(layers):
        name = f"layers.{index}"
        shapes |= {
            f"{name}.input_layernorm.weight": (WIDTH,),
            f"{name}.self_attn.q_norm.weight": (16,),
            f"{name}.self_attn.k_norm.weight": (16,),
            **layer_shapes(name, WIDTH),
        }
    return {prefix + name: shape for name, shape in shapes.items()}


def markov_shapes(kind: str, draft_vocab: int = VOCAB, prefix: str = "markov_head") -> dict:
    shapes = {f"{prefix}.markov_w1.weight": (VOCAB, RANK), f"{prefix}.markov_w2.weight": (draft_vocab, RANK)}
    if GATES[kind] is not None:
        name, out, width = GATES[kind]
        shapes |= {f"{prefix}.{name}.weight": (out, width), f"{prefix}.{name}.bias": (out,)}
    return shapes


def own_config(layers: int = 2, **changes) -> dict:
    """z-lab's, without `dflash_config`."""
    config = head_config(
        architectures=["DFlashDraftModel"],
        num_hidden_layers=layers,
        block_size=BLOCK,
        rms_norm_eps=EPS,
        hidden_act="silu",
        rope_theta=10000.0,
        **changes,
    )
    del config["draft_vocab_size"]
    return config


def random_block(shapes: dict, seed: int = 0) -> dict:
    """Tables as large as what they are added to."""
    made = random_tensors(shapes, seed)
    return {name: 3 * x if "markov_w" in name else x for name, x in made.items()}


@dataclass
class DenseBlock:
    """What `proposals_of` asks for: logits after a path, by the oracle.

    first: the slot that proposes after the root. causal, window: of each layer. markov: of the edges, if there are any.
    """

    folder: Path
    embedding: torch.Tensor
    lm_head: torch.Tensor
    offset: torch.Tensor
    first: int
    causal: tuple[bool, ...]
    window: tuple[int | None, ...]
    rule: str = "query"
    markov: str | None = None
    width: int = BLOCK
    prefix: str = ""
    kept: tuple = ((), None)

    def __post_init__(self) -> None:
        tensors = load_file(self.folder / "model.safetensors")
        self.w = {name.removeprefix(self.prefix): x for name, x in tensors.items()}
        layers = len(self.causal)
        self.block = Block(self.w, (layers, 4, 2, 16), EPS, 10000.0, self.causal, self.window, self.rule)
        head = next(
            (f"{name}." for name in ("markov_head", "logit_head") if f"{name}.markov_w1.weight" in self.w), None
        )
        self.edges = None if head is None else Markov(self.w, self.markov, head)

    def logits(self, features, tokens, path=()):
        """features: [n, width], of the tokens before the root, which is the last of `tokens`."""
        hidden = self._hidden(features, tokens)
        logits = hidden[self.first + len(path)] @ self.lm_head.double().T
        if self.edges is None:
            return logits
        state = self.edges.begin()
        for depth, token in enumerate([tokens[-1], *path]):
            bias, state = self.edges.step(token, hidden[self.first + depth], state)
        return logits + bias

    def _hidden(self, features, tokens):
        """Of the block's slots, [width, hidden]: the same for every path below a root."""
        if self.kept[0] != tuple(tokens):
            n = len(features)
            ids, positions = torch.tensor([tokens[-1]] + [MASK] * (self.width - 1)), torch.arange(n)
            context = self.block.context(features, positions)
            self.kept = tuple(tokens), self.block.hidden(self.embedding.double()[ids], n, context, positions)
        return self.kept[1]
