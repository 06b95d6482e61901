"""Formats that people deploy: a weight is what the format's library makes of it, and models are what they then are."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from support.engines import build, greedy, tokens
from support.examples import fewer
from support.families import FAMILIES, Saved
from support.grids import few_of
from support.logits import record_logits
from support.quantized import awq, by_library, fp8_blocks, fp8_whole, gptq, nvfp4_of_modelopt, quantized
from support.refusing import load, refused
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head, save_random_llama
from treetop import LLM, SamplingParams
from treetop.checkpoints.fingerprint import fingerprint
from treetop.checkpoints.loader import LoadContext, load_weights, random_weights, weight_bytes
from treetop.checkpoints.params import Param, cut, stay_packed
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.weight_copies import packing
from treetop.kernels.gemm.quantized_weight import QuantScheme, factor_apart
from treetop.kernels.gemm.tiles import tile
from treetop.models.registry import target_spec
from treetop.parallel.exchange import ExchangeRank
from treetop.tools.inspect import as_text, inspect
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError
from treetop.weights.format import CheckpointTensor, Span, read_rows
from treetop.weights.packed import Packed
from treetop.weights.plain import UNQUANTIZED
from treetop.weights.registry import read_formats
from treetop_debug.model_faults import FORMAT_FAULTS

INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
FORMATS = {
    "fp8 tensor": by_library("float-quantized", torch.bfloat16, **FP8, strategy="tensor"),
    "fp8 channel": by_library("float-quantized", torch.bfloat16, **FP8, strategy="channel"),
    "fp8 channel f32": by_library("naive-quantized", **FP8, strategy="channel"),
    "fp8 blocks of ct": by_library("float-quantized", **FP8, strategy="block", block_structure=[32, 16]),
    "fp8 blocks": fp8_blocks(32, 16),
    "fp8 blocks bf16": fp8_blocks(128, 128, torch.bfloat16),
    "fp8 static": fp8_whole({"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 modelopt": fp8_whole({**MODELOPT, "quant_algo": "FP8"}),
    "w4a16": by_library("pack-quantized", torch.bfloat16, **INT4, strategy="group", group_size=32),
    "w4a16 zeros": by_library("pack-quantized", **INT4, strategy="group", group_size=32, symmetric=False),
    "w4a16 rows": by_library("pack-quantized", torch.float16, **INT4, strategy="channel"),
    "gptq": gptq(32),
    "gptq g_idx": gptq(16, act_order=True),
    "gptq v2": gptq(-1, version="gptq_v2"),
    "awq": awq(32),
    "awq rows": awq(-1),
    "nvfp4": by_library("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "nvfp4 modelopt": nvfp4_of_modelopt({**MODELOPT, "quant_algo": "NVFP4", "group_size": 16}),
    "mxfp4": by_library("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}


def read(made, stored, shape, span=None):
    """The rows that the loader would have, of a weight that is stored so."""
    (format_,) = {each.format for each in read_formats({"quantization_config": made.config}, None).rules[-1:]}
    tensors = {f"x{end}": each for end, each in stored.tensors.items()}
    source = CheckpointTensor("x.weight", shape, span=span)
    for name, each in format_.stored(source).items():
        if each.read:
            assert tuple(tensors[name].shape) in (each.shape, *each.others), name

    def fetch(name, part):
        whole = tensors[name]
        return whole if part is None else whole.narrow(part.axis, part.start, part.stop - part.start)

    return torch.cat([rows for _, rows in read_rows(format_, UNQUANTIZED, source, fetch)]), format_


def adversarial(n, k, seed=0):
    """Zero groups, a row of huge numbers, one of tiny ones, outliers."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    weight[0] = 0
    weight[1] *= 1e4
    weight[2] *= 1e-4
    weight[3, :: k // 4] = 30.0
    weight[:, -1] = 0
    return weight


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_what_the_library_makes_of_it(name):
    """Bit for bit, whole and in parts by row and by column, at sizes that are no multiples of blocks and words."""
    made = FORMATS[name]
    shapes = [(40, 2 * made.columns), (16, 7 * made.columns)]
    if "fp8" in name or name in ("w4a16", "w4a16 zeros"):
        shapes.append((13, 5 * made.columns))
    if "fp8" in name:
        shapes.append((37, 77))
    for n, k in shapes:
        stored = made.store(adversarial(n, k))
        rows, format_ = read(made, stored, (n, k))
        assert torch.equal(rows, stored.decoded)
        for axis, size in enumerate((n, k)):
            unit = format_.unit(axis)
            cuts = sorted({0, unit, size // 2 // unit * unit, size // unit * unit, size})
            for start, stop in combinations([each for each in cuts if each <= size], 2):
                part, _ = read(made, stored, (n, k), Span(axis, start, stop))
                assert torch.equal(part, stored.decoded.narrow(axis, start, stop - start))


@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 channel", "w4a16", "w4a16 rows", "nvfp4", "mxfp4"])
def test_in_the_dtype_of_its_scales_it_is_what_the_library_gives_without_more(name):
    """The library computes in the dtype of scales, FP4 in bfloat16: rounded to that once, ours are the same bits."""
    made = FORMATS[name]
    stored = made.store(adversarial(24, 2 * made.columns))
    group = made.config["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    tensors = {end[1:]: each for end, each in stored.tensors.items()}
    theirs = BaseCompressor.get_value_from_registry(group["format"]).decompress(tensors, scheme)["weight"]
    assert theirs.dtype == (torch.bfloat16 if "fp4" in name else stored.tensors[".weight_scale"].dtype)
    assert torch.equal(read(made, stored, tuple(theirs.shape))[0].to(theirs.dtype), theirs)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    target = save_random_llama(folder / "target", seed=8, vocab_size=12, intermediate_size=128)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


def assert_served_alike(pair, made, where, **options):
    """Trees of packed weights, plain decoding of decoded ones and the decoded model in float64: tokens and
    log-probabilities to the last bit."""
    folder, decoded = quantized(pair.target, where, made)
    params = SamplingParams(temperature=0.0, max_tokens=fewer(16), ignore_eos=True, logprobs=2)
    prompts = pair.prompts([9, 17, 3])
    tree, plain, wide = (
        build(Pair(each, pair.head), shape, dequantize_weights=dequantized, **options).generate(prompts, params)
        for each, shape, dequantized in (
            (folder, (4, 3, 12), False),
            (folder, None, True),
            (decoded, (4, 3, 12), True),
        )
    )
    assert tokens(tree) == tokens(plain) == tokens(wide)
    assert [each.logprobs for each in tree] == [each.logprobs for each in wide] == [each.logprobs for each in plain]
    return folder, decoded


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_is_the_decoded_one(name, pair, tmp_path):
    assert_served_alike(pair, FORMATS[name], tmp_path / "target")


@pytest.mark.parametrize(
    "name", few_of(["fp8 channel", "fp8 blocks", "w4a16 zeros", "gptq g_idx", "awq", "nvfp4", "mxfp4"], 1, 3)
)
def test_experts_are_the_decoded_ones(name, tmp_path):
    sizes = {"vocab_size": 12, "moe_intermediate_size": 64, "intermediate_size": 96}
    target = save_random_experts(tmp_path / "plain", "qwen3_moe", seed=3, **sizes)
    head = save_random_head(tmp_path / "head", target, 12, seed=2)
    assert_served_alike(Pair(target, head), FORMATS[name], tmp_path / "target")


def assert_transformers_agrees(family, made, tmp_path):
    """Logits and tokens in float64, of a prompt and of what follows, against `transformers` on the decoded weights.

    That computes some of it in float32, angles for one.
    """
    saved = FAMILIES[family].save(tmp_path / "plain", seed=5)
    folder, decoded = quantized(saved.pair.target, tmp_path / "made", made)
    formats = {param.stored.name for param in target_spec(folder).params if param.kind in ("matrix", "experts")}
    assert formats - {"plain"}
    theirs = Saved(Pair(folder, saved.pair.head), decoded, saved.architecture, saved.by_token)
    model, (prompt,) = theirs.reference(torch.float64), theirs.pair.prompts([21])
    llm = build(theirs.pair, None, graphs="off")
    seen = record_logits(llm)
    (output,) = llm.generate([prompt], greedy(6))
    ours = torch.cat([logits[0] for logits in seen])
    expected = theirs.logits(model, [*prompt, *output.token_ids[:-1]])
    torch.testing.assert_close(ours.to(expected.dtype), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    tree = build(theirs.pair, (3, 4, 14)).generate([prompt], greedy(6))
    assert tokens(tree) == [output.token_ids]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama 3", "w4a16 rows"),
        ("phi3", "fp8 channel"),
        ("qwen3 vl moe", "fp8 blocks"),
        ("minimax m2", "awq rows"),
        ("deepseek v3", "fp8 blocks"),
    ],
)
def test_a_family_is_what_transformers_makes_of_its_decoded_weights(family, name, tmp_path):
    assert_transformers_agrees(family, FORMATS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 channel", "w4a16 rows"])
@pytest.mark.parametrize("family", [name for name, tiny in FAMILIES.items() if tiny.finish.__name__ == "_as_is"])
def test_every_family_is_what_transformers_makes_of_its_decoded_weights(family, name, tmp_path):
    """Experts in one tensor are never in groups of 4 bits."""
    target = FAMILIES[family].save(tmp_path / "looked at", seed=5).pair.target
    experts = [param for param in target_spec(target).params if param.kind == "experts"]
    stacked = any(len(source.shape) == 3 for param in experts for source in param.sources)
    if stacked and name == "w4a16 rows":
        run = lambda: assert_transformers_agrees(family, FORMATS[name], tmp_path)  # noqa: E731
        refused(CheckpointError, run, "experts in one tensor")
    else:
        assert_transformers_agrees(family, FORMATS[name], tmp_path)


def folder_of(pair, made, where, config=None, **tensors):
    """A folder in a format with some tensors replaced, None removes one, and another configuration."""
    folder, _ = quantized(pair.target, where / "made", made)
    config = made.config if config is None else {**made.config, **config}
    return copy_folder(folder, where / "wrong", tensors=tensors, quantization_config=config)


UP = "model.layers.2.mlp.up_proj"
NAN = float("nan")
WRONG = [
    ("fp8 channel", {f"{UP}.weight_scale": None}, [f"missing tensor {UP}.weight_scale"]),
    ("fp8 channel", {f"{UP}.weight_scale": torch.ones(127, 1)}, [f"{UP}.weight_scale has shape"]),
    ("fp8 channel", {f"{UP}.weight_scale": torch.full((128, 1), NAN)}, [f"{UP}.weight_scale holds NaN"]),
    ("fp8 channel", {f"{UP}.weight_scale": torch.full((128, 1), 1e38)}, [UP, "NaN or infinite"]),
    ("fp8 channel", {f"{UP}.weight_scale": torch.ones(128, 1, dtype=torch.int8)}, [UP, "stored as I8"]),
    ("fp8 channel", {f"{UP}.weight": torch.ones(128, 64)}, [UP, "stored as F32, expected F8_E4M3"]),
    ("fp8 blocks", {f"{UP}.weight_scale_inv": torch.ones(4, 3)}, [f"{UP}.weight_scale_inv has shape"]),
    ("w4a16", {f"{UP}.weight_packed": torch.ones(128, 9, dtype=torch.int32)}, [f"{UP}.weight_packed has shape"]),
    ("w4a16", {f"{UP}.weight_shape": torch.tensor([128, 60])}, [f"{UP}.weight_shape says [128, 60]"]),
    ("w4a16 zeros", {f"{UP}.weight_zero_point": None}, [f"missing tensor {UP}.weight_zero_point"]),
    ("gptq", {f"{UP}.g_idx": torch.full((64,), 9, dtype=torch.int32)}, [f"{UP}.g_idx names a group"]),
    ("gptq", {f"{UP}.g_idx": torch.full((64,), -1, dtype=torch.int32)}, [f"{UP}.g_idx names a group"]),
    ("nvfp4", {f"{UP}.weight_scale": torch.zeros(128, 4, dtype=torch.uint8)}, ["stored as U8, expected F8_E4M3"]),
    ("mxfp4", {f"{UP}.weight_scale": torch.zeros(128, 2).to(torch.float8_e4m3fn)}, ["stored as F8_E4M3"]),
    ("nvfp4", {f"{UP}.weight_global_scale": torch.zeros(1)}, [UP, "NaN or infinite"]),
    ("mxfp4", {f"{UP}.weight_scale": torch.full((128, 2), 255, dtype=torch.uint8)}, [UP, "NaN or infinite"]),
    ("fp8 static", {f"{UP}.other": torch.ones(1)}, [f"unexpected tensor {UP}.other"]),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_is_wrong_in_a_file_is_named(case, pair, tmp_path):
    """Shapes, kinds and what is missing before a weight takes memory; numbers when they are read."""
    name, tensors, words = WRONG[case]
    refused(CheckpointError, load(folder_of(pair, FORMATS[name], tmp_path, **tensors)), *words)


def group(**weights):
    """A configuration of `compressed-tensors` with other weights."""
    said = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": said}}}


UNREAD = [
    ("w4a16", group(group_size=48), "not whole groups of group_size 48"),
    ("w4a16", group(group_size=0), "group_size 0"),
    ("w4a16", group(group_size="32"), "group_size '32'"),
    ("w4a16", group(num_bits=8), "'num_bits': 8"),
    ("w4a16", group(actorder="group"), "actorder 'group'"),
    ("w4a16", group(strategy="tensor"), "strategy 'tensor'"),
    ("w4a16", {"format": "marlin-24", **group()}, "format 'marlin-24'"),
    ("w4a16", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    ("w4a16", {"quantization_status": "frozen"}, "quantization_status 'frozen'"),
    ("w4a16", {"config_groups": []}, "config_groups"),
    ("w4a16", {"config_groups": {"a": {"targets": ["Linear"]}}}, "weights None"),
    ("w4a16", {"ignore": ["re:("]}, "no regular expression"),
    ("w4a16", {"ignore": "lm_head"}, "ignore must be a list"),
    ("fp8 blocks of ct", {"ignore": [1]}, "ignore must be a list"),
    ("fp8 blocks", {"weight_block_size": [0, 128]}, "weight_block_size"),
    ("fp8 blocks", {"weight_block_size": 128}, "weight_block_size"),
    ("fp8 blocks", {"fmt": "e5m2"}, "fmt 'e5m2'"),
    ("fp8 modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ("fp8 modelopt", {"quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
    ("nvfp4 modelopt", {"group_size": 32}, "group_size 32"),
    ("gptq", {"bits": 8}, "bits 8"),
    ("gptq", {"group_size": True}, "group_size True"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ("gptq", {"lm_head": True}, "lm_head True"),
    ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    ("gptq", {"modules_in_block_to_quantize": "all"}, "modules_in_block_to_quantize"),
    ("awq", {"version": "gemv"}, "version 'gemv'"),
    ("awq", {"zero_point": False}, "zero_point False"),
]


@pytest.mark.parametrize("case", range(len(UNREAD)))
def test_what_a_configuration_asks_beyond_that_is_refused_by_name(case, pair, tmp_path):
    name, config, words = UNREAD[case]
    refused(CheckpointError, load(folder_of(pair, FORMATS[name], tmp_path, config)), words)


def test_lists_say_what_stays_plain_as_their_libraries_read_them(pair, tmp_path):
    """Names and regular expressions, globs, beginnings and ends, each in its configuration."""
    modules = (
        "model.layers.1.mlp.up_proj",
        "model.layers.10.mlp.up_proj",
        "lm_head",
        "model.layers.1.self_attn.q_proj",
    )
    exact = FORMATS["w4a16"].config
    cases = [
        ({**exact, "ignore": []}, ""),
        ({**exact, "ignore": ["lm_head", "model.layers.1.mlp"]}, "2"),
        ({**exact, "ignore": ["re:.*mlp.*"]}, "01"),
        ({**exact, "ignore": ["re:model.layers.1\\."]}, "03"),
        ({**exact, "ignore": ["Linear"]}, "0123"),
        ({**FORMATS["fp8 blocks"].config, "modules_to_not_convert": ["model.layers.1"]}, "023"),
        ({**FORMATS["fp8 blocks"].config, "modules_to_not_convert": ["up_proj"]}, "012"),
        ({**FORMATS["fp8 static"].config, "ignored_layers": ["model.layers.1.mlp.up_proj"]}, "02"),
        ({**FORMATS["fp8 modelopt"].config, "ignore": ["*mlp*", "lm_head"]}, "012"),
        ({**FORMATS["awq"].config, "modules_to_not_convert": ["q_proj"]}, "23"),
        ({**FORMATS["gptq"].config, "dynamic": {"-:.*mlp": {}}}, "012"),
        ({**FORMATS["gptq"].config, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "012"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {modules[0]: {"quant_algo": "FP8"}, modules[1]: {"quant_algo": "NVFP4"}},
            },
            "23",
        ),
    ]
    image = "language_model.model.layers.1.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"
    ignoring = {**exact, "ignore": ["lm_head", "model.language_model.layers.1.mlp.up_proj"]}
    formats = read_formats({"quantization_config": ignoring}, tmp_path)
    assert {formats.of(module).name for module in (*image, "language_model.lm_head")} == {"plain"}
    for config, expected in cases:
        formats = read_formats({"quantization_config": config}, tmp_path)
        plain = [str(index) for index, module in enumerate(modules) if formats.of(module).name == "plain"]
        assert "".join(plain) == expected, config


RANKED = ["fp8 channel", "fp8 blocks", "w4a16 zeros", "gptq", "gptq g_idx", "awq", "nvfp4", "mxfp4"]


def numbers(weights, param):
    """Of a parameter, which is taken out: its product with a unit matrix, float64."""
    return weights.linear(param.name)(torch.eye(param.shape[1], dtype=torch.float64)).T


@pytest.mark.parametrize("packed", few_of(["none", "rows"], 1))
@pytest.mark.parametrize("name", RANKED)
def test_ranks_have_their_part_of_numbers_and_of_scales(name, packed, pair, tmp_path):
    """Each source is cut at multiples of its format's units."""
    folder, _ = quantized(pair.target, tmp_path / "made", FORMATS[name])
    spec, place = target_spec(folder), LoadContext(torch.float64, torch.device("cpu"), 1, packed=packed)
    quantized_params = [each for each in place.own(spec.params) if each.stored.name != "plain"]
    loaded = load_weights(folder, spec.params, place)
    whole = {param.name: numbers(loaded, param) for param in quantized_params}
    for rank in range(2):
        parallel = ExchangeRank(rank, 2, place.device, None, None)
        mine = load_weights(folder, spec.params, replace(place, parallel=parallel))
        for param in quantized_params:
            sources = cut(param, rank, 2).sources
            rows = whole[param.name].split([source.shape[0] for source in param.sources])
            spans = [source.span or Span(0, 0, source.shape[0]) for source in sources]
            expected = [each.narrow(s.axis, s.start, s.stop - s.start) for each, s in zip(rows, spans, strict=True)]
            assert torch.equal(numbers(mine, cut(param, rank, 2)), torch.cat(expected))


def test_ranks_cannot_cut_within_a_block(pair, tmp_path):
    folder, _ = quantized(pair.target, tmp_path / "made", FORMATS["fp8 blocks bf16"])
    down = next(param for param in target_spec(folder).params if param.name == "layers.0.mlp.down")
    refused(ConfigError, lambda: cut(down, 0, 2), "--tp-size 2", "down_proj", "units of 128")


BYTES = {
    "fp8 blocks": 1 + 4 / 16,
    "w4a16": 0.5 + 4 / 32,
    "awq": 0.5 + 5 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
"""Of a weight that stays packed, its scales and zeros for each group of a row, without a factor for a whole row."""


@pytest.mark.parametrize("dequantized", [True, False])
@pytest.mark.parametrize("name", BYTES)
def test_memory_is_counted_as_it_is_taken_and_inspect_says_so(name, dequantized, pair, tmp_path):
    """Loaded and with random weights; `treetop inspect` says what is decoded."""
    folder, decoded = quantized(pair.target, tmp_path / "made", FORMATS[name])
    config = EngineConfig.of(
        str(folder), draft=None, device="cpu", context_length=128, dequantize_weights=dequantized, dtype="bfloat16"
    )
    spec = target_spec(folder)
    place = LoadContext(torch.bfloat16, torch.device("cpu"), 8, packed=packing(config))
    params = place.own(spec.params)
    small = [param for param in params if param.stored.name != "plain"]
    for weights in (load_weights(folder, spec.params, place), random_weights(params, place)):
        held = sum(each.nbytes for each in weights.held.values())
        assert held == weight_bytes(params, torch.bfloat16)
        packed = sum(weights.held[param.name].nbytes for param in small)
        made = [weights.linear(param.name) for param in small]
        if dequantized:
            assert held == weight_bytes(target_spec(decoded).params, torch.bfloat16)
        else:
            rows = 4 * sum(param.shape[0] for param in small) if name == "nvfp4" else 0
            assert packed == rows + BYTES[name] * sum(param.numbers for param in small)
        taken = 1 / 32 * sum(param.numbers for param in small) if name == "awq" and not dequantized else 0
        assert sum(each.read_bytes(1) for each in made) == packed - taken, "scale and zero are two numbers of 16 bits"
        x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        sizes = [float(each(x[:, : param.shape[1]]).float().std()) for each, param in zip(made, small, strict=True)]
    assert all(0.5 < each < 2 for each in sizes), "random weights keep their input's size, about"
    report = inspect(config)
    stored = small[0].stored.name + (" decoded" if dequantized else "")
    assert set(report.target.formats) == {"plain", stored}
    assert f"{stored} " in as_text(report)
    assert report.target.weight_bytes == held
    assert plan_engine(config).use.budget.static >= held
    options = {"load_format": "dummy", "context_length": 64, "dequantize_weights": dequantized}
    llm = LLM(model=str(folder), draft=None, **options)
    assert len(llm.generate([[5, 6, 7]], greedy(4))[0].token_ids) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [("e2m1", 16, "times"), ("e2m1", 16, "over"), ("e2m1", 32, "e8m0"), ("int4", 128)])
def test_scales_that_lie_ready_in_tiles_are_counted(scheme, dtype):
    """Under `bits` on a GPU, where no sum is cut: of NVFP4 in bfloat16 5 bits a weight, of all else what is loaded."""
    held = Packed("any", QuantScheme(*scheme))
    param = Param("any", (128, 256), (), held=held)
    parts = param.empty(dtype, "cpu")
    held.fill_random(parts, torch.Generator().manual_seed(0))
    weight = held.weight(parts)
    assert tile(weight, dtype).nbytes == param.held_bytes(dtype, whole=True)
    assert tile(factor_apart(weight), dtype).nbytes == param.held_bytes(dtype)
    halves = scheme[2:] in (("times",), ("over",)) and dtype == torch.bfloat16
    assert (8 * param.held_bytes(dtype, whole=True) == 5 * param.numbers) == halves


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4 modelopt"])
def test_inspect_counts_scales_that_lie_ready(name, pair, tmp_path, monkeypatch):
    """As on a GPU, which need not be there."""
    folder, _ = quantized(pair.target, tmp_path / "made", FORMATS[name])
    monkeypatch.setattr("treetop.tools.inspect.packing", lambda config: "tiles")
    found = {}
    for exactness in ("ties", "bits"):
        options = {"dtype": "bfloat16", "exactness": exactness, "dequantize_weights": False}
        target = inspect(EngineConfig.of(str(folder), draft=None, device="cpu", **options)).target
        found[exactness] = target.weight_bytes, sum(size for each, size in target.formats.items() if each != "plain")
    params = [each for each in stay_packed(target_spec(folder).params, "tiles") if each.held.scheme is not None]
    assert found["bits"][1] == 5 / 8 * sum(each.numbers for each in params)
    assert found["bits"][0] - found["ties"][0] == found["bits"][1] - found["ties"][1] > 0


def test_quantized_copies_are_other_checkpoints_to_a_hand_over(pair, tmp_path):
    """The fingerprint that both sides compare."""
    prints = [fingerprint(pair.target)]
    for name in ("fp8 blocks", "w4a16", "gptq"):
        prints += [fingerprint(each) for each in quantized(pair.target, tmp_path / name, FORMATS[name])]
    assert len(set(prints)) == len(prints)


def test_model_optimizers_own_file_counts(pair, tmp_path):
    """`hf_quant_config.json`, where `config.json` says nothing."""
    folder, _ = quantized(pair.target, tmp_path / "made", FORMATS["fp8 modelopt"])
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    refused(CheckpointError, load(folder), "unexpected tensor", "input_scale")
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": said["ignore"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    assert {param.stored.name for param in target_spec(folder).params} == {"plain", "FP8"}


def test_a_format_that_is_taken_for_another_is_caught_by_the_check_of_tensors(pair, tmp_path):
    """Each fault at every level, and on the sound engine nothing fires."""
    mxfp4, _ = quantized(pair.target, tmp_path / "mxfp4", FORMATS["mxfp4"])
    layers = {
        **json.loads((pair.head / "config.json").read_text()),
        "quantization_config": FORMATS["fp8 channel"].config,
    }
    said = {"speculators_model_type": "eagle3", "draft_vocab_size": 11, "norm_before_residual": True}
    head = copy_folder(pair.head, tmp_path / "head", **said, transformer_layer_config=layers)
    for name, folders in (("vllm-28435", (mxfp4,)), ("vllm-25883", (pair.target, head))):
        with FORMAT_FAULTS[name].active():
            refused(CheckpointError, load(*folders), FORMAT_FAULTS[name].guard)
        load(*folders)().close()
