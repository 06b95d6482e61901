"""Paths, token streams, learning-rate schedule, loss log and plot shared by the recipe's scripts."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "nestling"
ASSETS = REPOSITORY / "src" / "treetop" / "assets"
PROMPTS = ASSETS / "prompts.jsonl"
TOKENS = BUILD / "tokens.npz"
TOKENIZER = BUILD / "tokenizer"

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
VOCAB_SIZE = 4096
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents of one group, each followed by the end-of-text token, in one run of ids.

    ids: [num_tokens] int64. starts: [num_documents] int64, where each document begins.
    """

    ids: torch.Tensor
    starts: torch.Tensor

    def chunks(self, count: int, length: int, generator: torch.Generator, share_at_start: float) -> torch.Tensor:
        """Random windows of the stream, some of them beginning exactly where a document begins.

        Returns [count, length] int64 on the stream's device. `generator` is a CPU generator.
        """
        last = len(self.ids) - length
        offsets = torch.randint(0, last + 1, (count,), generator=generator)
        documents = torch.randint(0, len(self.starts), (count,), generator=generator)
        at_start = torch.rand(count, generator=generator) < share_at_start
        begin = self.starts.cpu()[documents].clamp(max=last)
        offsets = torch.where(at_start, begin, offsets).to(self.ids.device)
        return self.ids[offsets[:, None] + torch.arange(length, device=self.ids.device)]


def load_streams(device: torch.device) -> dict[str, Stream]:
    """The encoded corpus as written by tokenizer.py: groups library, tests, tables and heldout."""
    with np.load(TOKENS) as arrays:
        names = [name for name in arrays.files if not name.endswith("_starts")]
        return {
            name: Stream(
                ids=torch.from_numpy(arrays[name].astype(np.int64)).to(device),
                starts=torch.from_numpy(arrays[f"{name}_starts"].astype(np.int64)).to(device),
            )
            for name in names
        }


class Progress:
    """Which step of `total` a run has reached; where a limit in seconds is shorter than the steps, it counts for more.

    A run that meets its limit so ends with its schedule complete, but is not repeatable.
    """

    def __init__(self, total: int, limit_s: float | None) -> None:
        self.total, self._limit_s, self._began = total, limit_s, time.perf_counter()

    def at(self, step: int) -> float:
        """The step that the schedule has reached after `step` steps, `total` at most."""
        share = (time.perf_counter() - self._began) / self._limit_s if self._limit_s else 0.0
        return min(self.total, max(step, share * self.total))


def cosine_with_warmup(step: float, warmup: int, total: int, floor: float) -> float:
    """Factor of the peak learning rate at `step`: linear warm-up, then half a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay, norm weights do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def machine(device: torch.device) -> str:
    """What the figures were measured on, in words."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def bytes_of(folder: Path) -> int:
    """Sum of the sizes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def replace_section(readme: Path, title: str, body: str) -> None:
    """Put `body` under the heading `## title`, in place of an earlier section of that title."""
    text = readme.read_text(encoding="utf-8")
    sections = text.split("\n## ")
    kept = [section for section in sections if not section.startswith(title + "\n")]
    kept = [section.rstrip("\n") + "\n" for section in kept]
    kept.append(f"{title}\n\n{body.strip()}\n")
    readme.write_text("\n## ".join(kept), encoding="utf-8")


def plot_losses(path: Path, curves: dict[str, tuple[list[int], list[float]]], ylabel: str, title: str) -> None:
    """A small PNG with one line a curve; curves: name -> (steps, values)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=90)
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
