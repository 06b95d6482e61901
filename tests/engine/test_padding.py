"""The dummy row of a padded batch: whatever the weights say, it neither fails nor changes anything."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from support.engines import build, greedy, sampled, tokens
from support.operations import with_op
from support.tiny_models import Pair, copy_folder, save_copying_head, save_weak_llama
from treetop.kernels.tree.rows import finish_reference
from treetop.types.errors import CheckError, EngineError
from treetop.types.layout import SpecShape

VOCAB = 211
HEADS = {  # the weights of its output that each hostile head has, from the copying head's
    "zero after zero": lambda weight: weight,
    "all alike": torch.zeros_like,
    "upside down": lambda weight: -weight,
    "too large": lambda weight: weight * 1e37,
}
PROMPTS = [5, 9, 3, 12, 7, 1, 4]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> dict[str, Pair]:
    """A target whose most likely token after 0 is 0; one head proposes the same, the others nonsense."""
    folder = tmp_path_factory.mktemp("hostile")
    weak = save_weak_llama(folder / "weak", strength=0.0, sharpness=0.5)
    weights = load_file(weak / "model.safetensors")
    lm_head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    lm_head[0] = 9 * embedding[0] / embedding[0].norm()
    target = copy_folder(weak, folder / "target", tensors={"lm_head.weight": lm_head})
    first = save_copying_head(folder / "head", target, draft_vocab=VOCAB)
    proposing = load_file(first / "model.safetensors")["lm_head.weight"]
    return {
        name: Pair(target, copy_folder(first, folder / name, tensors={"lm_head.weight": change(proposing)}))
        for name, change in HEADS.items()
    }


@pytest.fixture(scope="module")
def plainly(hostile):
    """What plain decoding gives for `PROMPTS`, each alone, greedily and sampled."""
    llm, pair = build(hostile["all alike"], None), hostile["all alike"]
    return {
        params: [llm.generate([prompt], params)[0].token_ids for prompt in pair.prompts(PROMPTS)]
        for params in (greedy(12), sampled(3, 12))
    }


@pytest.mark.pairwise
@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize("shape", [(2, 1, 3), (4, 1, 5), (4, 3, 12), (4, 5, 16)])
@pytest.mark.parametrize("count", [3, 5])
def test_zeros_after_zeros_do_not_stop_a_padded_batch(hostile, plainly, shape, count, graphs):
    """All siblings below the dummy's root are token 0, and the target wants it at every one of them."""
    pair = hostile["zero after zero"]
    llm = build(pair, shape, graphs=graphs)
    assert tokens(llm.generate(pair.prompts(PROMPTS)[:count], greedy(12))) == plainly[greedy(12)][:count]


@st.composite
def shapes(draw):
    k, steps = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    largest = 1 + k + (steps - 1) * k * k
    return (k, steps, steps + 1 if k == 1 else draw(st.integers(2, min(largest, 40))))


@given(
    shape=shapes(),
    head=st.sampled_from(list(HEADS)),
    count=st.sampled_from([3, 5, 6, 7]),
    options=st.fixed_dictionaries({"graphs": st.sampled_from(["off", "sim"]), "check_level": st.integers(0, 1)}),
    params=st.sampled_from([greedy(12), sampled(3, 12)]),
)
@settings(max_examples=15, deadline=None)
def test_no_head_makes_a_padded_batch_fail_or_differ(hostile, plainly, shape, head, count, options, params):
    """Any tree, heads that propose zeros, the worst, the same everywhere, or overflow: plain decoding's tokens,
    and the dummy row and the null pages hold what they held.
    """
    pair = hostile[head]
    llm = build(pair, shape, max_running_requests=8, **options)
    assert tokens(llm.generate(pair.prompts(PROMPTS)[:count], params)) == plainly[params][:count]
    device = llm.engine.runner
    state, page_size = device.state, llm.engine.layout.page_size
    tables = [table.data for table in state.page_tables.values()]
    for tensor in (state.committed, state.root, state.draft.tokens, state.draft.logprob, state.draft.hidden, *tables):
        assert not tensor[-1].any()
    assert not any(pool.data[:, :page_size].any() for pool in device.pools.values())
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("graphs", ["off", "sim"])
def test_a_dummy_row_that_is_not_finite_is_nobodys_error(weak_pair, tmp_path, graphs):
    """Only the dummy row sees token 0, whose embedding is NaN: at level 2 no probe fires, and no live row notices."""
    head = save_copying_head(tmp_path / "head", weak_pair.target, draft_vocab=40)
    offset = load_file(head / "model.safetensors")["d2t"]
    assert 0 not in (torch.arange(40) + offset).tolist()
    pair, many = Pair(weak_pair.target, head), weak_pair.prompts([5, 9, 3, 7] * 4)
    outputs = zip(many, tokens(build(pair, None).generate(many, greedy(12))), strict=True)
    prompts, want = zip(*[each for each in outputs if 0 not in each[1]][:3], strict=True)
    assert len(prompts) == 3
    llm = build(pair, (4, 1, 5), graphs=graphs, check_level=2)
    device = llm.engine.runner
    device.target.embedding[0] = device.drafter.normed_embedding[0] = float("nan")
    assert tokens(llm.generate(list(prompts), greedy(12))) == list(want)


def _one_too_long(chosen, tree, out, forced, masked_drafts):
    out.path.zero_()
    out.accept_len.fill_(out.path.shape[1])


def _not_a_line(chosen, tree, out, forced, masked_drafts):
    out.path.copy_(torch.arange(out.path.shape[1]).expand_as(out.path))
    out.accept_len.fill_(out.path.shape[1] - 1)


@pytest.mark.parametrize("wrong", [_one_too_long, _not_a_line])
def test_the_start_up_proof_refuses_a_path_that_is_no_line_of_the_dummy_rows_tree(hostile, wrong):
    """Whatever the weights: the tree is the dummy row's, the target's choices are the proof's own."""
    with (
        with_op("accept", wrong),
        pytest.raises((CheckError, EngineError), match=r"padded batch: the dummy row accepts \[0, .*, expected \[0, "),
    ):
        build(hostile["all alike"], (4, 3, 12))


def test_the_start_up_proof_refuses_a_round_that_changes_the_dummy_row(hostile):
    """As if a store did not ask who is live."""

    def all_live(tables, rows, dummy_row, *rest):
        finish_reference(tables, rows, -1, *rest)

    with (
        with_op("finish", all_live),
        pytest.raises((CheckError, EngineError), match="padded batch: a round of the dummy row changed"),
    ):
        build(hostile["all alike"], (4, 3, 12))


def test_every_shape_is_proven_and_plain_rounds_have_no_siblings(hostile):
    """A target alone starts too, at every level; so does an engine whose accepted lengths are simulated."""
    pair = hostile["zero after zero"]
    for level in (1, 2, 3):
        assert build(pair, None, check_level=level).engine.layout.shapes == (SpecShape(1, 0, 1),)
        assert build(pair, (4, 3, 12), check_level=level).engine.layout.shapes == (SpecShape(4, 3, 12),)
    build(pair, (4, 3, 12), simulate_accept_length=2).generate(pair.prompts([3, 4, 5]), replace(greedy(), max_tokens=7))
