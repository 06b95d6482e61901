"""The table of round times: an 8B target's shape, random weights, an EAGLE-3 head with a 32k draft vocabulary.

Input 1024, forced accept length 3, greedy, bfloat16 on a GPU; shapes plain, (3, 1, 4), (5, 1, 6), (5, 4, 16); batches
1, 8, 32. It is `treetop bench --sweep table` on the presets beside this file; options of that command may follow.

    python benchmarks/rounds.py --preset qwen3-8b --shapes 5,4,16 --batches 1 --rounds 30

`--preset` (llama-3.1-8b unless given) names the shape; `--help` shows what `treetop bench` takes. Of a model with
experts the floor counts those that a round's tokens chose. `--quantization` gives the target's weights a format, as a
checkpoint would: fp8-channel, fp8-block, w4a16 (groups of 128), nvfp4 or mxfp4.

    for format in fp8-block fp8-channel w4a16; do
        python benchmarks/rounds.py --quantization $format --shapes 0,1,1 5,4,16 --rounds 30
    done

Of FP8 with its activations in FP8 too, and without:

    python benchmarks/rounds.py --quantization fp8-channel --quantize-activations --shapes 0,1,1 5,4,16

Several formats, of which bfloat16 is one, are measured one after another in one process, and each is set against the
first:

    python benchmarks/rounds.py --quantization bfloat16 fp8-channel w4a16 nvfp4 mxfp4 --shapes 5,4,16 --batches 8 32
"""

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from frame import NAMES, preset, say
from quantized_cases import CONFIGS

from treetop.cli import main

PLAIN = "bfloat16"


def in_format(model: str, name: str, folder: Path) -> str:
    """A copy of a preset's configuration that says its weights are in a format."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config |= {} if name == PLAIN else {"quantization_config": CONFIGS[name]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def beside(command: Sequence[str], model: str, formats: Sequence[str], folder: Path) -> int:
    """A line of JSON for each format and case as soon as it is known: milliseconds, and over the first format's."""
    first = dict[tuple[Any, ...], dict[str, Any]]()
    for name in formats:
        text = io.StringIO()
        with redirect_stdout(text):
            code = main(["bench", in_format(model, name, folder), *command, "--json"])
        if code != 0:
            print(text.getvalue(), file=sys.stderr)
            return code
        for case in json.loads(text.getvalue())["cases"]:
            base = first.setdefault((*case["shape"], case["batch"], case["length"]), case)
            line = {"format": name, "shape": case["shape"], "batch": case["batch"], "input": case["length"]}
            for what in ("wall_ms", "device_ms"):
                if case[what] is not None:
                    over = round(case[what] / base[what], 3)
                    line |= {what: round(case[what], 3), f"{what.removesuffix('_ms')}_over_{formats[0]}": over}
            say(line | {"start_s": round(case["start_s"], 1)})
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--quantization", nargs="+", choices=[PLAIN, *CONFIGS], default=[PLAIN])
    parser.add_argument("--shapes", nargs="+", default=["0,1,1", "3,1,4", "5,1,6", "5,4,16"])
    chosen, rest = parser.parse_known_args()
    model, draft = preset(chosen.preset)
    accepted = "1" if all(shape.startswith("0,") for shape in chosen.shapes) else "3"
    fixed = ["--speculative-draft-model-path", draft]
    fixed += ["--load-format", "dummy", "--simulate-accept-length", accepted, "--sweep", "table"]
    fixed += ["--shapes", *chosen.shapes, *rest]
    with tempfile.TemporaryDirectory() as folder:
        if len(chosen.quantization) > 1:
            sys.exit(beside(fixed, model, chosen.quantization, Path(folder)))
        if chosen.quantization != [PLAIN]:
            model = in_format(model, chosen.quantization[0], Path(folder))
        sys.exit(main(["bench", model, *fixed]))
