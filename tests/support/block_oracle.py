"""Slow float64 oracle of block heads: DFlash, DFlash 2, JetSpec's causal head, DSpark, Domino.

Written from the mathematics, held against the published modules; one sequence, loops, no batching, no cache. A test
feeds it the tensors of a file under their published names.
"""

import math

import torch

D = torch.float64


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope_frequencies(head_dim, theta):
    return theta ** (-torch.arange(0, head_dim, 2, dtype=D) / head_dim)


def turn(x, positions, theta):
    """x [n, heads, d]; halves (i, i + d/2) are a pair."""
    angle = positions.to(D)[:, None, None] * rope_frequencies(x.shape[-1], theta)
    c, s = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def attend(q, k, v, sees, scale):
    """q [n, H, d]; k, v [m, G, d]; sees [n, m] bool."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        score = (q[:, h] @ k[:, h // group].T) * scale
        score = score.masked_fill(~sees, -math.inf)
        out[:, h] = torch.softmax(score, -1) @ v[:, h // group]
    return out.flatten(1)


class Block:
    """A block drafter's backbone in the names of z-lab, DeepSpec, JetSpec, SpecForge and speculators.

    w: name -> tensor. sizes: layers, heads, KV heads, width of a head. causal: bool per layer, whether slot i sees
    slots <= i only. window: int or None per layer.
    window_rule: 'query'  key sees iff query_position - key_position < window (SpecForge, HF, engines at inference)
                 'anchor' key sees iff key_position >= anchor - window, own block apart (speculators' training mask)
    """

    def __init__(self, w, sizes, eps, theta, causal, window, window_rule="query", taps=0, group=16):  # noqa: PLR0917
        layers, heads, kv_heads, head_dim = sizes
        self.w = {name: t.to(D) if t.is_floating_point() else t for name, t in w.items()}
        self.layers, self.heads, self.kv_heads, self.head_dim = layers, heads, kv_heads, head_dim
        self.eps, self.theta, self.causal, self.window, self.rule = eps, theta, causal, window, window_rule
        self.taps, self.group = taps, group

    def lin(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x):
        return rms(x, self.w[name + ".weight"], self.eps)

    def kv(self, layer, x, positions):
        at = f"layers.{layer}.self_attn."
        k = self.lin(at + "k_proj", x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.lin(at + "v_proj", x).unflatten(-1, (self.kv_heads, self.head_dim))
        return turn(self.norm(at + "k_norm", k), positions, self.theta), v

    def context(self, features, positions):
        """K and V of target positions, the same for every layer's input: hidden_norm(fc(taps side by side))."""
        c = self.norm("hidden_norm", self.lin("fc", features.to(D)))
        return [self.kv(layer, c, positions) for layer in range(self.layers)]

    def conv(self, at, x, delta, which):
        """y_i = sum over taps of (base + made_i) x_(i - tap), nothing before the block's first slot."""
        base, y = self.w[at + ".base_kernel"][which], torch.zeros_like(x)
        for i in range(x.shape[0]):
            for tap in range(self.taps):
                if i >= tap:
                    y[i] += (base[tap] + delta[i, tap].repeat_interleave(self.group)) * x[i - tap]
        return y

    def kernels(self, at, x):
        return self.lin(at + ".kernel_projection", x).unflatten(-1, (2, self.taps, x.shape[-1] // self.group))

    def hidden(self, embedded, anchor, context, context_positions):
        """embedded [block, hidden] of anchor and masks at positions from anchor on; context of positions < anchor."""
        x, n = embedded.to(D), embedded.shape[0]
        slots = torch.arange(n)
        positions = anchor + slots
        for layer in range(self.layers):
            at = f"layers.{layer}"
            ck, cv = context[layer]
            y = self.norm(at + ".input_layernorm", x)
            if self.taps:
                d = self.kernels(at + ".attention_conv", y)
                y = self.conv(at + ".attention_conv", y, d[:, 0], 0)
            q = self.lin(at + ".self_attn.q_proj", y).unflatten(-1, (self.heads, self.head_dim))
            q = turn(self.norm(at + ".self_attn.q_norm", q), positions, self.theta)
            k, v = self.kv(layer, y, positions)
            window = self.window[layer]
            before = context_positions[None, :] < anchor
            own = torch.ones(n, n, dtype=torch.bool)
            if self.causal[layer]:
                own = slots[:, None] >= slots[None, :]
            if window is not None:
                if self.rule == "anchor":
                    before = before & (context_positions[None, :] >= anchor - window)
                else:
                    before = before & (positions[:, None] - context_positions[None, :] < window)
                    own = own & ((slots[:, None] - slots[None, :]).abs() < window)
            sees = torch.cat([before.expand(n, -1), own], dim=1)
            y = attend(q, torch.cat([ck, k]), torch.cat([cv, v]), sees, self.head_dim**-0.5)
            y = self.lin(at + ".self_attn.o_proj", y)
            if self.taps:
                y = self.conv(at + ".attention_conv", y, d[:, 1], 1)
            x = x + y
            y = self.norm(at + ".post_attention_layernorm", x)
            if self.taps:
                d = self.kernels(at + ".mlp_conv", y)
                y = self.conv(at + ".mlp_conv", y, d[:, 0], 0)
            gate = self.lin(at + ".mlp.gate_proj", y)
            y = self.lin(at + ".mlp.down_proj", gate * torch.sigmoid(gate) * self.lin(at + ".mlp.up_proj", y))
            if self.taps:
                y = self.conv(at + ".mlp_conv", y, d[:, 1], 1)
            x = x + y
        return self.norm("norm", x)


class Markov:
    """Edge terms of DSpark. step(previous token, hidden of the slot, state) -> (bias over draft ids, state).

    The state is that of a path: a tree keeps one a node ('rnn'); 'vanilla' and 'gated' have none.
    """

    def __init__(self, w, kind, prefix="markov_head."):
        self.w = {name.removeprefix(prefix): t.to(D) for name, t in w.items() if name.startswith(prefix)}
        self.kind = kind
        self.rank = self.w["markov_w1.weight"].shape[1]

    def begin(self):
        return torch.zeros(self.rank, dtype=D)

    def step(self, previous, hidden, state):
        e = self.w["markov_w1.weight"][previous]
        if self.kind == "gated":
            z = torch.cat([hidden, e])
            e = e * torch.sigmoid(self.w["gate_proj.weight"] @ z + self.w["gate_proj.bias"])
        elif self.kind == "rnn":
            z = torch.cat([state, e, hidden])
            g, c, o = (self.w["joint_proj.weight"] @ z + self.w["joint_proj.bias"]).chunk(3)
            g = torch.sigmoid(g)
            state, e = g * state + (1 - g) * torch.tanh(c), torch.tanh(o)
        return self.w["markov_w2.weight"] @ e, state


def selector_score(w, unary, hidden, previous, candidates):
    """DFlash 2's edge score of candidates after `previous`: U(b) + sum_r A(a)_r H(h)_r B(b)_r."""
    a = w["candidate_selector.predecessor_codebook"].to(D)[previous]
    h = w["candidate_selector.hidden_projection.weight"].to(D) @ hidden
    b = w["candidate_selector.successor_codebook"].to(D)[candidates]
    return unary[candidates] + b @ (a * h)


def selector_candidates(unary, k):
    """The k best tokens of a slot by its unary logits, the lower id first among equals."""
    return torch.argsort(unary, descending=True, stable=True)[:k]


class Domino:
    """A GRU without biases reads the embeddings of a path; a bottleneck adds to the later slots' logits."""

    def __init__(self, w, hidden_size, gru_size):
        self.w = {name: t.to(D) for name, t in w.items() if name.startswith(("prefix_gru.", "embed_proj."))}
        self.size = gru_size

    def begin(self):
        return torch.zeros(self.size, dtype=D)

    def feed(self, embedded, state):
        i = self.w["prefix_gru.weight_ih_l0"] @ embedded.to(D)
        h = self.w["prefix_gru.weight_hh_l0"] @ state
        (ir, iz, i_n), (hr, hz, hn) = i.chunk(3), h.chunk(3)
        r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        return (1 - z) * torch.tanh(i_n + r * hn) + z * state

    def bias(self, hidden, state):
        x = self.w["embed_proj.0.weight"] @ torch.cat([hidden, state])
        return self.w["embed_proj.2.weight"] @ (x * torch.sigmoid(x))
