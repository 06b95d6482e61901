"""Slow, obvious answers in plain Python. Nothing of the code under test is imported here."""

import math
from dataclasses import dataclass, field
from struct import pack, unpack

MASK32 = 0xFFFFFFFF


def float32(x: float) -> float:
    """The nearest float32."""
    return unpack("f", pack("f", x))[0]


# ------------------------------------------------------------------------------------------------ sampling


def philox4x32_10(counter: list[int], key: list[int]) -> list[int]:
    """Four 32-bit words from a counter of four and a key of two. Source: Salmon et al., SC 2011, section 3.3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (product1 >> 32) ^ c[1] ^ k[0],
            product1 & MASK32,
            (product0 >> 32) ^ c[3] ^ k[1],
            product0 & MASK32,
        ]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """Probabilities after temperature, top-k, top-p and min-p, each filter on the renormalised rest.

    Tokens are ranked by logit, for probabilities of close ones may round to the same; equal logits by token.
    """
    largest = max(logits)
    if temperature == 0:
        return [float(i == logits.index(largest)) for i in range(len(logits))]
    mass = {i: math.exp((logit - largest) / temperature) for i, logit in enumerate(logits)}
    order = sorted(mass, key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = math.fsum(mass[i] for i in order)
    kept, sum_before = [], 0.0
    for i in order:
        if not kept or top_p == 1 or sum_before / total < top_p:
            kept.append(i)
        sum_before += mass[i]
    kept = [i for i in kept if mass[i] >= min_p * mass[kept[0]]]
    total = math.fsum(mass[i] for i in kept)
    return [mass[i] / total if i in kept else 0.0 for i in range(len(logits))]


def drawn(probs, uniform: float) -> int:
    """The first token whose cumulative share exceeds the uniform."""
    total, running = math.fsum(probs), 0.0
    for token, p in enumerate(probs):
        running += p
        if p > 0 and running > uniform * total:
            return token
    raise AssertionError("no token has a probability")


def chi_square_tail(observed, expected) -> float:
    """Probability of a deviation at least this large, expected counts below 5 pooled."""
    pooled_observed, pooled_expected, rest_observed, rest_expected = [], [], 0.0, 0.0
    for o, e in zip(observed, expected, strict=True):
        if e >= 5:
            pooled_observed.append(o)
            pooled_expected.append(e)
        else:
            rest_observed, rest_expected = rest_observed + o, rest_expected + e
    if rest_expected > 0:
        pooled_observed.append(rest_observed)
        pooled_expected.append(rest_expected)
    statistic = sum((o - e) ** 2 / e for o, e in zip(pooled_observed, pooled_expected, strict=True))
    freedom = len(pooled_expected) - 1
    if freedom == 0:
        return 1.0
    # Wilson and Hilferty's normal approximation of the chi-square distribution.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


# ------------------------------------------------------------------------------------------------ trees


@dataclass(eq=False)
class Node:
    """A candidate of the draft tree, which knows its parent and nothing of flat indices."""

    token: int
    score: float
    parent: "Node | None"
    born: int
    children: list["Node"] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def path(self) -> tuple[int, ...]:
        """Tokens from the root's child to this node."""
        return () if self.parent is None else (*self.parent.path, self.token)

    def line(self) -> list["Node"]:
        """This node and its ancestors, the root last."""
        return [self] if self.parent is None else [self, *self.parent.line()]


def best(nodes, count):
    """The `count` best, the earlier born first among equals."""
    return sorted(nodes, key=lambda node: (-node.score, node.born))[:count]


def grow(root_token: int, k: int, num_steps: int, proposals):
    """All candidates and the frontier of each level.

    proposals(node): the k children that the draft head proposes after `node`, [(token, log-probability)], best first.
    """
    root = Node(root_token, 0.0, None, 0)
    born: list[Node] = []

    def expand(parents):
        made = []
        for parent in parents:
            for token, logprob in proposals(parent):
                node = Node(token, float32(parent.score + logprob), parent, len(born) + 1)
                parent.children.append(node)
                born.append(node)
                made.append(node)
        return made

    frontiers = [expand([root])]
    for _ in range(num_steps - 1):
        top_1, *others = expand(frontiers[-1])
        frontiers.append([top_1, *best(others, k - 1)])
    return root, born, frontiers


def select(root: Node, born: list[Node], width: int) -> list[Node]:
    """The verify tree: the root and the `width - 1` best candidates in the order of their birth."""
    return [root, *sorted(best(born, width - 1), key=lambda node: node.born)]


def walk(tokens, parents, choices) -> tuple[list[int], list[int]]:
    """The accepted path of node indices from the root, and the tokens it emits, the bonus last."""
    at, path, emitted = 0, [0], []
    while True:
        emitted.append(choices[at])
        child = [i for i in range(1, len(tokens)) if parents[i] == at and tokens[i] == choices[at]]
        if not child:
            return path, emitted
        at = child[0]
        path.append(at)


def longest_line(tokens, parents, choices) -> list[int]:
    """The accepted path where siblings may be alike: the line of the deepest node that agrees, the first of several."""
    lines = {0: [0]}
    for i in range(1, len(tokens)):
        if parents[i] in lines and tokens[i] == choices[parents[i]]:
            lines[i] = [*lines[parents[i]], i]
    return max(lines.values(), key=len)


def chain(root: int, draft_logits, offset, target_logits, num_steps: int) -> tuple[list[int], int, int]:
    """Chain speculation with greedy verification: draft tokens, how many are accepted, and the bonus token.

    draft_logits(tokens so far), target_logits(tokens so far): lists of numbers after those tokens.
    """

    def largest(values):
        return max(range(len(values)), key=lambda i: (values[i], -i))

    drafts: list[int] = []
    for _ in range(num_steps):
        token = largest(draft_logits([root, *drafts]))
        drafts.append(token + offset[token])
    accepted = 0
    while accepted < num_steps and largest(target_logits([root, *drafts[:accepted]])) == drafts[accepted]:
        accepted += 1
    return drafts, accepted, largest(target_logits([root, *drafts[:accepted]]))


# ------------------------------------------------------------------------------------------------ attention


def attention(q, keys, values, scale: float) -> tuple[list[float], float]:
    """One query's output and log-sum-exp over a list of keys and values; nothing seen gives zeros and -inf."""
    if not keys:
        return [0.0] * len(q), -math.inf
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = math.fsum(weights)
    out = [sum(w * v[i] for w, v in zip(weights, values, strict=True)) / total for i in range(len(q))]
    return out, largest + math.log(total)


def stop_index(new_ids, stops, limit) -> tuple[int, str] | None:
    """Emit token by token: how many are emitted until the request ends, and why; None if it goes on."""
    for count, token in enumerate(new_ids, start=1):
        if token in stops:
            return count, "stop"
        if count == limit:
            return count, "length"
    return None
