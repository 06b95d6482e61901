"""A format of weights that only this file knows: int8 with a scale a row, from a folder to the tokens of a tree."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from support.engines import build, greedy, tokens
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head
from treetop import LLM, SamplingParams
from treetop.bench.roofline import saved_bytes
from treetop.checkpoints.loader import LoadContext, load_weights, random_weights, weight_bytes
from treetop.checkpoints.params import Param, cut, in_formats, of_vocab
from treetop.drafts.registry import drafter_spec
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.weight_copies import product_weights
from treetop.kernels.fused import gate_mul_reference
from treetop.kernels.moe.experts import Experts, experts_reference
from treetop.models.registry import target_spec
from treetop.parallel.exchange import ExchangeRank
from treetop.tools.inspect import as_text, inspect
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase
from treetop.weights import registry
from treetop.weights.format import MAIN, CheckpointTensor, ParameterSpec, Span, TensorSpec
from treetop.weights.rules import Rule, StoredFormats, kept_plain

METHOD, SCALE = "rows-of-int8", "scale"
PLAIN_MODULES = ["lm_head", "model.layers.1.mlp", "fc"]
TREE = (4, 3, 12)


@dataclass(frozen=True)
class Int8:
    """As a checkpoint stores it. block: rows that have to stay together."""

    block: int = 1
    name: str = "int8"
    scheme = activations = None

    def stored(self, source):
        *rows, _ = source.shape
        name = f"{source.module}.weight"
        return {name: TensorSpec(source.shape, ("I8",)), f"{name}_scale": TensorSpec((*rows, 1), ("F32",))}

    def unit(self, axis):
        return self.block if axis == 0 else 1

    def decoded(self, source, span, fetch):
        raise AssertionError("nobody decodes it as it is loaded")


@dataclass(frozen=True)
class HeldInt8:
    """As it lies in memory: int8 and scales, decoded for each product."""

    name: str = "int8"
    scheme = activations = None

    def stored(self, source):
        return {}

    def unit(self, axis):
        return 1

    def parts(self, shape, dtype):
        return {MAIN: ParameterSpec(shape, torch.int8), SCALE: ParameterSpec((*shape[:-1], 1), torch.float32)}

    def read(self, stored, source, span, fetch):
        name = f"{source.module}.weight"
        return {MAIN: fetch(name, span), SCALE: fetch(f"{name}_scale", None if span and span.axis == 1 else span)}

    def columns(self, part, span):
        return span if part == MAIN else Span(1, 0, 1)

    def fill_random(self, parts, generator):
        parts[MAIN].random_(-127, 128, generator=generator)
        parts[SCALE].fill_(parts[MAIN].shape[-1] ** -0.5 / 73)

    def copy_bytes(self, weight, dtype, gpu, uncut=False):
        return 0

    def linear(self, parts, bias, kernel_context):
        return Int8Linear(parts, bias)

    def gated(self, parts, bias, kind, kernel_context):
        return Int8Gated(Int8Linear(parts, bias), kind)

    def experts(self, gate_up, down, biases, activation, kernel_context):
        def products(x, routes):
            decoded = (numbers(each, x.dtype) for each in (gate_up, down))
            return experts_reference(x, routes, Experts(*decoded, *biases, activation))

        return products


def numbers(parts, dtype):
    return parts[MAIN].to(dtype) * parts[SCALE].to(dtype)


class Int8Linear:
    def __init__(self, parts, bias):
        self.held, self.bias, self.numbers = parts, bias, parts[MAIN].numel()

    def __call__(self, x):
        return F.linear(x, numbers(self.held, x.dtype), self.bias)

    def parts(self, x):
        return self(x)[None]

    def read_bytes(self, rows):
        return sum(part.nbytes for part in self.held.values())


class Int8Gated:
    def __init__(self, linear, kind):
        self.linear, self.kind, self.numbers, self.read_bytes = linear, kind, linear.numbers, linear.read_bytes

    def __call__(self, x):
        return gate_mul_reference(self.linear(x), self.kind)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The lines in the registry, one of what is stored and one of what is held."""
    read = lambda config, where: (*kept_plain(config, "ignore", where), Rule("*", Int8()))  # noqa: E731
    monkeypatch.setitem(registry.FORMATS, METHOD, registry.Method(read, "int8 by row"))
    held = lambda stored, *_: HeldInt8() if isinstance(stored, Int8) else None  # noqa: E731
    monkeypatch.setattr(registry, "HELD", (*registry.HELD, held))


