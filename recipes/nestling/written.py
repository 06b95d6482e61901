"""What a target writes: continuations of passages of the corpus, on which its draft is trained."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import VOCAB_SIZE, Stream
from draft import Target
from tqdm import tqdm
from transformers import AutoTokenizer


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on besides the corpus and the target.

    row and corpus_row: slots of a generated and of a corpus training row. ttt: steps of the training-time test.
    """

    steps: int
    batch: int
    corpus_batch: int
    generated_rows: int
    learning_rate: float
    weight_decay: float
    ttt: int
    decay: float
    warmup: int
    seed: int
    row: int
    corpus_row: int
    prompt_lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    greedy_share: float = 0.6
    library_share: float = 0.7


@torch.no_grad()
def continue_rows(target: Target, prompts: torch.Tensor, length: int, temperature: float) -> torch.Tensor:
    """Continue prompts [rows, p] to [rows, length]; greedy at temperature 0. End of text does not stop a row."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.autocast(prompts.device.type, dtype=torch.bfloat16):
        return target.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length - prompts.shape[1],
            eos_token_id=None,
            **sampling,
        )


def line_prefixes(
    stream: Stream, count: int, length: int, generator: torch.Generator, newline: torch.Tensor
) -> torch.Tensor:
    """Windows [count, length] of the stream that end where a line ends; newline: [vocab] bool, token starts a line."""
    ends = torch.nonzero(newline[stream.ids[length:]]).flatten() + length
    chosen = ends[torch.randint(0, len(ends), (count,), generator=generator).to(ends.device)]
    return stream.ids[chosen[:, None] + torch.arange(-length, 0, device=ends.device)]


def newline_tokens(folder: Path, device: torch.device) -> torch.Tensor:
    """Which tokens begin with a line feed, [vocab] bool."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor([tokenizer.decode([i]).startswith("\n") for i in range(VOCAB_SIZE)], device=device)


def generate(
    target: Target,
    streams: list[tuple[Stream, float]],
    rows: int,
    settings: Settings,
    newline: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Continuations of prefixes of the streams (each with its share), cut to the length of a training row.

    Returns ids [rows, row + ttt] int64, the length of each row's prompt and the index of its stream, both [rows]
    int64 on the CPU, in random order.
    """
    generator = torch.Generator().manual_seed(settings.seed + 1)
    length = settings.row + settings.ttt
    jobs = [(p, t) for p in settings.prompt_lengths for t in (0.0, *settings.temperatures)]
    warm = (1 - settings.greedy_share) / len(settings.temperatures)
    parts, prompt_lengths, sources = [], [], []
    for prompt_length, temperature in tqdm(jobs, desc="generate"):
        share = (warm if temperature else settings.greedy_share) / len(settings.prompt_lengths)
        counted = [(stream, max(1, int(rows * share * part))) for stream, part in streams]
        prompts = torch.cat([line_prefixes(s, count, prompt_length, generator, newline) for s, count in counted])
        sources += [index for index, (_, count) in enumerate(counted) for _ in range(count)]
        for some in prompts.split(chunk):
            parts.append(continue_rows(target, some, length, temperature))
            prompt_lengths += [prompt_length] * len(some)
    ids = torch.cat(parts)
    order = torch.randperm(len(ids), generator=generator)
    return ids[order.to(ids.device)], torch.tensor(prompt_lengths)[order], torch.tensor(sources)[order]


@dataclass(frozen=True, slots=True)
class Rows:
    """What the target wrote. ids, heldout: [rows, row + ttt] int64. The rows' prompt lengths: [rows] int64, on the CPU."""

    ids: torch.Tensor
    prompt_lengths: torch.Tensor
    heldout: torch.Tensor
    heldout_lengths: torch.Tensor
    seconds: float

    def save(self, file: Path) -> None:
        """Keep it for another training run on the same text."""
        narrow = {name: getattr(self, name) for name in ("ids", "prompt_lengths", "heldout", "heldout_lengths")}
        arrays = {name: value.cpu().numpy().astype(np.uint16) for name, value in narrow.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, seconds=self.seconds, **arrays)


def load_rows(file: Path, device: torch.device) -> Rows:
    """What Rows.save kept."""
    with np.load(file) as arrays:
        seconds = float(arrays["seconds"])
        ids, lengths, heldout, heldout_lengths = (
            torch.from_numpy(arrays[name].astype(np.int64))
            for name in ("ids", "prompt_lengths", "heldout", "heldout_lengths")
        )
    return Rows(ids.to(device), lengths, heldout.to(device), heldout_lengths, seconds)


def write_rows(
    target: Target, streams: dict[str, Stream], settings: Settings, newline: torch.Tensor, chunk: int, heldout_rows: int
) -> Rows:
    """Let the target continue library, tests and held-out files, all at once."""
    began = time.perf_counter()
    share = settings.library_share
    sources = [
        (streams["library"], share),
        (streams["tests"], 1 - share),
        (streams["heldout"], heldout_rows / settings.generated_rows),
    ]
    ids, lengths, source = generate(target, sources, settings.generated_rows, settings, newline, chunk)
    held = source == 2
    kept = held.to(ids.device)
    return Rows(ids[~kept], lengths[~held], ids[kept], lengths[held], time.perf_counter() - began)


def choose_draft_ids(
    ids: torch.Tensor, prompt_lengths: torch.Tensor, corpus: torch.Tensor, size: int
) -> tuple[torch.Tensor, float]:
    """The most frequent tokens: four parts of the target's own text, one part of corpus.

    Returns [size] int64 ascending and the share of the target's own tokens that they cover.
    """
    written = torch.arange(ids.shape[1])[None] >= prompt_lengths[:, None]
    own = torch.bincount(ids[written.to(ids.device)], minlength=VOCAB_SIZE).double()
    other = torch.bincount(corpus, minlength=VOCAB_SIZE).double()
    score = 0.8 * own / own.sum() + 0.2 * other / other.sum()
    chosen = score.topk(size).indices.sort().values
    return chosen, (own[chosen].sum() / own.sum()).item()
