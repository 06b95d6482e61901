"""A GGUF file's metadata and names become those of a folder of the hub."""

from pathlib import Path

import pytest

from treetop.checkpoints.gguf.architectures import ARCHITECTURES, config_of, hub_name
from treetop.checkpoints.gguf.header import Header, TensorInfo
from treetop.types.errors import CheckpointError

_FILE = Path("m.gguf")
_SIZES = {
    "embedding_length": 576, "feed_forward_length": 1536, "block_count": 30, "attention.head_count": 9,
    "attention.head_count_kv": 3, "context_length": 8192, "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}  # fmt: skip
_TABLE = {"token_embd.weight": TensorInfo(0, (49152, 576), 0, 0, _FILE)}


def _metadata(name: str = "llama", **more: object) -> dict[str, object]:
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in (_SIZES | more).items()}


_YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768
}  # fmt: skip


_GRANITE = {"attention.scale": 0.1, "embedding_scale": 12.0, "residual_scale": 0.2, "logit_scale": 8.0}


def _gemma(**more: object) -> dict[str, object]:
    return _metadata("gemma3", **{"block_count": 4, "attention.sliding_window": 512, **more})


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
        (_metadata(**{"rope.scaling.type": "longrope"}), "scaled RoPE 'longrope'.*only none, linear, yarn"),
        (_metadata(**{"rope.scaling.type": "yarn"}), r"llama\.rope\.scaling\.factor must be one float, got None"),
        (_metadata(**_YARN, **{"rope.scaling.attn_factor": 2.0}), r"rope\.scaling\.attn_factor: 2\.0"),
        (_gemma(**{"attention.sliding_window": 0}), r"gemma3\.attention\.sliding_window must be an integer above 0"),
        (
            _gemma(**{"attention.sliding_window_pattern": (1, 0)}),
            "_pattern must be .* 0 or 1 for each of 4",
        ),
        (_gemma(**{"attention.sliding_window_pattern": (2, 0, 0, 0)}), "sliding_window_pattern"),
        (_gemma(**{"attention.sliding_window_pattern": 0}), "sliding_window_pattern"),
        (_gemma(block_count=2**31), "gemma3.block_count 2147483648 is more than 1024"),
        (_gemma(**{"rope.freq_base_swa": "x"}), "rope.freq_base_swa must be one float"),
        (_metadata("granite", **_GRANITE, **{"rope.scaling.finetuned": False}), "rope.scaling.finetuned False"),
        (_metadata("granite", **{**_GRANITE, "logit_scale": 8}), "granite.logit_scale must be one float, got 8"),
        (_metadata("phi3", **{"rope.dimension_count": 65}), "phi3.rope.dimension_count 65 of heads of 64"),
        (_metadata("phi3", **{"rope.dimension_count": 0}), "phi3.rope.dimension_count must be an integer above 0"),
        (_metadata("phi3", embedding_length=4), "phi3.rope.dimension_count must be an integer above 0, got 0"),
        (_metadata("phi3", **{"attention.sliding_window": "9"}), "phi3.attention.sliding_window must be an integer"),
        (_metadata("mistral3", **{"attention.temperature_scale": 0.1}), "temperature_scale without .*type yarn"),
        (_metadata("qwen2", **_YARN, **{"rope.scaling.yarn_log_multiplier": 1.0}), "yarn_log_multiplier: 1.0 is not"),
        (_metadata(expert_count=8), "llama.expert_used_count must be an integer above 0, got None"),
        (_metadata("llama with experts"), "'llama with experts' is not supported, only llama, granite, mistral3, phi3"),
        (_gemma(final_logit_softcapping=1), "final_logit_softcapping must be one float"),
    ],
)
def test_what_is_not_read_is_refused_by_name(metadata: dict[str, object], words: str) -> None:
    """Another architecture, values of another type or out of bounds, a scaled RoPE that no rule here gives."""
    with pytest.raises(CheckpointError, match=words):
        config_of(Header(metadata, dict(_TABLE)), _FILE)


