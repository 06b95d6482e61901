"""A GGUF file's metadata and names become those of a folder of the hub."""

from pathlib import Path

import pytest

from treetop.checkpoints.gguf.architectures import config_of, hub_name
from treetop.checkpoints.gguf.header import Header, Stored
from treetop.types.errors import CheckpointError

_FILE = Path("m.gguf")
_SIZES = {
    "embedding_length": 576, "feed_forward_length": 1536, "block_count": 30, "attention.head_count": 9,
    "attention.head_count_kv": 3, "context_length": 8192, "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}  # fmt: skip
_TABLE = {"token_embd.weight": Stored(0, (49152, 576), 0, 0)}


def _metadata(name: str = "llama", **more: object) -> dict[str, object]:
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in (_SIZES | more).items()}


def test_metadata_becomes_the_config_of_the_same_model() -> None:
    """SmolLM2's; a theta that is not there is llama.cpp's default, and floats are as they were before float32."""
    config = config_of(Header(_metadata(**{"rope.freq_base": 100000.0}), dict(_TABLE)), _FILE)
    assert (config["hidden_size"], config["num_key_value_heads"], config["vocab_size"]) == (576, 3, 49152)
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)
    assert config_of(Header(_metadata(), dict(_TABLE)), _FILE)["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (_metadata("mamba"), "'mamba'|mamba"),
        (_metadata(**{"block_count": "9"}), "llama.block_count"),
        (_metadata(**{"rope.scaling.type": "yarn"}), "scaled RoPE"),
    ],
)
def test_what_is_not_read_is_refused_by_name(metadata: dict[str, object], words: str) -> None:
    """Another architecture, a value of another type, a scaled RoPE."""
    with pytest.raises(CheckpointError, match=words):
        config_of(Header(metadata, dict(_TABLE)), _FILE)


def test_names_of_tensors_are_those_of_the_hub() -> None:
    """Of a layer, of the whole; others are errors."""
    assert hub_name("blk.3.attn_q.bias", _FILE) == "model.layers.3.self_attn.q_proj.bias"
    assert hub_name("output.weight", _FILE) == "lm_head.weight"
    with pytest.raises(CheckpointError, match="ssm_a"):
        hub_name("blk.0.ssm_a.weight", _FILE)