def is_quantized(name, tensor, ignored):
    inside = (f"{module}." for module in ignored)
    table = name.endswith(("embed_tokens.weight", "mlp.gate.weight"))  # looked up, or a router
    return name.endswith("weight") and tensor.dim() == 2 and not table and not name.startswith(tuple(inside))


def quantized(folder, where, ignored=PLAIN_MODULES, **changes):
    """A folder's weights in int8 at `where`, and what they then are, in 64 bits, beside it."""
    small, wide = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if is_quantized(name, tensor, ignored):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            small[name], small[f"{name}_scale"] = (tensor / scale).round().to(torch.int8), scale
            wide[name] = small[name].double() * scale.double()
    config = {"quant_method": METHOD, "ignore": ignored}
    made = copy_folder(folder, where, tensors=small, **{"quantization_config": config, **changes})
    return made, copy_folder(folder, where.with_name(f"{where.name}-decoded"), tensors=wide)


@pytest.fixture(scope="module")
def folders(strong_pair, tmp_path_factory):
    """Target and head, each in int8 and decoded; of the target a layer's feed-forward and the output are plain."""
    place = tmp_path_factory.mktemp("int8")
    return {
        "target": quantized(strong_pair.target, place / "target"),
        "head": quantized(strong_pair.head, place / "head"),
        "plain head": (strong_pair.head, strong_pair.head),
        "plain target": (strong_pair.target, strong_pair.target),
    }


@pytest.mark.parametrize(("target", "head"), [("target", "head"), ("target", "plain head"), ("plain target", "head")])
def test_a_tree_gives_what_plain_decoding_gives_and_the_decoded_model_does(folders, target, head):
    """In float64 to the last bit of the log-probabilities, whether target, head or both are quantized."""
    pair, decoded = (Pair(folders[target][i], folders[head][i]) for i in (0, 1))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    tree, plain, wide = (
        build(each, shape).generate(pair.prompts([9, 17, 3]), params)
        for each, shape in ((pair, TREE), (pair, None), (decoded, TREE))
    )
    assert tokens(tree) == tokens(plain) == tokens(wide)
    assert [each.logprobs for each in tree] == [each.logprobs for each in wide]
    assert [each.metrics.accept_lens for each in tree] == [each.metrics.accept_lens for each in wide]


def test_experts_are_served_alike(tmp_path):
    """Three tensors an expert, and routers that are not quantized whatever the list says."""
    folder = save_random_experts(tmp_path / "target", "qwen3_moe", seed=3, vocab_size=12)
    head = save_random_head(tmp_path / "head", folder, 12, seed=2)
    made, decoded = quantized(folder, tmp_path / "int8", ["lm_head"])
    pair = Pair(made, head)
    tree, plain, wide = (
        tokens(build(each, shape).generate(pair.prompts([9, 4]), greedy(16)))
        for each, shape in ((pair, TREE), (pair, None), (Pair(decoded, head), None))
    )
    assert tree == plain == wide


def test_a_heads_format_is_its_own(folders):
    """Neither is inherited, whichever folder says something."""
    target, head = (target_spec(folders[name][0]) for name in ("target", "plain target"))
    for spec, names in ((target, {"int8", "plain"}), (head, {"plain"})):
        assert {param.stored.name for param in spec.params} == names
        for name, expected in (("head", {"int8", "plain"}), ("plain head", {"plain"})):
            made = drafter_spec(folders[name][0], spec.config)
            assert {param.stored.name for param in made.params} == expected