def test_scaled_rope_is_what_metadata_say() -> None:
    """YaRN with the betas of its paper where the file names none; a factor without a type is linear."""
    said = config_of(Header(_metadata(**_YARN, **{"rope.scaling.finetuned": True}), dict(_TABLE)), _FILE)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert said["rope_scaling"] == {**yarn, "beta_fast": 32.0, "beta_slow": 1.0}
    said = config_of(Header(_metadata(**{"rope.scaling.factor": 8.0}), dict(_TABLE)), _FILE)
    assert said["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_relatives_of_llama_are_told_by_their_keys() -> None:
    """Mixtral by its experts, Mistral Small 3 from Ministral 3 by its rotation, Phi's window of 0 and its share."""
    mixtral = config_of(Header(_metadata(expert_count=8, expert_used_count=2), dict(_TABLE)), _FILE)
    assert (mixtral["architectures"], mixtral["num_local_experts"]) == (["MixtralForCausalLM"], 8)
    assert config_of(Header(_metadata(expert_count=0), dict(_TABLE)), _FILE)["model_type"] == "llama"
    small = config_of(Header(_metadata("mistral3"), dict(_TABLE)), _FILE)
    assert (small["architectures"], small["sliding_window"]) == (["MistralForCausalLM"], None)
    grows = {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1}
    ministral = config_of(Header(_metadata("mistral3", **_YARN, **grows), dict(_TABLE)), _FILE)
    assert ministral["architectures"] == ["Ministral3ForCausalLM"]
    scaling = ministral["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"], scaling["llama_4_scaling_beta"]) == (1.0, 1.0, 0.1)
    phi = {"attention.sliding_window": 0, "attention.key_length": 96}
    for turned in range(2, 97, 2):
        said = config_of(Header(_metadata("phi3", **phi, **{"rope.dimension_count": turned}), dict(_TABLE)), _FILE)
        assert (said["sliding_window"], int(96 * said["partial_rotary_factor"])) == (None, turned)


def test_gemma_3_is_told_by_what_llama_cpp_tells_it_by() -> None:
    """Its scores' scale by the number of layers, windows in five of six layers, the theta of these where it is said."""
    said = config_of(Header(_gemma(block_count=12, **{"attention.key_length": 256}), dict(_TABLE)), _FILE)
    assert [index for index, kind in enumerate(said["layer_types"]) if kind == "full_attention"] == [5, 11]
    assert (said["query_pre_attn_scalar"], said["rope_local_base_freq"], said["sliding_window"]) == (256, 1e4, 512)
    large = _gemma(block_count=62, embedding_length=5376, **{"attention.head_count": 32, "attention.key_length": 128})
    assert config_of(Header(large, dict(_TABLE)), _FILE)["query_pre_attn_scalar"] == 168
    pattern = {"attention.sliding_window_pattern": (True, False, False, True), "rope.freq_base_swa": 5e4}
    said = config_of(Header(_gemma(**pattern), dict(_TABLE)), _FILE)
    assert [kind[0] for kind in said["layer_types"]] == ["s", "f", "f", "s"]
    assert said["rope_local_base_freq"] == 5e4
    plain = _gemma()
    del plain["gemma3.attention.sliding_window"]
    said = config_of(Header(plain, dict(_TABLE)), _FILE)
    assert (set(said["layer_types"]), "sliding_window" in said) == ({"full_attention"}, False)


def test_names_of_tensors_are_those_of_the_hub() -> None:
    """Of a layer, of the whole; others are errors, also those that another architecture has."""
    llama, gemma = ARCHITECTURES["llama"], ARCHITECTURES["gemma3"]
    assert hub_name("blk.3.attn_q.bias", llama, _FILE) == "model.layers.3.self_attn.q_proj.bias"
    assert hub_name("output.weight", llama, _FILE) == "lm_head.weight"
    assert hub_name("blk.0.ffn_norm.weight", llama, _FILE) == "model.layers.0.post_attention_layernorm.weight"
    assert hub_name("blk.0.ffn_norm.weight", gemma, _FILE) == "model.layers.0.pre_feedforward_layernorm.weight"
    for name in ("blk.0.ssm_a.weight", "blk.0.post_ffw_norm.weight"):
        with pytest.raises(CheckpointError, match=name):
            hub_name(name, llama, _FILE)
