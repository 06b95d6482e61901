"""The memory of real shapes is planned right: numbers by those of `transformers`, K/V by kind of layer, windows.

Models are made on the device `meta`, which takes no memory. Sizes are the published ones, as far as model cards and
the defaults of `transformers` name them.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.examples import EVERYTHING
from support.grids import few_of
from treetop.checkpoints.loader import LoadContext, load_weights, weight_bytes
from treetop.engine.memory import DeviceMemory
from treetop.engine.startup import plan as planning
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.ids import FULL, WINDOW

GIB = 2**30
PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"


def every(count: int, period: int, *full: int) -> list[str]:
    """Layer types: full at each of these places of a period, else with a window."""
    return ["full_attention" if i % period in full else "sliding_attention" for i in range(count)]


@dataclass(frozen=True)
class Shape:
    """A published shape. config: as `transformers` writes it. kind: its class there, without the ending. kv: numbers a
    token takes, by group. window: tokens. billions: of parameters, as its name or card says, if it does. widened:
    numbers that are kept beside them: zeros, or keys' weights that are values' too."""

    architecture: str
    config: dict[str, Any]
    kind: str
    kv: dict[str, int]
    billions: float | None
    window: int | None = None
    widened: int = 0


def preset(name: str) -> dict[str, Any]:
    return json.loads((PRESETS / name / "config.json").read_text())


GEMMA = {"model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512}
SHAPES = {
    "ministral 3 8b": Shape(
        "Ministral3ForCausalLM", preset("ministral-3-8b"), "Ministral3ForCausalLM", {FULL: 34 * 2 * 8 * 128}, 8.5
    ),
    "ernie 4.5 21b a3b": Shape(
        "Ernie4_5_MoeForCausalLM",
        preset("ernie-4.5-21b-a3b"),
        "Ernie4_5_MoeForCausalLM",
        {FULL: 28 * 2 * 4 * 128},
        21.8,
    ),
    "gemma 4 26b a4b": Shape(
        "Gemma4ForCausalLM",
        preset("gemma-4-26b-a4b"),
        "Gemma4ForCausalLM",
        {FULL: 5 * 2 * 2 * 512, WINDOW: 25 * 2 * 8 * 256},
        25.2,
        window=1024,
        widened=5 * 2 * 512 * 2816,
    ),
    "gemma 4 31b": Shape(
        "Gemma4ForCausalLM",
        {
            **GEMMA,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
        "Gemma4ForCausalLM",
        {FULL: 10 * 2 * 4 * 512, WINDOW: 50 * 2 * 16 * 256},
        30.7,
        window=1024,
        widened=10 * 4 * 512 * 5376,
    ),
    "gemma 4 e2b": Shape(  # 20 of its 35 layers have no K/V
        "Gemma4ForCausalLM",
        {
            **GEMMA,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "final_logit_softcapping": 30.0,
            "layer_types": every(35, 5, 4),
        },
        "Gemma4ForCausalLM",
        {FULL: 3 * 2 * 512, WINDOW: 12 * 2 * 256},
        4.65,
        window=512,
    ),
    "laguna": Shape(  # every default of its configuration class
        "LagunaForCausalLM",
        {
            "model_type": "laguna",
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_attention_heads_per_layer": [48 if i % 4 == 0 else 64 for i in range(40)],
            "layer_types": every(40, 4, 0),
            "num_key_value_heads": 8,
            "num_experts": 256,
            "moe_intermediate_size": 512,
            "sliding_window": 512,
        },
        "LagunaForCausalLM",
        {FULL: 10 * 2 * 8 * 128, WINDOW: 30 * 2 * 8 * 128},
        33.4,
        window=512,
    ),
    "mimo v2 flash": Shape(  # values are kept as wide as keys
        "MiMoV2FlashForCausalLM",
        {
            "model_type": "mimo_v2_flash",
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
        },
        "MiMoV2FlashForCausalLM",
        {FULL: 9 * 2 * 4 * 192, WINDOW: 39 * 2 * 8 * 192},
        308.9,
        window=129,
        widened=(9 * 4 + 39 * 8) * 64 * 4096,
    ),
    "step 3.5 flash": Shape(
        "Step3p5ForCausalLM",
        {
            "model_type": "step3p5",
            "vocab_size": 128896,
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_sliding_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": every(45, 4, 0),
            "n_routed_experts": 288,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "sliding_window": 512,
            "swiglu_limits": [0.0] * 43 + [7.0] * 2,
            "swiglu_limits_shared": [0.0] * 43 + [16.0] * 2,
        },
        "Step3p7TextModel",
        {FULL: 12 * 2 * 8 * 128, WINDOW: 33 * 2 * 8 * 128},
        196.0,
        window=512,
    ),
    "exaone 4.0 32b": Shape(
        "Exaone4ForCausalLM",
        {
            "model_type": "exaone4",
            "vocab_size": 102400,
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "layer_types": every(64, 4, 3),
            "sliding_window": 4096,
        },
        "Exaone4ForCausalLM",
        {FULL: 16 * 2 * 8 * 128, WINDOW: 48 * 2 * 8 * 128},
        32.0,
        window=4096,
    ),
    "dots.llm1": Shape(
        "Dots1ForCausalLM",
        {
            "model_type": "dots1",
            "vocab_size": 152064,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "n_shared_experts": 2,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
        "Dots1ForCausalLM",
        {FULL: 62 * 2 * 32 * 128},
        142.0,
    ),
    "olmoe 1b 7b": Shape(
        "OlmoeForCausalLM",
        {
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 32768,
        },
        "OlmoeForCausalLM",
        {FULL: 16 * 2 * 16 * 128},
        6.9,
    ),
    "glm ocr": Shape(
        "GlmOcrForConditionalGeneration",
        {
            "model_type": "glm_ocr_text",
            "vocab_size": 59392,
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
        "GlmOcrTextModel",
        {FULL: 16 * 2 * 8 * 128},
        None,
    ),
}


@pytest.fixture(params=few_of([*SHAPES], *range(0, len(SHAPES), 2)), ids=lambda name: name.replace(" ", "-"))
def shape(request) -> Shape:
    return SHAPES[request.param]


def folder_of(shape: Shape, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**shape.config, "architectures": [shape.architecture]}))
    return tmp_path


def their_numbers(shape: Shape) -> int:
    """Of the model that `transformers` makes, a tied matrix once."""
    kind = shape.kind.removesuffix("ForCausalLM").removesuffix("Model")
    text = "Text" if kind.startswith("Gemma4") else ""
    own = {key: value for key, value in shape.config.items() if key not in ("architectures", "model_type")}
    config = getattr(transformers, f"{kind}{text}Config")(**own)
    with torch.device("meta"):
        model = getattr(transformers, shape.kind)(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    numbers = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in tied)
    headless = shape.kind.endswith("Model") and not config.tie_word_embeddings
    return numbers + (config.vocab_size * config.hidden_size if headless else 0)


def test_numbers_are_those_of_transformers_and_of_the_models_card(shape, tmp_path):
    """And their bytes: two of each, four of what decides choices and of norms of 1 + w."""
    spec = target_spec(folder_of(shape, tmp_path))
    ours = sum(param.numbers for param in spec.params)
    assert ours == their_numbers(shape) + shape.widened
    assert shape.billions is None or ours / 1e9 == pytest.approx(shape.billions, rel=0.02)
    wide = sum(param.numbers for param in spec.params if param.kind == "score" or param.wide)
    assert weight_bytes(spec.params, torch.bfloat16) == 2 * ours + 2 * wide
    assert weight_bytes(spec.params, torch.float32) == 4 * ours


def test_kv_is_planned_by_kind_of_layer(shape, tmp_path, monkeypatch):
    """What a token takes in each group; a window's pool holds windows, whatever the context; the rest is for the other.

    On a GPU that is not here, of 1 TiB.
    """
    monkeypatch.setattr(planning, "compute_device", lambda option: torch.device("cuda"))
    monkeypatch.setattr(planning, "fallback", lambda need: "triton")
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(1024 * GIB, 1024 * GIB))
    monkeypatch.setattr(planning, "with_copies", lambda config, place, budget, *rest: budget)
    folder = str(folder_of(shape, tmp_path))
    rows = {"context_length": 32768, "max_running_requests": 8, "page_size": 16}
    planned = planning.plan_engine(EngineConfig(folder, load_format="dummy", **rows))
    layout = planned.layout
    assert {group.name: group.numbers_per_token for group in layout.groups} == shape.kv
    assert layout.num_pages[FULL] >= 8 * layout.page_columns
    if shape.window is not None:
        assert layout.group(WINDOW).window == shape.window
        assert layout.num_pages[WINDOW] == 1 + 8 * layout.window_pages(shape.window)


MINIATURE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
SMALLER = {
    **{"num_experts": 8, "moe_num_experts": 8, "n_routed_experts": 8, "share_expert_dim": 32},
    **{"shared_expert_intermediate_size": 32, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16},
}


def test_loaded_weights_take_what_was_planned(shape, tmp_path):
    """The same layers in miniature, of which random ones are made: bytes in two dtypes."""
    here = {key: value for key, value in SMALLER.items() if shape.config.get(key)}
    small = Shape(shape.architecture, {**shape.config, **MINIATURE, **here}, shape.kind, shape.kv, shape.billions)
    spec = target_spec(folder_of(small, tmp_path))
    for dtype in (torch.float32, torch.bfloat16) if EVERYTHING else (torch.bfloat16,):
        weights = load_weights(spec.folder, spec.params, LoadContext(dtype, torch.device("cpu"), 8, dummy=True))
        assert sum(weight.nbytes for weight in weights.held.values()) == weight_bytes(spec.params, dtype)
        assert {name: prod(each.shape) for name, each in weights.held.items()} == {
            p.name: p.numbers for p in spec.params
        }