def test_mtp_layers_may_be_in_another_format_than_their_target(folders, tmp_path):
    """By their names in the folder that holds them, whichever target they draft for."""
    plain = target_spec(folders["plain target"][0])
    projection = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    for name, ignored, formats in (
        ("mtp", ["lm_head", *(f"model.layers.{i}" for i in range(4))], ("plain", "int8")),
        ("target", ["model.layers.4"], ("int8", "plain")),
    ):
        config = {"quant_method": METHOD, "ignore": ignored}
        folder = copy_folder(plain.folder, tmp_path / name, tensors=projection, quantization_config=config)
        for target in (plain, target_spec(folder)):
            both = target_spec(folder), drafter_spec(folder, target.config, "MTP")
            found = [{p.stored.name for p in spec.params if p.kind == "matrix"} for spec in both]
            assert found == [{each} for each in formats]


def test_what_speculators_copies_of_the_target_into_a_head_is_not_the_heads(folders, tmp_path):
    """`transformer_layer_config` may be that of a quantized target; the head's tensors are plain (vllm-25883)."""
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 11, "norm_before_residual": True}
    head, target = folders["plain head"][0], target_spec(folders["target"][0])
    layers = Pair(head, head).config
    nested = {**layers, "quantization_config": {"quant_method": METHOD}}
    folder = copy_folder(head, tmp_path / "head", **config, transformer_layer_config=nested)
    assert {param.stored.name for param in drafter_spec(folder, target.config).params} == {"plain"}


def test_memory_is_counted_as_it_is_taken(folders):
    """With random weights too; where weights lie in int8 no copy in another order is counted or timed."""
    spec = target_spec(folders["target"][0])
    place = LoadContext(torch.float32, torch.device("cpu"), 8)
    params = place.held(spec.params)
    loaded, dummies = load_weights(spec.folder, spec.params, place), random_weights(params, place)
    for weights in (loaded, dummies):
        assert sum(each.nbytes for each in weights.held.values()) == weight_bytes(params, torch.float32)
    assert weight_bytes(params, torch.float32) < weight_bytes(
        target_spec(folders["plain target"][0]).params, torch.float32
    )
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert 0.7 < float(dummies.linear("layers.0.attention.output")(x).norm() / x.norm()) < 1.4
    planned = plan_engine(EngineConfig.of(str(spec.folder), draft=None, dtype="float32", device="cpu"))
    plain = [each.shape for each in product_weights(spec, None) if each.format.name == "plain"]
    assert list(planned.weights.shapes) == plain
    assert len(plain) == 3  # gate and up, down and the output


def test_inspect_says_what_is_quantized(folders):
    config = EngineConfig.of(
        str(folders["target"][0]), draft=str(folders["head"][0]), device="cpu", dtype="float32", context_length=128
    )
    report = inspect(config)
    for each in (report.target, report.draft):
        assert set(each.formats) == {"plain", "int8"}
        assert each.weight_bytes >= sum(each.formats.values())
    assert "(plain " in as_text(report)
    assert "int8 " in as_text(report)


def test_the_floor_counts_the_bytes_that_are_read(folders):
    llm = build(Pair(folders["target"][0], folders["head"][0]), TREE)
    runner = llm.engine.runner
    saved = saved_bytes(runner.target, runner.drafter, runner.drafter.spec, SpecShape(4, 3, 12), 2)
    quantized_numbers = sum(p.numbers for p in llm.engine.target.params if p.stored.name == "int8")
    rows = sum(p.shape[0] for p in llm.engine.target.params if p.stored.name == "int8")
    assert saved[Phase.VERIFY] == 7 * quantized_numbers - 4 * rows
    assert saved[Phase.DRAFT] > 0


