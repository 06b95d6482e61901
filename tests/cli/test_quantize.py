"""`treetop quantize`: what it writes is what the format's library would, and serves as any other folder."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from support.command_line import run
from support.engines import accept_lens, build, greedy, tokens
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head
from treetop.checkpoints.folder import resolve_folder
from treetop.drafts.registry import drafter_spec
from treetop.models.registry import target_spec
from treetop.tools.quantize import quantize
from treetop.types.errors import CheckpointError, ConfigError

NESTLING = Pair(resolve_folder("builtin:nestling"), resolve_folder("builtin:nestling-eagle3"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The embedded pair in both formats."""
    place = tmp_path_factory.mktemp("quantized")
    for name in ("fp8", "w4a16"):
        quantize(NESTLING.target, None, name, 64, place / name)
        quantize(NESTLING.head, NESTLING.target, name, 64, place / f"{name}-head")
    return place


@pytest.mark.parametrize(("name", "error"), [("fp8", 0.03), ("w4a16", 0.12)])
def test_the_library_reads_what_is_written_and_rounds_alike(name, error, written):
    """Its codes for the same scales are these, and what it decompresses is near to what there was."""
    original, made = (load_file(folder / "model.safetensors") for folder in (NESTLING.target, written / name))
    config = json.loads((written / name / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    modules = sorted(each.removesuffix(".weight_scale") for each in made if each.endswith(".weight_scale"))
    assert len(modules) == 28
    assert "lm_head" in config["ignore"]
    for module in modules:
        state = {each.removeprefix(f"{module}."): tensor for each, tensor in made.items() if each.startswith(module)}
        weight = original[f"{module}.weight"]
        theirs = compressor.compress({"weight": weight.float(), "weight_scale": state["weight_scale"].float()}, scheme)
        codes = "weight" if name == "fp8" else "weight_packed"
        assert torch.equal(theirs[codes].view(torch.uint8), state[codes].view(torch.uint8))
        decoded = compressor.decompress(state, scheme)["weight"].float()
        assert float((decoded - weight.float()).norm() / weight.float().norm()) < error
    assert all(
        torch.equal(made[each], tensor) for each, tensor in original.items() if "norm" in each or "embed" in each
    )


@pytest.mark.parametrize(
    ("target", "head"), few_of([("fp8", "fp8-head"), ("w4a16", "w4a16-head"), ("w4a16", None), (None, "fp8-head")], 1)
)
def test_the_embedded_pair_gives_the_tokens_of_plain_decoding(target, head, written):
    """Whichever is quantized, in float64; drafts of a head in other bits than its target are still accepted."""
    pair = Pair(
        NESTLING.target if target is None else written / target, NESTLING.head if head is None else written / head
    )
    prompts = [list(range(40, 60)), [7, 300, 12]]
    tree, plain = (build(pair, shape).generate(prompts, greedy(16)) for shape in ((4, 5, 16), None))
    assert tokens(tree) == tokens(plain)
    assert sum(map(sum, accept_lens(tree))) > 0
    expected = {"plain"} if target is None else {"plain", {"fp8": "FP8", "w4a16": "W4A16"}[target]}
    spec = target_spec(pair.target)
    assert {param.stored.name for param in spec.params} == expected
    named = {param.stored.name for param in drafter_spec(pair.head, spec.config).params}
    assert named == ({"plain"} if head is None else {"plain", {"fp8": "FP8", "w4a16": "W4A16"}[head[:-5]]})


def test_without_a_size_groups_are_the_largest_that_divide_all_rows(tmp_path, capsys, strong_pair):
    """The embedded target has rows of 1,216; its head has other widths; where no size divides all it is an error."""
    for folder, more in ((NESTLING.target, ()), (NESTLING.head, ("--target", NESTLING.target))):
        made = tmp_path / folder.name
        code, out, err = run(capsys, "quantize", folder, "--format", "w4a16", "--output", made, *more)
        assert (code, err) == (0, "")
        said = json.loads((made / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
        size = said["weights"]["group_size"]
        widths = {shape[1] for name, shape in shapes_of(folder).items() if name in rounded_in(made)}
        assert size == max(each for each in (128, 64, 32) if not any(width % each for width in widths))
        assert f"weights rounded in groups of {size}, " in out
    assert shapes_of(NESTLING.target)["model.layers.0.mlp.down_proj.weight"][1] == 1216
    code, _, err = run(capsys, "quantize", strong_pair.target, "--format", "w4a16", "--output", tmp_path / "none")
    assert code == 2
    assert "--group-size: rows of" in err
    assert not (tmp_path / "none").exists()


def shapes_of(folder):
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def rounded_in(folder):
    return {name.replace("_packed", "") for name in shapes_of(folder) if name.endswith("weight_packed")}


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 8])
def test_experts_files_and_what_a_target_does_not_use(group, tmp_path):
    """Several files with an index; routers stay plain, and layers for further tokens too."""
    plain = save_random_experts(tmp_path / "plain", "qwen3_moe", seed=3, vocab_size=12)
    folder = copy_folder(plain, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for part, file in ((names[::2], "a.safetensors"), (names[1::2], "b.safetensors")):
        save_file({name: tensors[name] for name in part}, folder / file)
        places.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    made = quantize(folder, None, "w4a16", group, tmp_path / "made")
    assert made.before > 3 * made.after
    assert {each.name for each in (tmp_path / "made").glob("*.safetensors*")} == {
        *("a.safetensors", "b.safetensors", "model.safetensors.index.json")
    }
    pair = Pair(tmp_path / "made", save_random_head(tmp_path / "head", plain, 12, seed=2))
    tree, other = (build(pair, shape).generate(pair.prompts([9, 4]), greedy(12)) for shape in ((4, 3, 12), None))
    assert tokens(tree) == tokens(other)


def test_zero_rows_and_numbers_that_are_no_whole_groups(strong_pair, tmp_path):
    up = "model.layers.0.mlp.up_proj.weight"
    zeros = load_file(strong_pair.target / "model.safetensors")[up].clone()
    zeros[5] = 0
    folder = copy_folder(strong_pair.target, tmp_path / "zeros", tensors={up: zeros})
    for name in ("fp8", "w4a16"):
        quantize(folder, None, name, 16, tmp_path / name)
        assert len(tokens(build(Pair(tmp_path / name, None), None).generate([[5, 6]], greedy(3)))[0]) == 3
    refused(ConfigError, lambda: quantize(folder, None, "w4a16", 32, tmp_path / "x"), "--group-size 32", "48")
    refused(ConfigError, lambda: quantize(folder, None, "fp8", 0, tmp_path / "fp8"), "--output")
    refused(CheckpointError, lambda: quantize(tmp_path / "fp8", None, "fp8", 0, tmp_path / "y"), "quantized already")
    wrong = copy_folder(strong_pair.target, tmp_path / "nan", tensors={up: zeros.fill_(float("nan"))})
    refused(CheckpointError, lambda: quantize(wrong, None, "fp8", 0, tmp_path / "z"), up)
    assert not (tmp_path / "x").exists()
