"""`quant_method` compressed-tensors, of llm-compressor: which modules are in which format.

Source: `compressed-tensors` 0.20. Groups of a configuration have targets: names, regular expressions after `re:`, or
classes, of which Linear means every product. Each says how its weights are stored, and what its products' inputs are
where `--quantize-activations` is given; `kv_cache_scheme` is read elsewhere (`weights.kv_scales`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetop.kernels.gemm.fp8_rows import Activations
from treetop.types.errors import CheckpointError, shown
from treetop.weights import fp4, fp8, int4
from treetop.weights.plain import FLOATS
from treetop.weights.quantized import WIDE, Grid, Quantized
from treetop.weights.rules import Named, Rule, name_list, patterns

_CLASSES = ("Linear",)
_NOT_QUANTIZED = ("sparsity_config", "transform_config")
_FORMATS = {
    "float-quantized": (8, "float"),
    "naive-quantized": (8, "float"),
    "pack-quantized": (4, "int"),
    "nvfp4-pack-quantized": (4, "float"),
    "mxfp4-pack-quantized": (4, "float"),
}
"""Formats that are read, with the bits and the type of their weights."""


def read(config: Mapping[str, Any], where: Path) -> tuple[Rule | Named, ...]:
    """The rules of a `quantization_config`. Raises CheckpointError for what is in a form that is not read."""
    for key in _NOT_QUANTIZED:
        if config.get(key):
            raise CheckpointError(f"{where}: quantization_config: {key} is not supported")
    if (status := config.get("quantization_status", "compressed")) != "compressed":
        raise CheckpointError(
            f"{where}: quantization_config: quantization_status {shown(status)} is not supported, only 'compressed'"
        )
    groups = config.get("config_groups")
    if groups == {} and config.get("kv_cache_scheme"):
        return ()
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: quantization_config: config_groups must say what is quantized")
    ignored = name_list(config, "ignore", where)
    named: list[Rule | Named] = [*patterns(ignored, FLOATS, "ignore", where)]
    if set(ignored) & set(_CLASSES):
        named.append(Rule("*", FLOATS))
    classes: list[Rule | Named] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{where}: quantization_config: config_groups: {shown(name)} must be a table")
        targets, format_ = name_list(group, "targets", where), _format(group, config, where)
        named += patterns([each for each in targets if each not in _CLASSES], format_, "targets", where)
        classes += [Rule("*", format_) for each in targets if each in _CLASSES]
    return (*named, *classes)


def _format(group: Mapping[str, Any], config: Mapping[str, Any], where: Path) -> Quantized:
    """Of a group's weights."""
    args, stored = group.get("weights"), group.get("format") or config.get("format")
    if not isinstance(args, Mapping):
        raise _refused(where, "weights", args)
    if not isinstance(stored, str) or stored not in _FORMATS:
        raise CheckpointError(
            f"{where}: quantization_config: format {shown(stored)} is not supported, only {', '.join(_FORMATS)}"
        )
    if (args.get("num_bits"), args.get("type")) != _FORMATS[stored]:
        raise _refused(where, f"{stored} with weights", args)
    if args.get("dynamic"):
        raise _refused(where, "weights with dynamic", args["dynamic"])
    if args.get("actorder") in ("group", "dynamic", True):
        raise _refused(where, "actorder", args["actorder"])
    if stored == "pack-quantized":
        return int4.w4a16(int4.PackQuantized(_group(args, where), not args.get("symmetric", True)))
    if not args.get("symmetric", True):
        raise _refused(where, f"{stored} with symmetric", False)
    if stored == "nvfp4-pack-quantized" and args.get("group_size") == fp4.NVFP4_GROUP:
        return fp4.NVFP4
    if stored == "mxfp4-pack-quantized" and args.get("group_size") == fp4.MXFP4_GROUP:
        return fp4.MXFP4_EACH
    if _FORMATS[stored][0] == 4:
        raise _refused(where, f"{stored} with group_size", args.get("group_size"))
    return fp8.fp8(_grid(args, where), activations=_activations(group.get("input_activations")))


def _activations(args: object) -> Activations | str:
    """Of a group's `input_activations`, or why they are not quantized here."""
    if args is None:
        return WIDE
    if not isinstance(args, Mapping):
        return f"has input_activations {shown(args)}"
    dynamic, strategy = args.get("dynamic", False), args.get("strategy")
    e4m3 = (args.get("num_bits"), args.get("type"), args.get("symmetric", True)) == (8, "float", True)
    if not e4m3 or args.get("scale_dtype") is not None:
        return f"has input_activations {shown(args)}"
    if strategy == "tensor" and dynamic in (True, "local"):
        return "has one scale of activations a batch, by which a row would depend on the others"
    if strategy == "tensor" and dynamic is False:
        return Activations(fixed=True)
    if strategy == "token" and dynamic is True:
        return Activations()
    size = args.get("group_size")
    if strategy == "group" and dynamic is True and isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return Activations(size)
    return f"has input_activations {shown(args)}"


def _group(args: Mapping[str, Any], where: Path) -> int:
    """Numbers that share a scale; 0 for whole rows."""
    strategy, group = args.get("strategy"), args.get("group_size")
    if strategy == "channel" or (strategy is None and group == -1):
        return 0
    if strategy in ("group", None) and isinstance(group, int) and not isinstance(group, bool) and group > 0:
        return group
    raise _refused(where, f"strategy {shown(strategy)} with group_size", group)


def _grid(args: Mapping[str, Any], where: Path) -> Grid:
    """The blocks of FP8's scales."""
    strategy, blocks = args.get("strategy"), args.get("block_structure")
    if strategy in ("tensor", "channel"):
        return fp8.WHOLE if strategy == "tensor" else fp8.BY_ROW
    if strategy == "block":
        return fp8.blocks_of(blocks, "block_structure", where)
    raise _refused(where, "strategy", strategy)


def _refused(where: Path, what: str, value: object) -> CheckpointError:
    return CheckpointError(f"{where}: quantization_config: {what} {shown(value)} is not supported")
