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
        "--group-size", type=int, default=128, help="of w4a16: numbers that share a scale, -1 for whole rows (128)"
    )


def run(args: argparse.Namespace) -> int:
    from treetop.models.folder import resolve_folder
    from treetop.quantize import quantize

    if args.group_size < -1 or args.group_size == 0:
        raise ConfigError(f"--group-size {args.group_size}: it must be positive, or -1 for whole rows")
    target = None if args.target is None else resolve_folder(args.target)
    made = quantize(resolve_folder(args.model), target, args.format, max(args.group_size, 0), Path(args.output))
    print(
        f"{args.output}: {made.weights} weights rounded, {made.before / 2**20:.1f} MiB became"
        f" {made.after / 2**20:.1f}; at most {made.error:.2%} of a weight's norm changed ({made.worst})"
    )
    return 0
