"""Checkpoints in the formats that people deploy, and what their weights then are, by the formats' own library.

`compressed-tensors` packs and unpacks its own layouts; where it is not there, a test that asks for one of them is
skipped by name. Those without a library on this machine are written here from
their documentation, number by number.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treetop.models.registry import target_spec

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint has it. tensors: by what follows its module's name. decoded: its numbers, float32."""

    tensors: dict[str, Tensor]
    decoded: Tensor


@dataclass(frozen=True)
class Format:
    """A format. store: of a weight [n, k]. config: its `quantization_config`. columns: k must be a multiple of it."""

    store: Callable[[Tensor], Stored]
    config: dict
    columns: int = 8


def blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude in each block of a weight."""
    n, k = weight.shape
    padded = torch.zeros(-(-n // rows) * rows, -(-k // columns) * columns)
    padded[:n, :k] = weight.abs()
    return padded.view(-(-n // rows), rows, -(-k // columns), columns).amax((1, 3))


def by_library(stored: str, dtype: torch.dtype = torch.float32, inputs: dict | None = None, **args) -> Format:
    """A layout of `compressed-tensors`. dtype: of scales. args: of the weights' `QuantizationArgs`. inputs: of their
    activations'; a fixed scale of these is 1 / 64."""
    library = pytest.importorskip("compressed_tensors.quantization")
    weights = library.QuantizationArgs(**args)
    fixed = inputs is not None and not inputs.get("dynamic")
    scheme = library.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = pytest.importorskip("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(stored)
    group = args.get("group_size") or 0

    def store(weight: Tensor) -> Stored:
        n, k = weight.shape
        state = {"weight": weight.float()}
        if weights.type == "int":
            parts = weight.float().view(n, -1, group if group > 0 else k)
            low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
            if weights.symmetric:
                state["weight_scale"] = torch.maximum(-low, high) / 7.5
            else:
                state["weight_scale"] = (high - low) / 15
                zero = (-low / state["weight_scale"].clamp(min=1e-30)).round().clamp(0, 15) - 8
                state["weight_zero_point"] = zero.to(torch.int8)
        elif weights.num_bits == 8:
            size = {"tensor": (n, k), "channel": (1, k)}.get(weights.strategy) or weights.block_structure
            scale = blocks(weight.float(), *size) / E4M3_MAX
            state["weight_scale"] = scale.view(1) if weights.strategy == "tensor" else scale
        else:
            scale = weight.float().view(n, -1, group).abs().amax(-1) / 6
            if group == 16:
                state["weight_global_scale"] = torch.tensor([E4M3_MAX / float(scale.max().clamp(min=1e-6))])
                state["weight_scale"] = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
            else:
                state["weight_scale"] = torch.exp2(torch.log2(scale.clamp(min=2.0**-100)).ceil())
        if weights.num_bits == 8 or weights.type == "int":
            state["weight_scale"] = state["weight_scale"].to(dtype)
            lowest = 2.0**-120 if weights.num_bits == 8 else 0.0  # of a zero group; the library divides by it
            divisors = {**state, "weight_scale": state["weight_scale"].float().clamp(min=max(lowest, 1e-30))}
            made = {**compressor.compress(divisors, scheme), "weight_scale": state["weight_scale"]}
        else:
            made = compressor.compress(state, scheme)
        decoded = decompressed(made, scheme, compressor)
        made |= {"input_scale": torch.tensor([2.0**-6])} if fixed else {}
        return Stored({f".{name}": tensor for name, tensor in made.items()}, decoded)

    config = {"format": stored, "targets": ["Linear"], "weights": json.loads(weights.model_dump_json())}
    config |= {} if inputs is None else {"input_activations": inputs}
    columns = max(group, 1) * (1 if weights.num_bits == 8 else 2)
    return Format(
        store,
        {
            "quant_method": "compressed-tensors",
            "format": stored,
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": config},
        },
        columns if group > 0 else 8,
    )


def decompressed(tensors: dict[str, Tensor], scheme, compressor) -> Tensor:
    """What the library makes of a weight whose scales are float32."""
    wide = dict(tensors)
    if scheme.weights.num_bits == 8 or scheme.weights.type == "int":
        wide["weight_scale"] = tensors["weight_scale"].float()
        return compressor.decompress(wide, scheme)["weight"]
    whole = tensors.get("weight_global_scale")
    scale = tensors["weight_scale"]
    exponent = scale.view(torch.uint8).int() - 127 if scale.dtype == torch.uint8 else None
    factor = torch.ldexp(torch.ones(scale.shape), exponent) if exponent is not None else scale.float() / whole
    low, high = tensors["weight_packed"] & 0xF, tensors["weight_packed"] >> 4
    codes = torch.stack([low, high], -1).flatten(-2)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).int()] * torch.where(codes > 7, -1.0, 1.0)
    return numbers * factor.repeat_interleave(scheme.weights.group_size, -1)


def fp8_blocks(rows: int, columns: int, dtype: torch.dtype = torch.float32, **config) -> Format:
    """DeepSeek's: `weight_scale_inv`, which weights are multiplied by."""

    def store(weight: Tensor) -> Stored:
        scale = (blocks(weight.float(), rows, columns) / E4M3_MAX).to(dtype)
        each = _spread(scale.float(), rows, columns, weight.shape)
        codes = (weight.float() / each.clamp(min=1e-30)).to(torch.float8_e4m3fn)
        return Stored({".weight": codes, ".weight_scale_inv": scale}, codes.float() * each)

    return Format(
        store, {"quant_method": "fp8", "weight_block_size": [rows, columns], "activation_scheme": "dynamic", **config}
    )


