"""What the recipe of SmolLM2's head does to data, without a model."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.block_heads import EPS
from support.block_oracle import Block, Markov
from support.head_layouts import VOCAB, WIDTH, save_head
from support.tiny_models import save_random_llama
from treetop.drafts.block_config import block_spec
from treetop.models.registry import target_spec

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    yield importlib.import_module
    for path in RECIPE.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_assistants_tokens_alone_are_its_own(script):
    """From behind each opening to the end mark, which it wrote too; what the user says is not."""
    marks = script("answers").marks
    opening, end = [1, 7, 8], 2
    ids = [1, 5, 8, 30, 2, 1, 7, 8, 40, 41, 2, 1, 5, 8, 31, 2, 1, 7, 8, 42]
    assert [token for token, own in zip(ids, marks(ids, opening, end), strict=True) if own] == [40, 41, 2, 42]


def test_rows_hold_every_conversation_once_and_whole(script):
    """Random lengths: what a row holds under a number is that conversation, its positions count from 0."""
    packed, draw = script("training").packed, np.random.default_rng(0)
    given = [(draw.integers(0, 99, n), draw.random(n) < 0.5) for n in draw.integers(1, 90, 50)]
    pack = packed(given, 64)
    seen = set()
    for row in range(len(pack.ids)):
        for number in set(pack.document[row].tolist()) - {-1}:
            here = pack.document[row] == number
            ids, own = (part[:64] for part in given[number])
            assert pack.ids[row][here].tolist() == ids.tolist()
            assert pack.own[row][here].tolist() == own.tolist()
            assert pack.position[row][here].tolist() == list(range(len(ids)))
            assert number not in seen
            seen.add(number)
    assert len(seen) == len(given)


def test_a_conversation_sees_itself_alone_and_backwards(script):
    """The relation from first principles, for every pair."""
    document = torch.tensor([[0, 0, 1, 1, 1, -1]])
    seen = script("network").visible(document)[0, 0]
    for query in range(6):
        for key in range(6):
            assert bool(seen[query, key]) == (key <= query and document[0, query] == document[0, key])


def test_prompts_of_a_held_out_topic_are_never_trained_on(script):
    """The texts of all kinds, from passages of both sides."""
    prompts, texts = script("prompts"), script("texts")
    passages = [
        {"source": source, "name": str(n), "text": f"words of passage {n} " * 9, "held_out": n % 5 == 0}
        for n in range(60) for source in ("docs", "code")
    ]  # fmt: skip
    maker, held = prompts.Maker(passages, 0), [topic for topic in prompts.TOPICS if texts.held_out(topic)]
    assert held
    for kind, make in maker.kinds.items():
        for _ in range(200):
            made = make()
            says = any(f"passage {n} " in made.turns[0] for n in range(0, 60, 5))
            assert not says or made.held, kind


def test_the_block_heads_module_is_what_the_checkpoint_drafts(script, monkeypatch, tmp_path):
    """Blocks of two conversations of a row, in training's one pass: slots' logits are the published head's, one by one.

    The oracle reads the tensors by their names and the config is a head's that loads, so what is trained is what runs.
    """
    network = script("block_network")
    monkeypatch.setattr(network, "TAPS", (0, 1, 2))
    body = script("network").Shape(
        vocab=VOCAB, draft_vocab=40, hidden=WIDTH, heads=4, kv_heads=2, head_dim=16, intermediate=40, context=256,
        rope_theta=10000.0, norm_eps=EPS,
    )  # fmt: skip
    torch.manual_seed(0)
    shape = network.BlockShape(body, layers=2, block=5, rank=6)
    vocab = torch.randperm(VOCAB)[:40].sort().values
    head = network.BlockHead(shape, vocab).double()
    for parameter in head.parameters():
        parameter.data.normal_(std=0.3).add_(1.0 if parameter.ndim == 1 else 0.0)
    document = torch.tensor([[0] * 13 + [1] * 17])
    position = torch.tensor([[*range(13), *range(17)]])
    ids, table = torch.randint(0, VOCAB, (1, 30)), torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    taps, logits = torch.randn(1, 30, 3 * WIDTH, dtype=torch.float64), torch.randn(1, 30, VOCAB, dtype=torch.float64)
    anchors = torch.tensor([[4, 10, 16, 23]])
    features = script("network").Features(logits, taps, table[ids])
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # the module's norms and softmaxes, at the oracle's precision
    own = torch.ones(1, 30, dtype=torch.bool)
    part = network.loss_of_blocks(head, features, table[network.MASK], ids, document, position, own, anchors)

    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    save_head(tmp_path / "head", shape.config(), tensors)
    spec = block_spec(
        tmp_path / "head", target_spec(save_random_llama(tmp_path / "target", head_dim=16)).config, dummy=False
    )
    assert (spec.first, spec.block.width, spec.block.max_steps, spec.aux_inputs) == (0, 5, 5, (1, 2, 3))
    assert spec.check() == len(tensors)
    block = Block(tensors, (2, 4, 2, 16), EPS, 10000.0, (False, False), (None, None))
    edges = Markov(tensors, "rnn")
    wanted = [[] for _ in range(5)]
    for anchor in anchors[0].tolist():
        begin = 13 * int(document[0, anchor])
        places = torch.arange(anchor - begin)
        context = block.context(taps[0, begin:anchor], places)
        rows = table[torch.tensor([int(ids[0, anchor])] + [network.MASK] * 4)]
        hidden = block.hidden(rows, anchor - begin, context, places)
        state = edges.begin()
        for slot in range(5):
            bias, state = edges.step(int(ids[0, anchor + slot]), hidden[slot], state)
            guess = tensors["lm_head.weight"] @ hidden[slot] + bias
            there = anchor + slot + 1 < 30 and document[0, anchor + slot + 1] == document[0, anchor]
            kept = logits[0, anchor + slot][vocab]
            mass = (kept.logsumexp(0) - logits[0, anchor + slot].logsumexp(0)).exp()
            loss = -(kept.softmax(0) * guess.log_softmax(0)).sum() * mass
            wanted[slot] += [loss] if there else []
    torch.testing.assert_close(part.losses, torch.stack([torch.stack(each).mean() for each in wanted]))
