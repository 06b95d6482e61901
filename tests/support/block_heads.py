"""Block heads of every published layout with random weights, and what each must draft."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from support.block_oracle import Block, Domino, Markov, selector_candidates, selector_score
from support.head_layouts import VOCAB, WIDTH, head_config, layer_shapes, random_tensors, save_head

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


TOP, GRU, EMB = 24, 20, 10


def dflash2_shapes(layers: int = 2) -> dict:
    at = "candidate_selector"
    shapes = {f"{at}.predecessor_codebook": (VOCAB, RANK), f"{at}.successor_codebook": (VOCAB, RANK)}
    shapes[f"{at}.hidden_projection.weight"] = (RANK, WIDTH)
    for name in (f"layers.{i}.{half}_conv" for i in range(layers) for half in ("attention", "mlp")):
        shapes |= {f"{name}.base_kernel": (2, 2, WIDTH), f"{name}.kernel_projection.weight": (4 * WIDTH // 16, WIDTH)}
    return shapes


def domino_shapes() -> dict:
    return {
        "prefix_gru.weight_ih_l0": (3 * GRU, WIDTH),
        "prefix_gru.weight_hh_l0": (3 * GRU, GRU),
        "embed_proj.0.weight": (EMB, WIDTH + GRU),
        "embed_proj.2.weight": (VOCAB, EMB),
    }


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
    large = ("markov_w", "_codebook", "embed_proj.2")
    return {name: 3 * x if any(each in name for each in large) else x for name, x in made.items()}


IDS = [0, 1, 2]
FULL, SLIDES = "full_attention", "sliding_attention"
PLAIN = ((False, False), (None, None))


def zlab(**dflash) -> dict:
    return own_config(dflash_config={"target_layer_ids": IDS, "mask_token_id": MASK, **dflash})


def deepspec(kind: str | None, **changes) -> dict:
    markov = {"markov_rank": 0} if kind is None else {"markov_rank": 12, "markov_head_type": kind}
    said = {"target_layer_ids": IDS, "mask_token_id": MASK, **markov, **changes}
    return own_config() | said | {"architectures": ["Qwen3DSparkModel"]}


def speculators(kind: str, layers: dict | None = None, **changes) -> dict:
    body = own_config() | (layers or {})
    moved = {key: body.pop(key) for key in ("block_size", "architectures")}
    said = {"aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": MASK, "speculators_model_type": kind, **changes}
    return moved | said | {"transformer_layer_config": body}


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": TOP}
DOMINO = {"projector_type": "domino", "emb_dim": EMB, "gru_hidden_dim": GRU}
WINDOWED = {"layer_types": [SLIDES, FULL], "sliding_window": 4}
# layout: config, tensors beside the block's, algorithm, the slot that proposes first, (causal, window), more
LAYOUTS = {
    "z-lab": (zlab(), {}, "DFLASH", 1, PLAIN, {}),
    "z-lab, windows": (zlab() | WINDOWED, {}, "DFLASH", 1, ((True, False), (4, None)), {}),
    "z-lab, windows everywhere": (
        zlab(use_swa=True, swa_window_size=7), {}, "DFLASH", 1, ((False, False), (7, 7)), {}
    ),
    "z-lab, causal": (zlab(causal=True), {}, "DFLASH", 1, ((True, True), (None, None)), {}),
    "JetSpec": (zlab(causal_head=True), {}, "DFLASH", 1, ((True, True), (None, None)), {}),
    "DeepSpec, DFlash": (deepspec(None), {}, "DFLASH", 0, PLAIN, {}),
    "DeepSpec, vanilla": (deepspec("vanilla"), markov_shapes("vanilla"), "DSPARK", 0, PLAIN, {"markov": "vanilla"}),
    "DeepSpec, gated": (deepspec("gated"), markov_shapes("gated"), "DSPARK", 0, PLAIN, {"markov": "gated"}),
    "DeepSpec, rnn": (deepspec("rnn"), markov_shapes("rnn"), "DSPARK", 0, PLAIN, {"markov": "rnn"}),
    "SpecForge, DSpark by its old name": (
        zlab(projector_type="dspark", markov_rank=12), markov_shapes("vanilla", prefix="logit_head"), "DSPARK", 0,
        PLAIN, {"markov": "vanilla"},
    ),
    "z-lab, DFlash 2": (
        zlab(**DFLASH2) | WINDOWED | {"sliding_window": 7, "architectures": ["DFlash2DraftModel"]}, dflash2_shapes(),
        "DFLASH2", 1, ((False, False), (7, None)), {"taps": 2},
    ),
    "speculators, DFlash 2": (
        speculators("dflash2", WINDOWED, **DFLASH2), dflash2_shapes(), "DFLASH2", 1, ((False, False), (4, None)),
        {"rule": "anchor", "taps": 2},
    ),
    "Domino": (zlab(**DOMINO), domino_shapes(), "DOMINO", 1, PLAIN, {"domino": 1}),
    "Domino, shifted": (
        zlab(**DOMINO, shift_label=True, pure_draft_prefix_len=2), domino_shapes(), "DOMINO", 0, PLAIN, {"domino": 2}
    ),
    "speculators": (speculators("dflash"), {}, "DFLASH", 1, PLAIN, {"rule": "anchor"}),
    "speculators, windows": (
        speculators("dflash", WINDOWED), {}, "DFLASH", 1, ((True, False), (4, None)), {"rule": "anchor"}
    ),
    "speculators, windows that see the block": (
        speculators("dflash", WINDOWED, sliding_window_non_causal=True), {}, "DFLASH", 1, ((False, False), (4, None)),
        {"rule": "anchor"},
    ),
    "speculators, DSpark": (
        speculators("dspark", markov_rank=12), markov_shapes("vanilla"), "DSPARK", 0, PLAIN,
        {"rule": "anchor", "markov": "vanilla"},
    ),
    "speculators, DSpark in place": (
        speculators("dspark", markov_rank=12, markov_head_type="gated", sample_from_anchor=False),
        markov_shapes("gated"), "DSPARK", 1, PLAIN, {"rule": "anchor", "markov": "gated"},
    ),
}  # fmt: skip


def saved(tmp_path, name: str):
    config, more, *_ = LAYOUTS[name]
    return save_head(tmp_path / "head", config, random_block({**block_shapes(2), **more}))


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
    domino: int | None = None
    taps: int = 0
    width: int = BLOCK
    prefix: str = ""
    kept: tuple = ((), None)

    def __post_init__(self) -> None:
        tensors = load_file(self.folder / "model.safetensors")
        self.w = {name.removeprefix(self.prefix): x for name, x in tensors.items()}
        layers = len(self.causal)
        self.block = Block(self.w, (layers, 4, 2, 16), EPS, 10000.0, self.causal, self.window, self.rule, self.taps)
        head = next(
            (f"{name}." for name in ("markov_head", "logit_head") if f"{name}.markov_w1.weight" in self.w), None
        )
        self.edges = None if head is None else Markov(self.w, self.markov, head)

    def logits(self, features, tokens, path=()):
        """features: [n, width], of the tokens before the root, which is the last of `tokens`."""
        hidden = self._hidden(features, tokens)
        logits = hidden[self.first + len(path)] @ self.lm_head.double().T
        if self.taps:
            return self.selected(hidden[self.first + len(path)], logits, [tokens[-1], *path][-1])
        if self.domino is not None:
            if len(path) < self.domino:
                return logits
            gru = Domino(self.w, WIDTH, GRU)
            state = gru.begin()
            for token in [tokens[-1], *path]:
                state = gru.feed(self.embedding.double()[token], state)
            return logits + gru.bias(hidden[self.first + len(path)], state)
        if self.edges is None:
            return logits
        state = self.edges.begin()
        for depth, token in enumerate([tokens[-1], *path]):
            bias, state = self.edges.step(token, hidden[self.first + depth], state)
        return logits + bias

    def selected(self, hidden, logits, previous):
        """Log-probabilities: none of others than the candidates, which share what the logits give them together."""
        candidates = selector_candidates(logits, TOP)
        scores = selector_score(self.w, logits, hidden, previous, candidates)
        share = torch.logsumexp(logits[candidates], 0) - torch.logsumexp(logits, 0)
        found = torch.full_like(logits, -torch.inf)
        found[candidates] = torch.log_softmax(scores, 0) + share
        return found

    def _hidden(self, features, tokens):
        """Of the block's slots, [width, hidden]: the same for every path below a root."""
        if self.kept[0] != tuple(tokens):
            n = len(features)
            ids, positions = torch.tensor([tokens[-1]] + [MASK] * (self.width - 1)), torch.arange(n)
            context = self.block.context(features, positions)
            self.kept = tuple(tokens), self.block.hidden(self.embedding.double()[ids], n, context, positions)
        return self.kept[1]
