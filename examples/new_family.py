"""A family that treetop does not know, in thirty lines: Llama with a window in every other layer.

    python examples/new_family.py

A family reads a `config.json` into values: which layers there are, and what each one's attention and feed-forward
are. What follows from that (tensors that are expected, pages of the window, memory, trees) is not its matter. In
treetop itself this is a file of `src/treetop/models/families/` and a row of `FAMILIES` (docs/adding/model.md).
"""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from treetop import LLM, SamplingParams
from treetop.checkpoints.config_fields import Config, size
from treetop.checkpoints.folder import resolve_folder
from treetop.models.config import LayerSpec, ModelConfig, attention_spec, dense_spec, model_config, num_layers
from treetop.models.registry import FAMILIES, Family


def read(config: Config, where: Path) -> ModelConfig:
    everything, dense = attention_spec(config, where), dense_spec(config, where)
    near = replace(everything, window=size(config, "sliding_window", where))
    layers = [LayerSpec(near if i % 2 else everything, dense) for i in range(num_layers(config, where))]
    return model_config(config, where, layers)


FAMILIES["AlternatingForCausalLM"] = Family(read, "a window in every other layer")


def checkpoint(folder: Path) -> Path:
    """A folder of that family: here the weights of another model, so what it writes makes little sense."""
    shutil.copytree(resolve_folder("builtin:nestling"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["AlternatingForCausalLM"], "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    prompt, asked = "def area(width, height):\n", SamplingParams(max_tokens=48)
    with tempfile.TemporaryDirectory() as made:
        folder = str(checkpoint(Path(made) / "alternating"))
        texts = []
        for draft in ("builtin:nestling-eagle3", None):
            llm = LLM(folder, draft)
            (output,) = llm.generate(prompt, asked)
            texts.append(output.token_ids)
            print(f"{draft or 'no draft'}: {output.metrics.target_forwards} rounds")
            llm.close()
    assert texts[0] == texts[1], "a tree changes nothing"
    print(prompt + output.text)


if __name__ == "__main__":
    main()
