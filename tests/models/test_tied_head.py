"""Where a config ties output matrix and embedding, but both are stored and differ, both are used, as `transformers`
does; one line says so. Equal ones stay one parameter.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from support.command_line import run
from support.engines import greedy, tokens
from support.families import FAMILIES, Saved
from support.logits import record_logits
from support.quantized import by_library
from support.refusing import refused
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.checkpoints import checkpoint
from treetop.checkpoints.params import of_rank
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.parallel import PlaceholderRank

HEADS = {
    "llama 3": "lm_head.weight",
    "gemma3": "lm_head.weight",
    "qwen3 vl": "lm_head.weight",
    "mistral3": "language_model.lm_head.weight",
}
"""A family of each way to name it, of text alone and with images; Gemma ties by default."""
PLAIN = {"draft": None, "dtype": "float32", "graphs": "off", "device": "cpu"}


def tied(name: str, folder) -> tuple[Saved, torch.Tensor]:
    """A family's tiny model whose config ties wherever it may, and its embedding."""
    saved = FAMILIES[name].save(folder)
    path = saved.pair.target / "config.json"
    config = json.loads(path.read_text())
    for each in (config, config.get("text_config", {})):
        each["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    tensors = load_file(saved.pair.target / "model.safetensors")
    return saved, next(tensor for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))


def last_row_turned(embedding: torch.Tensor) -> torch.Tensor:
    return torch.cat([embedding[:-1], -embedding[-1:]])


def logits_of(folder, prompt) -> torch.Tensor:
    llm = LLM(model=str(folder), **PLAIN)
    seen = record_logits(llm)
    llm.generate([prompt], greedy(1))
    return seen[0][0]


@pytest.mark.parametrize("name", HEADS)
def test_a_stored_output_matrix_that_differs_is_used_as_transformers_does(name, tmp_path, caplog):
    """By the logits of `transformers`, though only the last row differs."""
    saved, embedding = tied(name, tmp_path)
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors={HEADS[name]: last_row_turned(embedding)})
    (prompt,) = saved.pair.prompts([20])
    with caplog.at_level("WARNING", logger="treetop"):
        ours = logits_of(own, prompt)
    (line,) = (record.message for record in caplog.records if "tie_word_embeddings" in record.message)
    assert HEADS[name] in line
    assert str(own) in line
    saved = replace(saved, theirs=own)
    theirs = saved.logits(saved.reference(torch.float32), prompt)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", HEADS)
def test_a_stored_output_matrix_that_is_the_embedding_is_no_parameter_of_its_own(name, tmp_path, caplog):
    """As the folder without it, and nothing is said; nor is a wider copy of the same numbers one."""
    saved, embedding = tied(name, tmp_path)
    bare = target_spec(copy_folder(saved.pair.target, tmp_path / "bare", tensors={HEADS[name]: None}))
    for kind in (embedding.dtype, torch.float64):
        folder = copy_folder(saved.pair.target, tmp_path / f"{kind}", tensors={HEADS[name]: embedding.to(kind)})
        spec = target_spec(folder)
        assert spec.config == bare.config
        assert spec.config.tied_embeddings
        assert [param.name for param in spec.params] == [param.name for param in bare.params]
        assert spec.check() == bare.check()
    with caplog.at_level("INFO", logger="treetop"):
        LLM(model=str(folder), **PLAIN)
    assert "tie_word_embeddings" not in caplog.text


def test_a_draft_and_its_tree_read_the_stored_output_matrix(strong_pair, tmp_path):
    """A tree gives the tokens of plain decoding, and these are not the tied model's."""
    embedding = load_file(strong_pair.target / "model.safetensors")["model.embed_tokens.weight"]
    tie = {"tie_word_embeddings": True}
    tied_target = copy_folder(strong_pair.target, tmp_path / "t", tensors={"lm_head.weight": None}, **tie)
    own = copy_folder(tied_target, tmp_path / "o", tensors={"lm_head.weight": -embedding})
    prompts = strong_pair.prompts([5, 20])
    plain, other = (
        tokens(LLM(model=str(folder), **PLAIN).generate(prompts, greedy(12))) for folder in (own, tied_target)
    )
    options = {**PLAIN, "draft": str(strong_pair.head), "speculative_eagle_topk": 3, "speculative_num_steps": 3}
    tree = LLM(model=str(own), speculative_num_draft_tokens=8, **options)
    assert tokens(tree.generate(prompts, greedy(12))) == plain != other


