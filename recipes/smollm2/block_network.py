"""A block head of SmolLM2, DSpark's, as a module whose state dict is the checkpoint in `speculators`' layout, and its loss.

One pass over a token and masks behind it proposes as many tokens as it has slots; a small recurrence over the tokens that
a path chose so far adds to each slot's logits. Sources: DFlash (z-lab/dflash), DSpark (DeepSpec), `speculators` 0.9.0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from network import DraftVocabulary, Features, Norm, Shape, Target, rotated, turns
from torch import Tensor, nn
from torch.nn import functional

TAPS = (2, 9, 15, 22, 28)  # layers of the target whose outputs the head reads
MASK = 16  # <empty_output>, which no conversation has


@dataclass(frozen=True, slots=True)
class BlockShape:
    """body: sizes that are the target's. block: slots, each of which proposes. rank: of the recurrence's state."""

    body: Shape
    layers: int
    block: int
    rank: int

    def config(self) -> dict:
        """The checkpoint's config.json."""
        s = self.body
        return {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "block_size": self.block,
            "mask_token_id": MASK,
            "sample_from_anchor": True,
            "draft_vocab_size": s.draft_vocab,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],  # counted by what enters a layer
            "markov_rank": self.rank,
            "markov_head_type": "rnn",
            "enable_confidence_head": False,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "vocab_size": s.vocab,
                "hidden_size": s.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": s.heads,
                "num_key_value_heads": s.kv_heads,
                "head_dim": s.head_dim,
                "intermediate_size": s.intermediate,
                "hidden_act": "silu",
                "attention_bias": False,
                "max_position_embeddings": s.context,
                "rope_theta": s.rope_theta,
                "rms_norm_eps": s.norm_eps,
                "tie_word_embeddings": False,
            },
            "dtype": "bfloat16",
        }


