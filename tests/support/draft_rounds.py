"""Trees of an engine's rounds beside those that an oracle grows."""

from functools import cache

import torch

from support.dense_drafts import proposals_of
from support.engines import build, greedy, tokens
from support.oracles import grow, select
from support.tiny_models import Pair


def assert_rounds(pair, dense, reference, which=(1, 2, 3), shape=(3, 3, 9), count=3, **options) -> None:
    """Trees of the first rounds are the reference's, after what was committed before each; output is plain output.

    which: states of the target that the reference reads.
    """
    k, steps, size = shape
    llm, rounds = build(pair, shape, **{"page_size": 4, "chunked_prefill_size": 4, **options}), []
    llm.engine.observer = lambda plan, tree, accepted: rounds.append((tree, int(accepted.accept_len[0])))
    prompts = _prompts(pair)
    outputs = llm.generate(prompts[:1], greedy(16))
    ids = [*prompts[0], outputs[0].token_ids[0]]
    for tree, length in rounds[:count]:
        root, born, _ = grow(ids[-1], k, steps, proposals_of(reference, dense, which, ids, k))
        nodes = select(root, born, size)
        assert tree.tokens[0].tolist() == [node.token for node in nodes]
        assert tree.parent[0, 1:].tolist() == [nodes.index(node.parent) for node in nodes[1:]]
        want = torch.tensor([node.score for node in nodes])
        torch.testing.assert_close(tree.logprob[0], want, rtol=1e-5, atol=1e-5)
        ids = [*prompts[0], *outputs[0].token_ids][: len(ids) + length + 1]
    assert tokens(outputs + llm.generate(prompts[1:], greedy(16))) == _plain(Pair(pair.target, None))


def _prompts(pair: Pair) -> list:
    return pair.prompts([9, 3, 14], seed=1)


@cache
def _plain(pair: Pair) -> list:
    """Of the target alone, whatever the draft."""
    return tokens(build(pair, None).generate(_prompts(pair), greedy(16)))