@pytest.mark.parametrize("name", ["target", "head"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_their_part_of_numbers_and_of_scales(folders, name, size):
    """Rows of a scale each; columns, whose scale all ranks have."""
    target = target_spec(folders["target"][0])
    spec = target if name == "target" else drafter_spec(folders["head"][0], target.config)
    place = LoadContext(torch.float64, torch.device("cpu"), 1)
    whole = load_weights(spec.folder, spec.params, place)
    for rank in range(size):
        part = replace(place, parallel=ExchangeRank(rank, size, place.device, None, None))
        mine = load_weights(spec.folder, spec.params, part)
        for param in (p for p in spec.params if p.stored.name == "int8"):
            own, all_of_it = (numbers(each.held[param.name].parts, torch.float64) for each in (mine, whole))
            rows = all_of_it.split([source.shape[0] for source in param.sources])
            spans = [source.span or Span(0, 0, source.shape[0]) for source in cut(param, rank, size).sources]
            expected = [each.narrow(s.axis, s.start, s.stop - s.start) for each, s in zip(rows, spans, strict=True)]
            assert torch.equal(own, torch.cat(expected))


def test_a_vocabulary_is_not_cut_within_a_block():
    """Nine rows for two ranks are five each, which blocks of two rows do not make."""
    param = of_vocab("head", "head", 9, 4)
    assert cut(replace(param, stored=Int8(block=5)), 0, 2).shape == (5, 4)
    refused(ConfigError, lambda: cut(replace(param, stored=Int8(block=2)), 0, 2), "--tp-size 2", "head", "units of 2")


def test_one_product_is_in_one_format(folders):
    """q, k and v, or gate and up, or all of a layer's experts: what says otherwise is named."""
    source = [CheckpointTensor(f"model.layers.0.self_attn.{each}_proj.weight", (4, 4)) for each in "qk"]
    fused = Param("qkv", (8, 4), tuple(source))
    formats = StoredFormats((Rule("*.k_proj", Int8()),), "config.json")
    refused(CheckpointError, lambda: in_formats([fused], formats), "config.json", "q_proj is plain", "k_proj int8")
    experts = [
        Param(f"layers.0.mlp.{each}", (4, 4), (CheckpointTensor(f"x.experts.{each}", (4, 4)),), "experts")
        for each in ("gate_up", "down")
    ]
    formats = StoredFormats((Rule("*.down", Int8()),), "config.json")
    refused(CheckpointError, lambda: in_formats(experts, formats), "experts.gate_up is plain", "experts.down int8")
    elsewhere = [replace(experts[1], name="layers.1.mlp.down")]
    assert len(in_formats([experts[0], *elsewhere], formats)) == 2


def wrong(folder, where, words, **changes):
    made = copy_folder(folder, where, **changes)
    refused(CheckpointError, lambda: LLM(model=str(made), draft=None, context_length=64), *words)


def test_what_a_folder_lacks_is_named_before_memory_is_taken(folders, tmp_path, monkeypatch):
    """A scale that is missing or misshapen, a weight of another kind, an unknown method, a list that is none."""
    monkeypatch.setattr(Param, "empty", lambda *_: pytest.fail("took memory"))
    monkeypatch.setattr("treetop.engine.startup.weight_copies.product_weights", lambda *_: [])
    folder, name = folders["target"][0], "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{name}_scale"]
    wrong(folder, tmp_path / "a", [f"missing tensor {name}_scale"], tensors={f"{name}_scale": None})
    wrong(folder, tmp_path / "b", [f"{name}_scale", "has shape"], tensors={f"{name}_scale": scale[1:].clone()})
    wrong(folder, tmp_path / "c", [name, "stored as F32"], tensors={name: tensors[name].float()})
    wrong(folder, tmp_path / "d", ["quantization_config", METHOD, "'bnb'"], quantization_config={"quant_method": "bnb"})
    for config in ({"quant_method": [1]}, "fp8", [], {}):
        wrong(folder, tmp_path / f"e{config!s:.4}", ["quantization_config"], quantization_config=config)
    for ignored in ("lm_head", [1]):
        given = {"quant_method": METHOD, "ignore": ignored}
        wrong(folder, tmp_path / f"f{ignored}", ["ignore", "list of names"], quantization_config=given)