class Seen(NamedTuple):
    """What slots of blocks attend to. positions: of the slots, turns: cosines and sines, of context and of slots.

    mask: [batch, 1, slots, context + slots] bool.
    """

    turns: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    mask: Tensor


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Queries of slots; keys and values of the context's vectors and of the slots."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head_dim, self.group = s.head_dim, s.heads // s.kv_heads
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.q_proj, self.o_proj = linear(s.hidden, wide), linear(wide, s.hidden)
        self.k_proj, self.v_proj = linear(s.hidden, narrow), linear(s.hidden, narrow)
        self.q_norm, self.k_norm = Norm(s.head_dim, s.norm_eps), Norm(s.head_dim, s.norm_eps)

    def forward(self, x: Tensor, context: Tensor, seen: Seen) -> Tensor:
        """x [batch, slots, hidden], context [batch, n, hidden]."""

        def heads(part: Tensor) -> Tensor:
            return part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q = rotated(self.q_norm(heads(self.q_proj(x))), *seen.turns[1])
        keys = [
            rotated(self.k_norm(heads(self.k_proj(part))), *turn)
            for part, turn in zip((context, x), seen.turns, strict=True)
        ]
        v = torch.cat([heads(self.v_proj(context)), heads(self.v_proj(x))], dim=2)
        k, v = (part.repeat_interleave(self.group, 1) for part in (torch.cat(keys, dim=2).to(v.dtype), v))
        mixed = functional.scaled_dot_product_attention(q.to(v.dtype), k, v, attn_mask=seen.mask)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward part, with norms before them."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.norm_eps)
        self.post_attention_layernorm = Norm(s.hidden, s.norm_eps)
        self.self_attn = Attention(s)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(s.hidden, s.intermediate),
                "up_proj": linear(s.hidden, s.intermediate),
                "down_proj": linear(s.intermediate, s.hidden),
            }
        )

    def forward(self, x: Tensor, context: Tensor, seen: Seen) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, seen)
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Recurrence(nn.Module):
    """DSpark's Markov head of kind `rnn`: what the tokens of a path add to the logits of the slot behind them."""

    def __init__(self, vocab: int, draft_vocab: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), linear(rank, draft_vocab)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens [..., slots] of a path, hidden [..., slots, size] of the slots behind them. [..., slots, draft_vocab]."""
        own, state, made = self.markov_w1(tokens), hidden.new_zeros(*tokens.shape[:-1], self.rank), []
        for slot in range(tokens.shape[-1]):
            gates = self.joint_proj(torch.cat([state, own[..., slot, :], hidden[..., slot, :]], dim=-1)).float()
            keep, new, out = gates.chunk(3, dim=-1)
            state = torch.sigmoid(keep) * state + (1 - torch.sigmoid(keep)) * torch.tanh(new)
            made.append(torch.tanh(out))
        return self.markov_w2(torch.stack(made, dim=-2))


class BlockHead(DraftVocabulary):
    """fc over the taps, layers over blocks, a recurrence over paths, and a vocabulary of its own."""

    def __init__(self, shape: BlockShape, vocab: Tensor) -> None:
        """vocab: [draft_vocab] int64 ids of the target, ascending."""
        super().__init__()
        s, self.shape = shape.body, shape
        self.fc = linear(len(TAPS) * s.hidden, s.hidden)
        self.hidden_norm, self.norm = Norm(s.hidden, s.norm_eps), Norm(s.hidden, s.norm_eps)
        self.layers = nn.ModuleList(Layer(s) for _ in range(shape.layers))
        self.markov_head = Recurrence(s.vocab, s.draft_vocab, s.hidden, shape.rank)
        self.lm_head = linear(s.hidden, s.draft_vocab)
        self.hold(vocab, s.vocab)

    @torch.no_grad()
    def begin_from(self, target: Target) -> None:
        """Start from the target: its output rows and last norm, the last tap as context, its embedding's main directions.

        What the recurrence adds starts at zero.
        """
        for matrix in (p for p in self.parameters() if p.ndim > 1):
            matrix.normal_(std=0.02)
        hidden, table = self.shape.body.hidden, target.model.model.embed_tokens.weight.float()
        self.lm_head.weight.copy_(target.model.lm_head.weight[self.vocab].float())
        self.norm.weight.copy_(target.model.model.norm.weight.float())
        self.fc.weight[:, -hidden:] += torch.eye(hidden, device=table.device)
        directions = torch.linalg.eigh(table.T @ table).eigenvectors[:, -self.shape.rank :]
        seen = table @ directions
        self.markov_head.markov_w1.weight.copy_(seen / seen.std())
        self.markov_head.markov_w2.weight.zero_()

    def forward(self, taps: Tensor, blocks: Tensor, seen: Seen) -> Tensor:
        """taps [batch, n, taps * hidden]; blocks [batch, slots, hidden], embeddings. Returns [batch, slots, hidden]."""
        context, x = self.hidden_norm(self.fc(taps)), blocks.float()
        for layer in self.layers:
            x = layer(x, context, seen)
        return self.norm(x)


def seen_of(document: Tensor, position: Tensor, anchors: Tensor, shape: BlockShape) -> Seen:
    """Blocks that begin at anchors [batch, a]: each sees what is before its anchor in the conversation, and itself."""
    n, block = document.shape[1], shape.block
    here = torch.arange(n, device=document.device)
    before = (document[:, None] == document.gather(1, anchors)[:, :, None]) & (here < anchors[:, :, None])
    owner = torch.arange(anchors.shape[1], device=document.device).repeat_interleave(block)
    own = (owner[:, None] == owner).expand(len(document), -1, -1)
    mask = torch.cat([before.repeat_interleave(block, 1), own], dim=2)[:, None]
    slots = position.gather(1, anchors)[:, :, None] + torch.arange(block, device=document.device)
    body = shape.body
    return Seen(
        (turns(position, body.head_dim, body.rope_theta), turns(slots.flatten(1), body.head_dim, body.rope_theta)), mask
    )


class Blocks(NamedTuple):
    """losses: [block]. hits and counted: [block, batch, anchors] bool, greedy hits, and whether the target wrote them."""

    losses: Tensor
    hits: Tensor
    counted: Tensor


def loss_of_blocks(
    head: BlockHead,
    of: Features,
    mask_row: Tensor,
    ids: Tensor,
    document: Tensor,
    position: Tensor,
    own: Tensor,
    anchors: Tensor,
    prompt_weight: float = 0.0,
) -> Blocks:
    """The loss of each slot of the blocks at anchors [batch, a], which leave room for a block and one token behind it.

    mask_row: [hidden], the mask's embedding. ids, document, position, own: see `Pack`. Slot j is to predict what the
    target predicts behind token anchor + j, and is told the tokens up to that: the cross-entropy with the target's
    distribution over the draft vocabulary, renormalised, weighted by the mass that it had. Labels count 1 where the
    target wrote what is to be predicted, prompt_weight elsewhere, and 0 where it is of another conversation.
    """
    (batch, count), block = anchors.shape, head.shape.block
    first = of.embedding.gather(1, anchors[..., None].expand(-1, -1, of.embedding.shape[-1]))
    masks = mask_row.expand(batch, count, block - 1, -1).to(first.dtype)
    blocks = torch.cat([first[:, :, None], masks], dim=2).flatten(1, 2)
    hidden = head(of.taps, blocks, seen_of(document, position, anchors, head.shape)).unflatten(1, (count, block))
    spots = anchors[:, :, None] + torch.arange(block, device=anchors.device)

    def at(part: Tensor, spots: Tensor) -> Tensor:
        return part.gather(1, spots.flatten(1)).view(spots.shape)

    guess = (head.lm_head(hidden) + head.markov_head(at(ids, spots), hidden)).float()
    wide = of.logits.shape[-1]
    logits = of.logits.gather(1, spots.flatten(1)[..., None].expand(-1, -1, wide)).view(*spots.shape, wide)
    kept = logits[..., head.vocab].float()
    mass = (kept.logsumexp(-1) - logits.float().logsumexp(-1)).exp()
    entropy = -(kept.softmax(-1) * guess.log_softmax(-1)).sum(-1)
    start = document.gather(1, anchors)[:, :, None]
    same = (at(document, spots + 1) == start) & (start >= 0)
    written = at(own, spots + 1)
    weight = same * (written + prompt_weight * ~written)
    losses = (entropy * mass * weight).sum((0, 1)) / weight.sum((0, 1)).clamp(min=1)
    hits = head.vocab[guess.argmax(-1)] == logits.argmax(-1)
    return Blocks(losses, hits.movedim(2, 0), (same & written).movedim(2, 0))


def drawn_anchors(document: Tensor, own: Tensor, count: int, block: int, generator: torch.Generator) -> Tensor:
    """Where blocks begin, ascending, [batch, count] int64: rather where the target wrote the token behind.

    generator: of the CPU, whose numbers are the same on every machine.
    """
    room = document.shape[1] - block
    draw = torch.rand(len(document), room, generator=generator).to(document.device, non_blocking=True)
    draw = draw + own[:, 1 : room + 1] + 2 * (document[:, :room] == document[:, 1 : room + 1])
    return draw.topk(count, dim=1).indices.sort(dim=1).values
