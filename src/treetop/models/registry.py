"""Architectures by name: what each makes of its config, and the rest of a target before its weights are read."""

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

import torch

from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import Config
from treetop.checkpoints.json_file import custom_code
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, stay_packed
from treetop.kernels.moe.routes import RouterSpec
from treetop.kernels.table import Ops
from treetop.models.config import ModelConfig, read_config
from treetop.models.decoder import Decoder, decoder_params, unused_tensors
from treetop.models.families import (
    deepseek,
    ernie,
    exaone,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    hy3,
    laguna,
    layered,
    llama,
    llama4,
    longcat,
    mimo_v2,
    mistral,
    mixtral,
    muse,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    side_by_side,
    smollm3,
    ungated,
)
from treetop.models.families.hybrids import bailing, kimi_linear, lfm2, mamba, minimax, nemotron_h, olmo_hybrid
from treetop.models.multimodal import TEXT_ALONE, TOWERS, StoredNames, names_in, text_config
from treetop.models.refused import refuse_adapter, refuse_by_key, refuse_by_name
from treetop.models.target import Target
from treetop.models.tied_head import HEAD, holds_own_head
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import Packing
from treetop.weights.held import Weights
from treetop.weights.kv_scales import all_names

_log = logging.getLogger("treetop")


@dataclass(frozen=True, slots=True)
class Family:
    """A family of targets.

    read: its config.json, whose path errors name.
    about: what differs from Llama, a few words.
    params: what it consists of.
    unused: tensors that a file may hold without a use, and prefixes of such, which end with a dot.
    build: the model from its weights, the states that a drafter reads, and where it runs.
    text_of: of a folder with images or sound, the `model_type`s of its language model, which `read` reads; () of one of
        text alone.
    mtp: published folders hold MTP layers.
    keys: that it reads, though they are refused where nobody does.
    """

    read: Callable[[Config, Path], ModelConfig]
    about: str
    params: Callable[[ModelConfig], list[Param]] = decoder_params
    unused: Callable[[ModelConfig], set[str]] = unused_tensors
    build: Callable[[ModelConfig, Weights, tuple[int, ...], LoadContext, Ops], Target] = Decoder
    text_of: tuple[str, ...] = ()
    mtp: bool = False
    keys: tuple[str, ...] = ()


