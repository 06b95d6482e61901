"""`treetop quantize`: a checkpoint in fewer bits."""

import argparse
from pathlib import Path

from treetop.types.errors import ConfigError

HELP = "write a folder's weights in FP8 or in 4 bits, rounded to nearest, in the layout of compressed-tensors"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder, builtin: name or id of the hub of a target, or of a draft head")
    parser.add_argument(
        "--format",
        required=True,
        choices=["fp8", "w4a16"],
        help="fp8: e4m3 with a scale a row; w4a16: 4 bits with a scale a group",
    )
    parser.add_argument("--output", required=True, help="the folder to write, which must not be there")
    parser.add_argument("--target", help="of a draft head, its target")
    parser.add_argument(
        "--group-size",
        type=int,
        help="of w4a16: numbers that share a scale, -1 for whole rows (the largest of 128, 64 and 32 that divides all)",
    )


def run(args: argparse.Namespace) -> int:
    from treetop.checkpoints.folder import resolve_folder
    from treetop.tools.quantize import quantize

    size = args.group_size
    if size is not None and (size < -1 or size == 0):
        raise ConfigError(f"--group-size {size}: it must be positive, or -1 for whole rows")
    group = None if size is None else max(size, 0)
    target = None if args.target is None else resolve_folder(args.target)
    made = quantize(resolve_folder(args.model), target, args.format, group, Path(args.output))
    scales = f" in groups of {made.group}" if made.group else ""
    print(
        f"{args.output}: {made.weights} weights rounded{scales}, {made.before / 2**20:.1f} MiB became"
        f" {made.after / 2**20:.1f}; at most {made.error:.2%} of a weight's norm changed ({made.worst})"
    )
    return 0
