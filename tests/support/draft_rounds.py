"""Trees of an engine's rounds beside those that an oracle grows."""

from functools import cache

import torch

from support.dense_drafts import proposals_of
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.examples import EVERYTHING
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


def assert_batches(pair: Pair, shape, hits=True, **options) -> list[int]:
    """Tokens are plain decoding's; rounds those of each request alone, whatever ran beside it, captured or not, with
    prefix hits; after retractions tokens are the same. Returns the accept lengths of all rounds.

    A day has captured ones alone.
    hits: whether pages of a prompt are still there when it is asked again; those behind a window have gone.
    """
    prompts = [*pair.prompts([9, 20, 5, 30]), *pair.prompts([9, 20, 5, 30])]  # the second half hits the first's pages
    params = [
        greedy(20, whole=True),
        sampled(3, 20, whole=True),
        greedy(12, whole=True),
        sampled(5, 16, temperature=0.7, whole=True),
    ] * 2
    options = {"page_size": 4, **options}
    alone = build(pair, shape, max_running_requests=1, disable_radix_cache=True, **options)
    first = zip(prompts[:4], params[:4], strict=True)
    want = [each for prompt, param in first for each in alone.generate([prompt], [param])] * 2
    assert tokens(want[:4]) == tokens(build(Pair(pair.target, None), None).generate(prompts[:4], params[:4]))
    for graphs in ("off", "sim") if EVERYTHING else ("sim",):
        llm = build(
            pair, shape, graphs=graphs, max_running_requests=4, chunked_prefill_size=7, check_level=3, **options
        )
        got = llm.generate(prompts[:4], params[:4]) + llm.generate(prompts[4:], params[4:])
        assert (tokens(got), accept_lens(got)) == (tokens(want), accept_lens(want))
        assert (got[5].metrics.num_cached_tokens > 0) == hits
        llm.scheduler.check_integrity()
    tight = build(pair, shape, max_running_requests=4, max_total_tokens=88, context_length=80, **options)
    assert tokens(tight.generate(prompts, params)) == tokens(want)
    assert tight.scheduler.num_retractions > 0
    return [length for row in accept_lens(want) for length in row]


def _prompts(pair: Pair) -> list:
    return pair.prompts([9, 3, 14], seed=1)


@cache
def _plain(pair: Pair) -> list:
    """Of the target alone, whatever the draft."""
    return tokens(build(pair, None).generate(_prompts(pair), greedy(16)))