_COMPRESSED = ("kv_lora_rank",)
_SPARSE = (*_COMPRESSED, "index_topk")
_LINEAR = ("linear_num_key_heads",)
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        deepseek.read_v2, "compressed attention (MLA), routed and shared experts; V2-Lite too", keys=_COMPRESSED
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek.read_v3,
        "compressed attention (MLA), experts in groups; R1 and Kimi-K2 too",
        mtp=True,
        keys=_COMPRESSED,
    ),
    "DeepseekV32ForCausalLM": Family(
        deepseek.read_v32, "DeepSeek V3 with sparse attention (DSA): an indexer in each layer", mtp=True, keys=_SPARSE
    ),
    "GlmMoeDsaForCausalLM": Family(
        deepseek.read_glm_dsa, "compressed, sparse attention (DSA), experts: GLM-5, 5.1, 5.2", mtp=True, keys=_SPARSE
    ),
    "Glm4MoeLiteForCausalLM": Family(
        deepseek.read_glm, "compressed attention (MLA), experts: GLM-4.7-Flash", mtp=True, keys=_COMPRESSED
    ),
    "Mistral4ForCausalLM": Family(
        mistral.read_4, "compressed attention (MLA), queries scaled by position, experts", keys=_COMPRESSED
    ),
    "YoutuForCausalLM": Family(deepseek.read_youtu, "compressed attention (MLA)", keys=_COMPRESSED),
    "MiniCPM3ForCausalLM": Family(
        deepseek.read_minicpm, "compressed attention (MLA), multipliers: MiniCPM3", keys=_COMPRESSED
    ),
    "LongcatFlashForCausalLM": Family(
        longcat.read,
        "compressed attention (MLA) with scaled latents, experts beside two layers, some without weights",
        longcat.params,
        longcat.unused,
        mtp=True,
        keys=_COMPRESSED,
    ),
    "KimiK25ForConditionalGeneration": Family(
        deepseek.read_v3, "the text of Kimi-K2.5 and later", text_of=("kimi_k2", "deepseek_v3"), keys=_COMPRESSED
    ),
    "Glm4MoeForCausalLM": Family(
        glm4_moe.read, "half of a head has RoPE, routed and shared experts", unused=glm4_moe.unused, mtp=True
    ),
    "GptOssForCausalLM": Family(gpt_oss.read, "windows in every other layer, sinks, biases, experts"),
    "Lfm2ForCausalLM": Family(
        lfm2.read,
        "short convolutions among attention, norms of heads: LFM2 and 2.5",
        lfm2.params,
        keys=("conv_L_cache",),
    ),
    "Lfm2MoeForCausalLM": Family(lfm2.read_moe, "LFM2 with experts: 8B-A1B", lfm2.params, keys=("conv_L_cache",)),
    "LlamaForCausalLM": Family(llama.read, "the plain decoder: Llama 2, 3 and what is published as it"),
    "Llama4ForCausalLM": Family(llama4.read, "chunks, NoPE layers, experts whose inputs are weighted", llama4.params),
    "Llama4ForConditionalGeneration": Family(
        llama4.read, "the text of Llama 4: Scout and Maverick", llama4.params, text_of=("llama4_text",)
    ),
    "MistralForCausalLM": Family(mistral.read, "a window in all layers, or none"),
    "Qwen2ForCausalLM": Family(qwen2.read, "biases of q, k and v, windows in later layers"),
    "Qwen3ForCausalLM": Family(qwen3.read, "norms of heads, windows in later layers"),
    "Gemma3ForCausalLM": Family(gemma3.read, "windows, norms on both sides, two rotations, norms of 1 + w"),
    "Gemma4ForCausalLM": Family(
        gemma4.read, "wider full layers, shared K/V, embeddings by layer, experts, capped logits", unused=gemma4.unused
    ),
    "LagunaForCausalLM": Family(laguna.read, "heads by kind of layer, gated attention, windows, experts"),
    "MiMoV2FlashForCausalLM": Family(
        mimo_v2.read, "windows with sinks, narrow values, experts", unused=mimo_v2.unused, mtp=True
    ),
    "MiMoV2ForCausalLM": Family(
        mimo_v2.read,
        "the text of MiMo-V2.5 and V2.5-Pro: MiMo-V2 with q, k and v in one tensor",
        unused=mimo_v2.unused,
        text_of=("mimo_v2",),
        mtp=True,
    ),
    "Ministral3ForCausalLM": Family(mistral.read_3, "Mistral with queries scaled by position"),
    "Ernie4_5_MoeForCausalLM": Family(
        ernie.read_moe, "ERNIE with experts, whose router corrects a softmax", unused=ernie.unused, mtp=True
    ),
    "Glm4ForCausalLM": Family(glm4.read, "half of a head has RoPE, in pairs; norms on both sides"),
    "MiMoForCausalLM": Family(
        qwen2.read_mimo, "Qwen2 with layers that predict further tokens", unused=qwen2.unused_mimo, mtp=True
    ),
    "Qwen3MoeForCausalLM": Family(qwen3_moe.read, "norms of heads, experts; Qwen3-Coder too"),
    "Qwen3NextForCausalLM": Family(
        qwen3_next.read_next,
        "linear attention (gated delta nets) in three layers of four, routed and shared experts; Coder-Next too",
        unused=qwen3_next.unused,
        mtp=True,
        keys=_LINEAR,
    ),
    "Qwen3_5ForCausalLM": Family(
        qwen3_next.read_dense,
        "linear attention (gated delta nets) in three layers of four: Qwen3.5, 3.6 and 3.8",
        unused=qwen3_next.unused,
        mtp=True,
        keys=_LINEAR,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        qwen3_next.read_moe, "Qwen3.5 with experts", unused=qwen3_next.unused, mtp=True, keys=_LINEAR
    ),
    "Ernie4_5ForCausalLM": Family(ernie.read, "interleaved RoPE, biases"),
    "GraniteForCausalLM": Family(granite.read, "four multipliers: embeddings, scores, what layers add, logits"),
    "HyperCLOVAXForCausalLM": Family(
        granite.read_hyperclova, "Granite's multipliers, norms on both sides of a layer's halves"
    ),
    "GraniteMoeForCausalLM": Family(granite.read_moe, "Granite with experts in every layer"),
    "GraniteMoeHybridForCausalLM": Family(
        granite.read_4, "Granite 4: Mamba-2 among attention, or attention alone; experts", keys=mamba.KEYS
    ),
    "NemotronHForCausalLM": Family(
        nemotron_h.read,
        "layers of Mamba-2, attention, feed-forward or experts alone: Nemotron-H, Nano 2, Nemotron 3",
        nemotron_h.params,
        nemotron_h.unused,
        mtp=True,
        keys=mamba.KEYS,
    ),
    "KimiLinearForCausalLM": Family(
        kimi_linear.read,
        "Kimi delta attention (KDA) beside compressed attention (MLA), experts",
        keys=_COMPRESSED,
    ),
    "BailingMoeV3ForCausalLM": Family(
        bailing.read,
        "Kimi delta attention (KDA) with bounded decays beside gated compressed attention (MLA): Ling 3.0",
        params=bailing.params,
        keys=_COMPRESSED,
    ),
    "BailingHybridForCausalLM": Family(
        bailing.read,
        "Ling 3.0 as `transformers` calls it",
        params=bailing.params,
        keys=_COMPRESSED,
    ),
    "MiniMaxForCausalLM": Family(
        minimax.read, "lightning attention among attention, experts: MiniMax-01", unused=minimax.unused
    ),
    "MiniMaxText01ForCausalLM": Family(minimax.read, "MiniMax-01 as first published", unused=minimax.unused),
    "MiniMaxM1ForCausalLM": Family(minimax.read, "MiniMax-M1: MiniMax-01's layers", unused=minimax.unused),
    "OlmoHybridForCausalLM": Family(
        olmo_hybrid.read, "linear attention (gated delta nets) among attention of OLMo 3", keys=_LINEAR
    ),
    "BambaForCausalLM": Family(
        mamba.read_bamba, "Mamba-2 among attention, of which half of a head has RoPE", mamba.params, keys=mamba.KEYS
    ),
    "FalconH1ForCausalLM": Family(
        mamba.read_falcon, "Mamba-2 beside attention in each layer, multipliers", mamba.params, keys=mamba.KEYS
    ),
    "MiniMaxM2ForCausalLM": Family(
        mixtral.read_minimax, "norms of all queries and all keys, part of a head has RoPE, experts"
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        hunyuan.read, "norms of heads after the rotation: Hunyuan 0.5B to 7B, MT", hunyuan.params
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        hunyuan.read_moe, "norms of heads after the rotation, routed and shared experts: A13B", hunyuan.params
    ),
    "HYV3ForCausalLM": Family(hy3.read, "norms of heads, routed and shared experts: Hy3", unused=hy3.unused, mtp=True),
    "MixtralForCausalLM": Family(mixtral.read, "experts in every layer, perhaps a window"),
    "Olmo2ForCausalLM": Family(olmo.read_2, "norms behind layers alone, norms of all queries and all keys"),
    "Olmo3ForCausalLM": Family(olmo.read_3, "OLMo 2 with windows in three layers of four"),
    "Phi3ForCausalLM": Family(
        phi3.read, "q, k and v in one tensor, part of a head has RoPE, perhaps a window; Phi-4 too"
    ),
    "SeedOssForCausalLM": Family(llama.read_seed_oss, "biases of q, k and v, wide heads"),
    "CwmForCausalLM": Family(layered.read_cwm, "windows in three layers of four"),
    "Dots1ForCausalLM": Family(layered.read_dots, "norms of heads, routed and shared experts: dots.llm1"),
    "Exaone4ForCausalLM": Family(exaone.read, "norms behind layers, windows in RoPE layers"),
    "ExaoneMoeForCausalLM": Family(
        exaone.read_moe, "K-EXAONE: the attention of EXAONE 4, experts", unused=exaone.unused_moe
    ),
    "FlexOlmoForCausalLM": Family(olmo.read_flex, "OLMo 2 with experts in every layer"),
    "GemmaForCausalLM": Family(gemma3.read_1, "scaled embeddings, norms of 1 + w"),
    "Gemma2ForCausalLM": Family(
        gemma3.read_2, "windows, norms on both sides, capped scores and logits, norms of 1 + w"
    ),
    "GlmForCausalLM": Family(glm4.read_2024, "GLM-4 of 2024: half of a head has RoPE, in pairs"),
    "HeliumForCausalLM": Family(ernie.read_helium, "interleaved RoPE"),
    "MellumForCausalLM": Family(
        layered.read_mellum,
        "norms of heads, windows, experts, a rotation by kind of layer",
        unused=layered.unused_mellum,
    ),
    "MinistralForCausalLM": Family(layered.read_ministral, "Mistral with windows in some layers"),
    "OlmoeForCausalLM": Family(olmo.read_moe, "norms of all queries and all keys, experts in every layer"),
    "SolarOpenForCausalLM": Family(layered.read_solar, "experts of DeepSeek-V3 in every layer"),
    "ApertusForCausalLM": Family(ungated.read_apertus, "norms of heads, a feed-forward without a gate (xIELU)"),
    "ArceeForCausalLM": Family(ungated.read_arcee, "a feed-forward without a gate (squared ReLU)"),
    "NemotronForCausalLM": Family(
        ungated.read_nemotron, "norms that subtract the mean, a feed-forward without a gate, half of a head has RoPE"
    ),
    "Starcoder2ForCausalLM": Family(
        ungated.read_starcoder, "norms that subtract the mean, biases, a feed-forward without a gate, perhaps a window"
    ),
    "CohereForCausalLM": Family(
        side_by_side.read_cohere, "attention beside feed-forward, norms that subtract the mean: Command R, Aya"
    ),
    "Cohere2ForCausalLM": Family(
        side_by_side.read_cohere_2, "Cohere with windows in RoPE layers, NoPE in the others: Command R7B and A"
    ),
    "FalconForCausalLM": Family(
        side_by_side.read_falcon, "attention beside feed-forward, one key or few, no gate", side_by_side.falcon_params
    ),
    "GPTNeoXForCausalLM": Family(
        side_by_side.read_neox,
        "attention beside feed-forward, a quarter of a head has RoPE, biases, no gate: Pythia too",
        side_by_side.neox_params,
        side_by_side.neox_unused,
    ),
    "PhiForCausalLM": Family(
        side_by_side.read_phi, "attention beside feed-forward, biases, no gate: Phi-1 and 2", side_by_side.phi_params
    ),
    "Qwen2MoeForCausalLM": Family(
        qwen2.read_moe, "biases of q, k and v, experts and a shared one with a gate of its own"
    ),
    "SmolLM3ForCausalLM": Family(smollm3.read, "NoPE in every fourth layer"),
    "Gemma3ForConditionalGeneration": Family(gemma3.read, "the text of Gemma 3", text_of=("gemma3_text",)),
    "Gemma4ForConditionalGeneration": Family(
        gemma4.read, "the text of Gemma 4", unused=gemma4.unused, text_of=("gemma4_text",)
    ),
    "Gemma4UnifiedForConditionalGeneration": Family(
        gemma4.read_unified, "the text of Gemma 4 12B", unused=gemma4.unused, text_of=("gemma4_unified_text",)
    ),
    "Glm4vForConditionalGeneration": Family(glm4.read_vl, "the text of GLM-4.1V", text_of=("glm4v_text",)),
    "Glm46VForConditionalGeneration": Family(glm4.read_vl, "the text of GLM-4.6V-Flash", text_of=("glm4v_text",)),
    "Glm4vMoeForConditionalGeneration": Family(
        glm4_moe.read_vl, "the text of GLM-4.5V and 4.6V", unused=glm4_moe.unused, text_of=("glm4v_moe_text",)
    ),
    "GlmOcrForConditionalGeneration": Family(
        glm4.read_ocr, "the text of GLM-OCR", unused=glm4.unused_of_ocr, text_of=("glm_ocr_text",), mtp=True
    ),
    "Mistral3ForConditionalGeneration": Family(
        mistral.read_text,
        "the text of Mistral Small 3.1, 3.2 and 4 and Medium 3.5",
        text_of=("mistral", "ministral3", "mistral4"),
        keys=_COMPRESSED,
    ),
    "MuseGlimmerForConditionalGeneration": Family(
        muse.read,
        "the text of Muse-Glimmer: normed embeddings, windows, gated attention, capped logits",
        muse.params,
        text_of=("muse_glimmer_text",),
    ),
    "Step3p5ForCausalLM": Family(
        laguna.read_step, "heads by kind of layer, gated attention, windows, limited experts", mtp=True
    ),
    "Step3p7ForConditionalGeneration": Family(
        laguna.read_step, "the text of Step-3.7", text_of=("step3p5", "step3p5_text", "step3p7_text"), mtp=True
    ),
    "Qwen2VLForConditionalGeneration": Family(qwen2.read, "the text of Qwen2-VL", text_of=("qwen2_vl_text",)),
    "Qwen2_5_VLForConditionalGeneration": Family(qwen2.read, "the text of Qwen2.5-VL", text_of=("qwen2_5_vl_text",)),
    "Qwen3VLForConditionalGeneration": Family(qwen3.read, "the text of Qwen3-VL", text_of=("qwen3_vl_text",)),
    "Qwen3_5ForConditionalGeneration": Family(
        qwen3_next.read_dense,
        "the text of Qwen3.5, 3.6 and 3.8",
        unused=qwen3_next.unused,
        text_of=("qwen3_5_text", "qwen3_5"),
        mtp=True,
        keys=_LINEAR,
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        qwen3_next.read_moe,
        "the text of Qwen3.5 and 3.6 with experts",
        unused=qwen3_next.unused,
        text_of=("qwen3_5_moe_text", "qwen3_5_moe"),
        mtp=True,
        keys=_LINEAR,
    ),
    "InternS2PreviewForConditionalGeneration": Family(
        qwen3_next.read_moe,
        "the text of Intern-S2-Preview: Qwen3.5 with experts",
        unused=qwen3_next.unused,
        text_of=("qwen3_5_moe_text", "qwen3_5_moe"),
        mtp=True,
        keys=_LINEAR,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        qwen3_moe.read_vl, "the text of Qwen3-VL with experts", text_of=("qwen3_vl_moe_text",)
    ),
}
_LONG_NAME = 100
"""Characters of an architecture's name that are compared with others."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What one expert of a layer has: numbers, and bytes in memory."""

    router: RouterSpec
    numbers: int
    bytes: int


