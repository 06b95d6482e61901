"""The EAGLE-3 draft head.

Its slot i holds the pair (feature of token i, token i + 1) at position i and proposes token i + 2. The feature is the
target's where the target has run (`fuse`), and the head's own hidden state while a tree grows.
Source: EAGLE-3, arXiv:2503.01840.
"""

from dataclasses import dataclass

from torch import Tensor

from treetop.attention.phase import Attend
from treetop.kernels.ops import Ops
from treetop.kernels.rope import RopeTable
from treetop.models.checkpoint import Shapes
from treetop.models.layers import GatedMLP, RMSNorm, SelfAttention, Weights
from treetop.models.spec import Eagle3Spec


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """The only crossing from draft to target tokens. offset: [draft vocab] int64, `target = draft + offset[draft]`."""

    offset: Tensor

    def to_target(self, draft: Tensor) -> Tensor:
        return draft + self.offset[draft]


@dataclass(frozen=True, slots=True)
class Proposal:
    """The k best next tokens of each hidden state, best first. tokens: [..., k] int64, target ids; logprob float32."""

    tokens: Tensor
    logprob: Tensor


class Eagle3Head:
    """One decoder layer over [embedding, feature], with its own vocabulary."""

    def __init__(self, spec: Eagle3Spec, weights: Weights, rope: RopeTable, embedding: Tensor, ops: Ops) -> None:
        eps = spec.layer.norm_eps
        self.spec, self.rope, self._ops = spec, rope, ops
        self.fuse_features = ops.linear(weights["fc.weight"])
        self.hidden_norm = RMSNorm(weights["midlayer.hidden_norm.weight"], eps, ops)
        # A token's normed embedding never changes, so the whole table is normed once.
        self.normed_embedding = RMSNorm(weights["midlayer.input_layernorm.weight"], eps, ops)(embedding)
        self.attention = SelfAttention(spec.layer, weights, "midlayer.self_attn", 0, ops)
        self.mlp_norm = RMSNorm(weights["midlayer.post_attention_layernorm.weight"], eps, ops)
        self.mlp = GatedMLP(weights, "midlayer.mlp", ops)
        self.norm = RMSNorm(weights["norm.weight"], eps, ops)
        self.lm_head = ops.linear(weights["lm_head.weight"])
        self.vocab = DraftVocab(weights["d2t"])

    def fuse(self, features: Tensor) -> Tensor:
        """Target features of all auxiliary layers, low to high, [rows, n, 3 * target_hidden], to [rows, n, hidden]."""
        return self.fuse_features(features)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: [rows, n] int64; hidden: [rows, n, hidden]. Returns the recurrent state, before `norm`."""
        norm, width = self.hidden_norm, hidden.shape[-1]
        x = self._ops.embed_and_norm(self.normed_embedding, tokens, hidden, norm.weight, norm.eps)
        residual = x[..., -width:] if self.spec.norm_before_residual else hidden
        x, normed = self.mlp_norm.after(residual, self.attention(x, self._ops.angles(self.rope, positions), attend))
        return self._ops.add(x, self.mlp(normed))

    def propose(self, hidden: Tensor, k: int) -> Proposal:
        """hidden: [..., hidden]. Log-probabilities are float32 in every dtype, so that ties are the same everywhere."""
        best, tokens = self._ops.top_logprobs(self.lm_head(self.norm(hidden)), k, self.vocab.offset)
        return Proposal(tokens, best)

    @staticmethod
    def shapes(spec: Eagle3Spec) -> Shapes:
        """Every tensor of an EAGLE-3 head but the optional `embed_tokens.weight` and `t2d`."""
        hidden = spec.layer.hidden_size
        norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
        return {
            "fc.weight": (hidden, len(spec.aux_inputs) * spec.target_hidden_size),
            **{f"{name}.weight": (hidden,) for name in norms},
            **SelfAttention.shapes(spec.layer, "midlayer.self_attn", 2 * hidden),
            **GatedMLP.shapes(spec.layer, "midlayer.mlp"),
            "lm_head.weight": (spec.draft_vocab_size, hidden),
            "d2t": (spec.draft_vocab_size,),
        }
