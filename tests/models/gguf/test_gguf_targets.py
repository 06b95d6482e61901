"""Models in GGUF files are the models that they were made from."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.command_line import refused, run
from support.engines import greedy, tokens
from support.families import SCALED_FULL, SIZES, WINDOW, YARN
from support.logits import record_logits
from support.tiny_models import (
    Pair,
    llama_config,
    save_mxfp4,
    save_random,
    save_random_experts,
    save_random_head,
    save_random_llama,
    save_random_qwen3,
)
from treetop import LLM
from treetop.checkpoints.checkpoint import open_file, open_tensors, stored_files, tensor_files
from treetop.checkpoints.fingerprint import fingerprint
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.gguf import views
from treetop.checkpoints.gguf.architectures import ARCHITECTURES, expert_names
from treetop.checkpoints.hub import hub_folder, hub_gguf
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError
from treetop.weights.format import Span, TensorSpec

gguf = pytest.importorskip("gguf")
from support.gguf_files import write_gguf  # noqa: E402  # needs the library

OPTIONS = {"dtype": "float64", "device": "cpu", "context_length": 128, "max_running_requests": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


GRANITE = {
    "embedding_multiplier": 1.7, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0
}  # fmt: skip
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def _qwen2(folder: Path) -> Path:
    config = {key: each for key, each in llama_config().to_dict().items() if key not in ("model_type", "architectures")}
    return save_random(Qwen2ForCausalLM, Qwen2Config(**config), folder, 5)


def _gemma3(folder: Path, **changes: object) -> Path:
    """Seven layers, of which the sixth sees everything; norms that are exact with 1 added."""
    config = {**SIZES, "num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 12, **changes}
    save_random(Gemma3ForCausalLM, Gemma3TextConfig(**config, rope_parameters=SCALED_FULL), folder, 9)
    return _rounded_norms(folder)


def _rounded_norms(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    rounded = {each: t.bfloat16().float() if each.endswith("norm.weight") else t for each, t in tensors.items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    return folder


def _wide_gpt_oss(folder: Path) -> Path:
    return save_random_experts(folder, "gpt_oss", seed=4, hidden_size=64, intermediate_size=64)


def _family(name: str, **changes: object):
    """A family of `transformers` with the sizes of a small model."""

    def made(folder: Path) -> Path:
        config = {**SIZES, "head_dim": 16, **changes}
        kinds = (getattr(transformers, f"{name}{end}") for end in ("ForCausalLM", "Config"))
        return _rounded_norms(save_random(next(kinds), next(kinds)(**config), folder, 11))

    return made


FOLDERS = {
    "llama": lambda folder: save_random_llama(folder, seed=3),
    "llama tied": lambda folder: save_random_llama(folder, seed=4, tie_word_embeddings=True, head_dim=24),
    "qwen2": _qwen2,
    "qwen3": lambda folder: save_random_qwen3(folder, seed=6),
    "qwen3 with yarn": lambda folder: save_random_qwen3(folder, seed=6, rope_parameters=YARN),
    "gemma3": _gemma3,
    "gemma": _family("Gemma"),
    "granite": _family("Granite", **GRANITE),
    "smollm3": _family("SmolLM3"),
    "phi3": _family("Phi3", head_dim=8, sliding_window=WINDOW),
    "phi4 mini": _family("Phi3", head_dim=8, partial_rotary_factor=0.75, tie_word_embeddings=True),
    "mixtral": _family("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "ministral3": _family("Ministral3", rope_parameters=GROWING),
    "gpt-oss": lambda folder: save_random_experts(folder, "gpt_oss", seed=7),
    "gpt-oss packed": lambda folder: save_mxfp4(folder, _wide_gpt_oss(folder.with_name("stacked")), seed=5),
    "qwen3 moe": lambda folder: save_random_experts(folder, "qwen3_moe", seed=7, mlp_only_layers=[]),
}


LIKE_THEIRS = "gemma3", "gpt-oss", "granite", "ministral3"
"""Daily; of the others that they load as the same config and tensors is daily, and their logits are slow."""
SLOWER = "gemma", "smollm3", "phi4 mini", "mixtral"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_is_read_as_the_folder_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    """The same config as the engine reads it, the same tensors to the bit, whole and in parts: so the same logits."""
    folder = FOLDERS[name](tmp_path / "hub")
    made = resolve_folder(str(write_gguf(folder, tmp_path / "a.gguf")))
    ours, theirs = target_spec(made), target_spec(folder)
    assert ours.check() == theirs.check() > 0
    assert ours.config.layers == theirs.config.layers
    assert ours.config.norm_eps == theirs.config.norm_eps
    tensors = load_file(folder / "model.safetensors")
    with open_file(tensor_files(made).popitem()[1]) as file:
        assert sorted(file.keys()) == sorted(tensors)
        for each, tensor in tensors.items():
            assert torch.equal(file.get_tensor(each), tensor), each
            assert torch.equal(file.get_slice(each)[1:3], tensor[1:3]), each
            if tensor.dim() == 2:
                assert torch.equal(file.get_slice(each)[:, 2:5], tensor[:, 2:5]), each
                assert torch.equal(file.get_slice(each)[3:9, :], tensor[3:9]), each


@pytest.mark.parametrize("name", [*LIKE_THEIRS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWER)])
def test_a_files_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """float64, but for what it takes in float32 (norms, rotations), past windows; tokens equal, of trees too."""
    folder = FOLDERS[name](tmp_path / "hub")
    file = write_gguf(folder, tmp_path / "a.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    (prompt,) = Pair(folder, folder).prompts((41,))
    llm = LLM(str(file), **OPTIONS, graphs="off")
    seen = record_logits(llm)
    (output,) = llm.generate([prompt], greedy(16))
    ours = torch.cat([logits[0] for logits in seen])
    with torch.no_grad():
        theirs = model(torch.tensor([[*prompt, *output.token_ids[:-1]]])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert list(output.token_ids) == theirs[len(prompt) - 1 :].argmax(1).tolist()
    trees = LLM(str(file), speculative_algorithm="NGRAM", **OPTIONS).generate([prompt], greedy(16))
    assert tokens(trees) == tokens([output])


def test_a_quantized_file_generates_as_what_it_decodes_to(tmp_path: Path) -> None:
    """Q8_0; trees of a head and of n-grams choose the tokens of plain decoding."""
    folder = save_random_llama(tmp_path / "hub", seed=8, vocab_size=12, intermediate_size=64)
    file = write_gguf(folder, tmp_path / "a.gguf", "Q8_0")
    head = save_random_head(tmp_path / "head", folder, draft_vocab=11, seed=2)
    with open_file(file) as opened:
        decoded = {name: opened.get_tensor(name) for name in list(opened.keys())}
    assert not torch.equal(decoded["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])
    shutil.copytree(folder, tmp_path / "decoded")
    save_file(decoded, tmp_path / "decoded" / "model.safetensors", {"format": "pt"})
    prompts = Pair(folder, head).prompts((5, 17))

    def of(model: Path, **more: object) -> list[tuple[int, ...]]:
        return tokens(LLM(str(model), **OPTIONS, **more).generate(prompts, greedy(24)))

    expected = of(tmp_path / "decoded")
    assert of(file) == of(file, draft=str(head)) == of(file, speculative_algorithm="NGRAM") == expected


def test_experts_in_mxfp4_stay_packed_where_all_of_a_layer_are(tmp_path: Path) -> None:
    """A file with all in MXFP4, with some and with none is the model that it was made from; by the library's bits."""
    folder = FOLDERS["gpt-oss packed"](tmp_path / "hub")
    (prompt,) = Pair(folder, folder).prompts((41,))
    expected = tokens(LLM(str(folder), **OPTIONS).generate([prompt], greedy(12)))
    layers = tuple(f"blk.{layer}." for layer in range(4))
    some = ("blk.1.ffn_up", "blk.2.ffn_down", "blk.3.")
    for unpacked, packed in (((), "0123"), (some, "0"), (layers, "")):
        file = write_gguf(folder, tmp_path / f"{len(unpacked)}.gguf", unpacked=unpacked)
        made = resolve_folder(str(file))
        found = sorted(name.split(".")[2] for name in tensor_files(made) if name.endswith("_blocks"))
        assert found == sorted(2 * packed)
        assert tokens(LLM(str(file), **OPTIONS).generate([prompt], greedy(12))) == expected
    tree = LLM(str(tmp_path / "0.gguf"), speculative_algorithm="NGRAM", **OPTIONS)
    assert tokens(tree.generate([prompt], greedy(12))) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpt-oss.rope.freq_base_swa": 5.0}, "rope.freq_base_swa other than"),
        ({"gpt-oss.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"gpt-oss.attention.sliding_window": 0}, "attention.sliding_window must be an integer above 0"),
        ({"-": "blk.1.ffn_up_exps.weight"}, "tensor blk.1.ffn_up_exps.weight is missing"),
        ({"-": "blk.2.ffn_down_exps.bias"}, "tensor blk.2.ffn_down_exps.bias is missing"),
        ({"-": "blk.0.attn_sinks.weight"}, "missing tensor model.layers.0.self_attn.sinks"),
        ({"+": ("blk.0.ffn_norm.weight", (64,))}, "blk.0.ffn_norm.weight is there under another name too"),
        ({"=": ("blk.0.ffn_gate_exps.bias", (5, 31))}, r"ffn_up_exps.bias of experts: shape \(5, 31\) and \(5, 32\)"),
        ({"=": ("blk.0.ffn_down_exps.weight", (5, 64))}, r"ffn_down_exps.weight of experts: shape \(5, 64\)"),
        ({"=": ("blk.0.ffn_down_exps.weight", (2**20, 1, 1))}, "has shape"),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_name(changes: dict, words: str, tmp_path: Path) -> None:
    """Numbers that no rule here has, tensors that are missing, twice, or of another shape, before weights are read."""
    with pytest.raises(CheckpointError, match=words):
        target_spec(resolve_folder(str(_changed(FOLDERS["gpt-oss"](tmp_path / "hub"), tmp_path, changes)))).check()


def _changed(folder: Path, place: Path, changes: dict) -> Path:
    """A folder's file with other metadata, without a tensor ("-"), with one more ("+"), or with one of zeros ("=")."""
    file = place / "a.gguf"
    with pytest.MonkeyPatch.context() as patch:
        added, values = gguf.GGUFWriter.add_tensor, gguf.GGUFWriter.add_key_value

        def add_tensor(writer, name, tensor, **options):
            shape = next((changes[key][1] for key in "=" if changes.get(key, ("",))[0] == name), None)
            if changes.get("-") != name:
                added(writer, name, tensor if shape is None else numpy.zeros(shape, "float32"), **options)

        def write(writer, *args, real=gguf.GGUFWriter.write_header_to_file, **options):
            if "+" in changes:
                added(writer, changes["+"][0], numpy.zeros(changes["+"][1], "float32"))
            for key, value in changes.items():
                if "." in key:
                    writer.kv_data[0].pop(key, None)
                    kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
                    values(writer, key, value, kind)
            return real(writer, *args, **options)

        patch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", write)
        return write_gguf(folder, file)


def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    """A table is read in pieces; a file that became shorter meanwhile is an error."""
    folder = save_random_llama(tmp_path / "hub", seed=3)
    made = resolve_folder(str(write_gguf(folder, tmp_path / "a.gguf")))
    name = "model.embed_tokens.weight"
    wanted = {each: TensorSpec((), (), read=False) for each in load_file(folder / "model.safetensors")}
    wanted[name] = TensorSpec((211, 64), ("F32",))
    with open_tensors(made, wanted) as fetch:
        assert torch.equal(fetch(name, Span(0, 7, 9)), load_file(folder / "model.safetensors")[name][7:9])
        with (tmp_path / "a.gguf").open("r+b") as file:
            file.truncate(64)
        with pytest.raises(CheckpointError, match="changed while it was read"):
            fetch(name, None)


def test_factors_of_llama_3_1_become_its_scaled_rope(tmp_path: Path) -> None:
    """llama.cpp stores a factor a frequency; factors of another rule are refused."""
    folder = save_random_llama(tmp_path / "hub", seed=3, rope_parameters=LLAMA3)
    spec = target_spec(folder).config.layers[0].attention.rope
    config = json.loads((folder / "config.json").read_text())
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](llama_config(rope_parameters=LLAMA3), "cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    for factors, words in (
        (plain / scaled, None),
        (plain / scaled * torch.linspace(1, 2, 8), "not those of Llama 3.1"),
    ):
        path = tmp_path / f"{words}.gguf"
        real = gguf.GGUFWriter.write_header_to_file

        def with_factors(writer, *args, found=factors, real=real, **options):
            writer.add_tensor("rope_freqs.weight", found.numpy())
            return real(writer, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
            write_gguf(folder, path)
        assert config["rope_parameters"]["rope_type"] == "llama3"
        if words is None:
            assert target_spec(resolve_folder(str(path))).config.layers[0].attention.rope == spec
        else:
            with pytest.raises(CheckpointError, match=words):
                resolve_folder(str(path))


def test_a_folder_with_several_files_needs_a_quantization(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file is taken; of several `:QUANT` names one; what it does not hold is refused."""
    folder = save_random_llama(tmp_path / "hub", seed=3, intermediate_size=64)
    models = tmp_path / "models"
    models.mkdir()
    write_gguf(folder, models / "tiny-Q8_0.gguf", "Q8_0")
    (models / "mmproj-tiny.gguf").touch()
    assert stored_files(resolve_folder(str(models))).numbers["Q8_0"] > 0
    write_gguf(folder, models / "tiny-f16.gguf", "F16")
    assert set(stored_files(resolve_folder(f"{models}:F16")).numbers) == {"F16", "F32"}
    refused(capsys, ["generate", str(models), "--prompt", "a"], "several GGUF files", ":QUANT", "tiny-f16.gguf")
    refused(capsys, ["generate", f"{models}:Q4_K_M", "--prompt", "a"], "no GGUF file of Q4_K_M", "tiny-Q8_0.gguf")
    refused(capsys, ["generate", f"{tmp_path / 'hub'}:Q8_0", "--prompt", "a"], "no GGUF file in")
    refused(capsys, ["generate", str(tmp_path / "none.gguf"), "--prompt", "a"], "no such file")


def test_a_file_is_inspected_and_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`inspect` says the stored types; `quantize` writes a folder that loads, without a link to the file."""
    folder = save_random_llama(tmp_path / "hub", seed=3, intermediate_size=64)
    file = write_gguf(folder, tmp_path / "a.gguf", "Q8_0")
    code, out, _ = run(capsys, "inspect", file, "--context-length", "128")
    assert (code, "Q8_0" in out, "LlamaForCausalLM" in out) == (0, True, True)
    code, out, err = run(capsys, "quantize", file, "--format", "fp8", "--output", tmp_path / "fp8")
    assert code == 0, err
    assert sorted(each.name for each in (tmp_path / "fp8").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert target_spec(tmp_path / "fp8").check() > 0


def test_a_changed_file_is_another_folder(tmp_path: Path) -> None:
    """The folder is made once for a file as it is; copies have one fingerprint, another content another."""
    file = write_gguf(save_random_llama(tmp_path / "hub", seed=3), tmp_path / "a.gguf")
    first = resolve_folder(str(file))
    assert resolve_folder(str(file)) == first
    shutil.copy(file, tmp_path / "b.gguf")
    assert fingerprint(resolve_folder(str(tmp_path / "b.gguf"))) == fingerprint(first)
    found = fingerprint(first)
    file.unlink()
    write_gguf(save_random_llama(tmp_path / "other", seed=4), file)
    assert resolve_folder(str(file)) != first
    assert fingerprint(resolve_folder(str(file))) != found


def test_a_cache_that_cannot_be_written_to_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(save_random_llama(tmp_path / "hub", seed=3), tmp_path / "a.gguf")
    (tmp_path / "cache").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert target_spec(resolve_folder(str(file))).check() > 0


def test_experts_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file can hold many: their names are counted before they take memory."""
    folder = save_random_experts(tmp_path / "hub", "qwen3_moe", seed=7, mlp_only_layers=[])
    file = write_gguf(folder, tmp_path / "a.gguf")
    monkeypatch.setattr(views, "_MAX_NAMES", 100)
    with pytest.raises(CheckpointError, match="holds more than 100 tensors"):
        target_spec(resolve_folder(str(file))).check()
    with pytest.raises(CheckpointError, match="at most 4096 experts"):
        expert_names("blk.0.ffn_up_exps.weight", (4097, 1, 1), ARCHITECTURES["qwen3moe"], file)


def test_a_damaged_file_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(CheckpointError, match="damaged or unsupported GGUF file"):
        resolve_folder(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache" / "treetop" / "gguf").iterdir())


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The snapshot of `an/model` in a cache of the hub, empty, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo, commit = tmp_path / "cache" / "models--an--model", "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    (repo / "snapshots" / commit).mkdir(parents=True)
    for kept in (hub_folder, hub_gguf):
        kept.cache_clear()
    yield repo / "snapshots" / commit
    for kept in (hub_folder, hub_gguf):
        kept.cache_clear()


def test_an_id_with_a_quantization_is_one_file_of_the_cache(hub_cache: Path, tmp_path: Path) -> None:
    """Without a network, what the cache has: by its quantization, or the only one; the rest are errors."""
    file = write_gguf(save_random_llama(tmp_path / "hub", seed=3, intermediate_size=64), tmp_path / "a.gguf", "Q8_0")
    shutil.copy(file, hub_cache / "tiny-Q8_0.gguf")
    assert target_spec(resolve_folder("an/model:Q8_0")).check() > 0
    assert resolve_folder("an/model") == resolve_folder("an/model:q8_0") == resolve_folder("an/model@main:Q8_0")
    with pytest.raises(CheckpointError, match=r"model an/model:Q4_0: no GGUF file of Q4_0; there are tiny-Q8_0\.gguf"):
        resolve_folder("an/model:Q4_0")
    with pytest.raises(CheckpointError, match=r"model an/other:Q4_0: .*not in the cache"):
        resolve_folder("an/other:Q4_0")


def test_only_the_file_that_is_needed_is_fetched(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub says which files there are; of those in folders, and of several without a quantization, none is taken."""
    source = write_gguf(save_random_llama(tmp_path / "hub", seed=3), tmp_path / "a.gguf")
    asked = []

    def download(repo: str, **options: object) -> str:
        asked.append((repo, options["revision"], options["allow_patterns"]))
        shutil.copy(source, hub_cache / "tiny-Q4_K_M.gguf")
        return str(hub_cache)

    listed = ["README.md", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-f16.gguf", "old/tiny-Q4_K_M.gguf"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert target_spec(resolve_folder("an/model@v1:Q4_K_M")).check() > 0
    assert asked == [("an/model", "v1", ["tiny-Q4_K_M.gguf"])]
    with pytest.raises(CheckpointError, match="several GGUF files: add :QUANT"):
        resolve_folder("an/model")
