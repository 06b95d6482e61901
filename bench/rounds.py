"""The table of round times: Llama-3.1-8B shape, random weights, an EAGLE-3 head with a 32k draft vocabulary.

Input 1024, forced accept length 3, greedy, bfloat16 on a GPU; shapes plain, (3, 1, 4), (5, 1, 6), (5, 4, 16); batches
1, 8, 32. It is `treetop bench --sweep table` on the presets beside this file; options of that command may follow.

    python bench/rounds.py --shapes 5,4,16 --batches 1 --rounds 30
"""

import sys
from pathlib import Path

from treetop.cli import main

PRESETS = Path(__file__).parent / "presets"

if __name__ == "__main__":
    models = [str(PRESETS / "llama-3.1-8b"), "--speculative-draft-model-path", str(PRESETS / "eagle3-llama-3.1-8b")]
    fixed = ["--load-format", "dummy", "--simulate-accept-length", "3", "--sweep", "table"]
    sys.exit(main(["bench", *models, *fixed, *sys.argv[1:]]))