def _spread(scale: Tensor, rows: int, columns: int, shape) -> Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def fp8_whole(config: dict) -> Format:
    """A scale a weight, of activations too: vLLM's `fp8` and ModelOpt's."""

    def store(weight: Tensor) -> Stored:
        scale = weight.float().abs().max() / E4M3_MAX
        codes = (weight.float() / scale.clamp(min=1e-30)).to(torch.float8_e4m3fn)
        tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
        return Stored(tensors, codes.float() * scale)

    return Format(store, config)


def nvfp4_of_modelopt(config: dict) -> Format:
    packed = by_library("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)

    def store(weight: Tensor) -> Stored:
        made = packed.store(weight).tensors
        scale, whole = made[".weight_scale"], 1 / made[".weight_global_scale"][0]
        codes = torch.stack([made[".weight_packed"] & 0xF, made[".weight_packed"] >> 4], -1).flatten(-2)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).int()] * torch.where(codes > 7, -1.0, 1.0)
        decoded = numbers * (scale.float() * whole).repeat_interleave(16, -1)
        tensors = {".weight": made[".weight_packed"], ".weight_scale": scale, ".weight_scale_2": whole}
        return Stored(tensors, decoded)

    return Format(store, config, 16)


def gptq(group: int, act_order: bool = False, version: str = "gptq", dtype: torch.dtype = torch.float16) -> Format:
    """gptqmodel's layout: word r of a column holds its rows 8 r .. 8 r + 7, the first lowest; zeros are stored less 1
    in version 1."""

    def store(weight: Tensor) -> Stored:
        n, k = weight.shape
        size = group if group > 0 else k
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = (torch.arange(k) // size).to(torch.int32)
        codes, scale, zero = _integers(weight[:, order], size, dtype)
        unordered = torch.empty_like(codes)
        unordered[:, order] = codes
        decoded = torch.empty(n, k)
        qweight = torch.zeros(k // 8, n, dtype=torch.int64)
        for column in range(k):
            of = int(g_idx[column])
            decoded[:, column] = (unordered[:, column] - zero[:, of]).float() * scale[:, of].float()
            qweight[column // 8] |= unordered[:, column].long() << (4 * (column % 8))
        qzeros = torch.zeros(scale.shape[1], n // 8, dtype=torch.int64)
        for row in range(n):
            qzeros[:, row // 8] |= (zero[row].long() - int(version == "gptq")) << (4 * (row % 8))
        tensors = {".qweight": _int32(qweight), ".qzeros": _int32(qzeros), ".scales": scale.T.contiguous()}
        return Stored({**tensors, ".g_idx": g_idx}, decoded)

    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order}
    return Format(store, {**config, "checkpoint_format": version}, max(group, 8))


def awq(group: int, dtype: torch.dtype = torch.float16) -> Format:
    """AutoAWQ's "gemm": nibble i of a word holds column [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight."""

    def store(weight: Tensor) -> Stored:
        size = group if group > 0 else weight.shape[1]
        codes, scale, zero = _integers(weight, size, dtype)
        decoded = (codes - zero.repeat_interleave(size, 1)).float() * scale.float().repeat_interleave(size, 1)
        packed = []
        for numbers in (codes.T, zero.T):
            words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
            for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words |= numbers[:, column::8].long() << (4 * nibble)
            packed.append(_int32(words))
        return Stored({".qweight": packed[0], ".qzeros": packed[1], ".scales": scale.T.contiguous()}, decoded)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Format(store, config, max(group, 8))


def _integers(weight: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 .. 15 [n, k], scales [n, groups], zeros 1 .. 15 [n, groups]."""
    parts = weight.float().view(len(weight), -1, size)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).to(dtype)
    step = scale.float().clamp(min=1e-7)
    zero = (-low / step).round().clamp(1, 15)
    codes = ((parts / step[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.view(weight.shape).int(), scale, zero.int()


def _int32(words: Tensor) -> Tensor:
    return torch.where(words > 0x7FFFFFFF, words - (1 << 32), words).to(torch.int32)


def quantized(folder: Path, where: Path, made: Format, *plain: str) -> tuple[Path, Path]:
    """A target's products in a format at `where`, and the same decoded, in float32, beside it.

    plain: what names have in them that are left as they are; without any, the output matrix.
    """
    kinds = ("matrix", "experts", "heads")
    matrices = {s.name for p in target_spec(folder).params if p.kind in kinds for s in p.sources}
    left, wide = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        wide[name] = left[name] = tensor
        if name in matrices and not any(each in name for each in plain or ("lm_head",)):
            each = [made.store(expert) for expert in (tensor if tensor.dim() == 3 else [tensor])]
            joined = torch.stack if tensor.dim() == 3 else lambda one: one[0]
            del left[name]
            for end in each[0].tensors:
                ending = end.removeprefix(".weight") if end.startswith(".weight") else end
                base = name if end.startswith(".weight") else name.removesuffix(".weight")
                left[base + ending] = joined([stored.tensors[end] for stored in each])
            wide[name] = joined([stored.decoded for stored in each])
    config = json.loads((folder / "config.json").read_text())
    for place, tensors, said in (
        (where, left, {"quantization_config": made.config}),
        (where.with_name(f"{where.name}-decoded"), wide, {}),
    ):
        place.mkdir(parents=True)
        save_file({name: each.contiguous() for name, each in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({**config, **said}))
    return where, where.with_name(f"{where.name}-decoded")
