"""The table of round times: an 8B target's shape, random weights, an EAGLE-3 head with a 32k draft vocabulary.

Input 1024, forced accept length 3, greedy, bfloat16 on a GPU; shapes plain, (3, 1, 4), (5, 1, 6), (5, 4, 16); batches
1, 8, 32. It is `treetop bench --sweep table` on the presets beside this file; options of that command may follow.

    python benchmarks/rounds.py --preset qwen3-8b --shapes 5,4,16 --batches 1 --rounds 30

`--preset` (llama-3.1-8b unless given) names the shape; `--help` shows what `treetop bench` takes. Of a model with
experts the floor counts those that a round's tokens chose.
"""

import argparse
import sys
from pathlib import Path

from treetop.cli import main

PRESETS = Path(__file__).parent / "presets"
NAMES = (
    *("llama-3.1-8b", "qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b"),
    *("ministral-3-8b", "ernie-4.5-21b-a3b", "gemma-4-26b-a4b"),
)


def preset(name: str) -> tuple[str, str]:
    """The folders of a target's configuration and of its head's."""
    return str(PRESETS / name), str(PRESETS / f"eagle3-{name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    chosen, rest = parser.parse_known_args()
    model, draft = preset(chosen.preset)
    fixed = ["--load-format", "dummy", "--simulate-accept-length", "3", "--sweep", "table"]
    sys.exit(main(["bench", model, "--speculative-draft-model-path", draft, *fixed, *rest]))