def test_ranks_share_the_stored_output_matrix_as_any(tmp_path):
    """Each of two has half of its rows: it is planned for before a weight is read."""
    saved, embedding = tied("llama 3", tmp_path)
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors={"lm_head.weight": 2 * embedding})
    halves = {param.name: param.shape for param in of_rank(target_spec(own).params, PlaceholderRank(2))}
    assert halves["lm_head"] == halves["embedding"] == (-(-len(embedding) // 2), embedding.shape[1])


@pytest.mark.parametrize(
    "made",
    [
        by_library("float-quantized", num_bits=8, type="float", strategy="channel"),
        by_library("pack-quantized", num_bits=4, type="int", strategy="channel"),
    ],
    ids=["under the plain name", "under its own"],
)
def test_a_quantized_output_matrix_is_one_of_its_own(made, tmp_path):
    """In a folder whose format covers it and whose config ties it: its numbers are not the embedding's."""
    saved, embedding = tied("llama 3", tmp_path)
    plain = [name.removesuffix(".weight") for name in load_file(saved.pair.target / "model.safetensors")]
    others = [name for name in plain if name != "lm_head"]
    stored = {f"lm_head{end}": each for end, each in made.store(embedding).tensors.items()}
    tensors = {"lm_head.weight": None, **stored}
    config = {**made.config, "ignore": others}
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors=tensors, quantization_config=config)
    spec = target_spec(own)
    assert not spec.config.tied_embeddings
    assert spec.params[-1].stored.name != "plain"
    assert spec.check() >= len(others) + 2  # a weight and its scales


def test_another_shape_is_refused_by_name(tmp_path):
    """It was left out in silence, too."""
    saved, embedding = tied("llama 3", tmp_path)
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors={"lm_head.weight": embedding[:-1]})
    refused(CheckpointError, target_spec(own).check, "tensor lm_head.weight has shape")


def test_the_two_are_compared_in_pieces_to_the_first_difference(tmp_path, monkeypatch):
    """Pieces of one row: the second row differs, and no third is read; once for all that ask."""
    saved, embedding = tied("llama 3", tmp_path)
    changed = embedding.clone()
    changed[1] += 1
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors={"lm_head.weight": changed})
    read, rows = checkpoint._Reader.read, []

    def counted(reader, name, span):
        rows.append((span.start, span.stop))
        return read(reader, name, span)

    monkeypatch.setattr(checkpoint._Reader, "read", counted)
    monkeypatch.setattr(checkpoint, "_PIECE", embedding.shape[1])
    for _ in range(3):
        assert not target_spec(own).config.tied_embeddings
    assert rows == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_inspect_says_which_output_matrix_is_used(tmp_path, capsys):
    saved, embedding = tied("llama 3", tmp_path)
    own = copy_folder(saved.pair.target, tmp_path / "own", tensors={"lm_head.weight": 2 * embedding})
    code, out, _ = run(capsys, "inspect", own, "--device", "cpu", "--context-length", 64)
    assert code == 0
    assert "lm_head.weight is stored and differs from the embedding: it is used" in out
    code, out, _ = run(capsys, "inspect", own, "--device", "cpu", "--context-length", 64, "--json")
    report = json.loads(out)["target"]
    assert (report["tied_embeddings"], "lm_head.weight" in report["own_head"]) == (False, True)


def test_weights_that_tie_otherwise_do_not_take_the_place_of_others(strong_pair, tmp_path):
    """What was planned does not hold for them; the error says what differs."""
    embedding = load_file(strong_pair.target / "model.safetensors")["model.embed_tokens.weight"]
    one = copy_folder(strong_pair.target, tmp_path / "one", tensors={"lm_head.weight": None}, tie_word_embeddings=True)
    other = copy_folder(one, tmp_path / "other", tensors={"lm_head.weight": 2 * embedding})
    llm = LLM(model=str(one), **PLAIN)
    refused(ConfigError, lambda: llm.update_weights(model=other), "output matrices")