@dataclass(frozen=True)
class TargetSpec:
    """A target before its weights are read.

    params: made once: those of 512 experts in 48 layers are 70,000 stored tensors, and a start asks many times.

    names: what the folder calls its tensors.
    own_head: the folder's config ties output matrix and embedding, but both are there and differ, so both are used.
    """

    folder: Path
    config: ModelConfig
    family: Family
    names: StoredNames = TEXT_ALONE
    own_head: bool = False

    @cached_property
    def params(self) -> list[Param]:
        return in_formats(map(self.names.of, self.family.params(self.config)), self.config.formats)

    @property
    def streamed(self) -> int:
        """Numbers that a forward reads of the weights: its products; an embedding is looked up, unless it is both.

        Experts come beside them, see `expert_layers`.
        """
        kinds = (*STREAMED, "table") if self.config.tied_embeddings else STREAMED
        return sum(param.numbers for param in self.params if param.kind in kinds)

    def attended_for_a_token(self, dtype: torch.dtype) -> int | None:
        """Tokens that a prompt's token attends to for as many operations as its products take, experts chosen alone.

        None if no layer attends to everything.
        """
        config = self.config
        seen = [each for each in config.attention.values() if each.window is None]
        experts = round(sum(layer.router.computing * layer.numbers for layer in self.expert_layers(dtype)))
        numbers = self.streamed - config.vocab_size * config.hidden_size + experts  # logits are of the last token only
        attending = sum(each.num_heads * (each.head_dim + each.kv.output_dim) for each in seen)
        return max(numbers // attending, 1) if seen else None

    def expert_layers(self, dtype: torch.dtype, packing: Packing = "none") -> list[ExpertLayer]:
        """The layers that have experts, and what one of these takes where models compute in `dtype`."""
        found = []
        params = stay_packed((param for param in self.params if param.kind == "experts"), packing)
        for index, layer in enumerate(self.config.layers):
            if layer.experts is not None:
                own = [param for param in params if param.name.startswith(f"layers.{index}.")]
                router = layer.experts.router
                numbers, held = sum(p.numbers for p in own), sum(p.held_bytes(dtype) for p in own)
                found.append(ExpertLayer(router, numbers // router.with_weights, held // router.with_weights))
        return found

    def build(self, weights: Weights, aux_inputs: tuple[int, ...], place: LoadContext, ops: Ops) -> Target:
        """aux_inputs: which residual streams the drafter reads; () without one."""
        return self.family.build(self.config, weights, aux_inputs, place, ops)

    def load(self, aux_inputs: tuple[int, ...], place: LoadContext) -> Target:
        if not place.dummy and place.sent is None and (towers := self.left_out()):
            _log.info("%s: text alone: %s left out, images and sound are refused", self.folder, " and ".join(towers))
        if (about := self.about_head()) is not None:
            _log.warning("%s: %s", self.folder, about)
        weights = load_weights(self.folder, self.params, place, set() if place.dummy else self._unused(place.sent))
        return self.build(weights, aux_inputs, place, place.ops)

    def check(self) -> int:
        """Names and shapes of its tensors, without reading them; how many there are. Raises CheckpointError."""
        return check_weights(self.folder, self.params, self._unused())

    def about_head(self) -> str | None:
        """That the output matrix is not what the config says, in words; None where it is."""
        if not self.own_head:
            return None
        head = self.names.stored(HEAD)
        return f"tie_word_embeddings is true, but {head} is stored and differs from the embedding: it is used"

    def left_out(self) -> list[str]:
        """The folder's parts that text does not need, such as `visual`."""
        if not self.family.text_of:
            return []
        stored = tensor_files(self.folder)
        return [tower.removesuffix(".") for tower in TOWERS if any(name.startswith(tower) for name in stored)]

    def _unused(self, sent: Collection[str] | None = None) -> set[str]:
        """Names of tensors that the files may hold without a use, or what was sent in their place."""
        names = {self.names.stored(name) for name in self.family.unused(self.config)}
        for index in range(len(self.config.layers)):
            names.update(all_names(self.names.stored(f"model.layers.{index}.self_attn")))
        if self.family.text_of:
            names.update(TOWERS)
        stored: Collection[str] = tensor_files(self.folder) if sent is None else sent
        further = (_FURTHER_LAYER.fullmatch(name) for name in stored)
        mtp = [match[1] for match in further if match and int(match[2]) >= len(self.config.layers)]
        prefixes = (*(name for name in names if name.endswith(".")), *mtp)
        return names | {name for name in stored if name.startswith(prefixes)} if prefixes else names


_FURTHER_LAYER = re.compile(r"(model\.layers\.(\d{1,9})\.)eh_proj\.weight")
"""A layer past the last that predicts a further token, in DeepSeek's names, which any family may have."""


def target_spec(folder: Path) -> TargetSpec:
    """The target in a folder. Raises CheckpointError for an architecture that treetop does not run."""
    refuse_adapter(folder)
    config, where = read_config(folder), folder / "config.json"
    named = config.get("architectures") or ["missing"]
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise CheckpointError(f"{where}: architectures must be a list of names, got {shown(named)}")
    for name in named:
        if name not in FAMILIES:
            refuse_by_name(name, where)
    text_of = FAMILIES[named[0]].text_of if named[0] in FAMILIES else ()
    tensors = _tensors(folder) if text_of else set()
    if text_of:
        config = text_config(config, where, text_of, tensors)
    refuse_by_key(config, where, FAMILIES[named[0]].keys if named[0] in FAMILIES else ())
    if len(named) != 1 or named[0] not in FAMILIES:
        asked, code = shown(", ".join(named))[1:-1], custom_code(config)
        near = get_close_matches(asked[:_LONG_NAME], FAMILIES, n=3) or ["LlamaForCausalLM"]
        raise CheckpointError(
            f"{where}: architecture {asked} is not supported, only the {len(FAMILIES)} that `treetop models` lists,"
            f" such as {', '.join(near)}" + (f"; {code}" if code else "")
        )
    if (code := custom_code(config)) is not None:
        _log.warning("%s: %s; treetop's own %s is used", where, code, named[0])
    family, names = FAMILIES[named[0]], names_in(tensors) if text_of else TEXT_ALONE
    model = family.read(config, where)
    own_head = model.tied_embeddings and holds_own_head(folder, model, names)
    return TargetSpec(
        folder, replace(model, tied_embeddings=model.tied_embeddings and not own_head), family, names, own_head
    )


def _tensors(folder: Path) -> set[str]:
    """Names of what the files hold; none without files, which is an error where weights are read."""
    try:
        return set(tensor_files(folder))
    except CheckpointError:
        return set()
