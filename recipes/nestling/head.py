"""Train the EAGLE-3 head of nestling on the target's own text, by training-time test."""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import (
    ASSETS,
    BUILD,
    VOCAB_SIZE,
    Stream,
    bytes_of,
    cosine_with_warmup,
    load_streams,
    machine,
    parameter_groups,
    plot_losses,
    write_json,
)
from draft import Eagle3Head, HeadShape, Target
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoTokenizer

PROMPT_LENGTHS = (64, 128, 256, 384)
GENERATED = BUILD / "generated.npz"


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
    row: int = 512
    corpus_row: int = 1024
    greedy_share: float = 0.6
    temperatures: tuple[float, ...] = (0.7, 1.0)
    library_share: float = 0.7


# ---- the target's own text


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuations of prefixes of the streams (each with its share), cut to the length of a training row.

    Returns ids [rows, row + ttt] int64 and the length of each row's prompt [rows] int64, in random order.
    """
    generator = torch.Generator().manual_seed(settings.seed + 1)
    length = settings.row + settings.ttt
    jobs = [(p, t) for p in PROMPT_LENGTHS for t in (0.0, *settings.temperatures)]
    warm = (1 - settings.greedy_share) / len(settings.temperatures)
    parts, prompt_lengths = [], []
    for prompt_length, temperature in tqdm(jobs, desc="generate"):
        share = (warm if temperature else settings.greedy_share) / len(PROMPT_LENGTHS)
        counted = [(stream, max(1, int(rows * share * part))) for stream, part in streams]
        prompts = torch.cat([line_prefixes(s, count, prompt_length, generator, newline) for s, count in counted])
        for some in prompts.split(chunk):
            parts.append(continue_rows(target, some, length, temperature))
            prompt_lengths += [prompt_length] * len(some)
    ids = torch.cat(parts)
    order = torch.randperm(len(ids), generator=generator)
    return ids[order.to(ids.device)], torch.tensor(prompt_lengths)[order]


def save_rows(ids: torch.Tensor, prompt_lengths: torch.Tensor, heldout: torch.Tensor, seconds: float) -> None:
    """Keep what was generated, and how long that took, for another training run on the same text."""
    narrow = {"ids": ids, "prompt_lengths": prompt_lengths, "heldout": heldout}
    arrays = {name: value.cpu().numpy().astype(np.uint16) for name, value in narrow.items()}
    GENERATED.parent.mkdir(parents=True, exist_ok=True)
    np.savez(GENERATED, seconds=seconds, **arrays)


def load_rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """What save_rows kept: ids, prompt lengths (on the CPU), held-out ids, seconds."""
    with np.load(GENERATED) as arrays:
        seconds = float(arrays["seconds"])
        ids, lengths, heldout = (
            torch.from_numpy(arrays[name].astype(np.int64)) for name in ("ids", "prompt_lengths", "heldout")
        )
    return ids.to(device), lengths, heldout.to(device), seconds


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


# ---- training-time test


def mix(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attention of chain i at step s: step 0's slots 0..i, then its own steps 1..s.

    q, and each of the keys and values (one a step), [batch, heads, n, head_dim]; index n is the chain.
    """
    n, scale = q.shape[2], q.shape[3] ** -0.5
    causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(~causal, float("-inf"))
    own = [(q * key).float().sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1) * scale, dim=-1).to(q.dtype)
    mixed = weights[..., :n] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., n + step, None] * value
    return mixed


def chain_losses(
    head: Eagle3Head, aux: torch.Tensor, embedding: torch.Tensor, logits: torch.Tensor, ttt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and greedy hit rate of each step of the training-time test, each [ttt].

    aux [batch, n + ttt, 3 * hidden], embedding [batch, n + ttt, hidden] and logits [batch, n + ttt, vocab] of
    the same tokens. Chain i starts at slot i; its step s reads the embedding of token i + s + 1, runs at
    position i + s and is to predict what the target predicts at position i + s + 1. The label is the target's
    distribution over the draft vocabulary, renormalised, and counts with the mass that it had before: a
    position where the target leaves the draft vocabulary cannot be drafted, whatever the head learns.
    """
    n = aux.shape[1] - ttt
    kept = logits[..., head.draft_ids].float()
    mass = (kept.logsumexp(-1) - logits.float().logsumexp(-1)).exp()
    labels = kept.softmax(-1)
    best = logits.argmax(-1)
    hidden = head.fc(aux[:, :n]).float()
    keys, values, losses, hits = [], [], [], []
    for step in range(ttt):
        here = slice(step + 1, step + 1 + n)
        positions = torch.arange(step, step + n, device=aux.device)
        q, k, v = head.project(embedding[:, here], hidden, positions)
        keys.append(k)
        values.append(v)
        hidden = head.finish(hidden, mix(q, keys, values))
        guess = head.logits(hidden).float()
        entropy = -(labels[:, here] * guess.log_softmax(-1)).sum(-1)
        losses.append((entropy * mass[:, here]).mean())
        hits.append((head.draft_ids[guess.argmax(-1)] == best[:, here]).float().mean())
    return torch.stack(losses), torch.stack(hits)


def make_loss(head: Eagle3Head, target: Target, ttt: int, compiled: bool):
    """A function of ids [batch, n + ttt] that gives chain_losses of the frozen target's features."""
    chains = torch.compile(chain_losses, dynamic=False) if compiled else chain_losses

    def losses(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits, aux = target.run(ids)
            return chains(head, aux, target.embed(ids), logits, ttt)

    return losses


def initial_head(target: Target, shape: HeadShape, draft_ids: torch.Tensor) -> Eagle3Head:
    """A head that starts from the target: its output rows and final norm, and the last layer's feature."""
    head = Eagle3Head(shape, draft_ids.cpu()).to(draft_ids.device)
    with torch.no_grad():
        for matrix in (p for p in head.parameters() if p.ndim > 1):
            matrix.normal_(std=0.02)
        head.lm_head.weight.copy_(target.model.lm_head.weight[draft_ids])
        head.norm.weight.copy_(target.model.model.norm.weight)
        head.fc.weight[:, -shape.hidden :] += torch.eye(shape.hidden, device=draft_ids.device)
    return head


def train(
    head: Eagle3Head,
    target: Target,
    generated: torch.Tensor,
    heldout: torch.Tensor,
    streams: dict[str, Stream],
    settings: Settings,
    every: int,
    compiled: bool,
) -> tuple[dict, dict]:
    """Train on generated rows and corpus windows. Returns the best weights and the log of the losses."""
    device = generated.device
    generator = torch.Generator().manual_seed(settings.seed + 2)
    losses_of = make_loss(head, target, settings.ttt, compiled)
    step_weights = settings.decay ** torch.arange(settings.ttt, device=device)
    step_weights = step_weights / step_weights.sum()
    optimizer = torch.optim.AdamW(
        parameter_groups(head, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, settings.warmup, settings.steps, floor=0.02)
    )
    log = {"step": [], "train": [], "heldout": [], "heldout_hits": [], "step_ms": []}
    best, best_weights, running = float("inf"), {}, []
    checked = time.perf_counter()
    bar = tqdm(range(1, settings.steps + 1), desc="head", mininterval=5)
    for step in bar:
        rows = torch.randint(0, len(generated), (settings.batch,), generator=generator).to(device)
        losses, _ = losses_of(generated[rows])
        loss = (losses * step_weights).sum()
        loss.backward()
        running.append(loss.detach())
        source = "library" if torch.rand((), generator=generator) < settings.library_share else "tests"
        windows = streams[source].chunks(settings.corpus_batch, settings.corpus_row + settings.ttt, generator, 0.1)
        corpus_share = settings.corpus_batch * settings.corpus_row / (settings.batch * settings.row)
        (losses_of(windows)[0] * step_weights).sum().mul(corpus_share).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0 or step == settings.steps:
            log["train"].append(round(torch.stack(running).mean().item(), 4))
            log["step_ms"].append(round(1000 * (time.perf_counter() - checked) / len(running), 2))
            running = []
            # with gradients on, though unused: the same compiled code as for training
            parts = [[value.detach() for value in losses_of(part)] for part in heldout.split(settings.batch)]
            check = (torch.stack([p[0] for p in parts]).mean(0) * step_weights).sum().item()
            log["step"].append(step)
            log["heldout"].append(round(check, 4))
            log["heldout_hits"].append([round(h, 4) for h in torch.stack([p[1] for p in parts]).mean(0).tolist()])
            bar.set_postfix(train=log["train"][-1], heldout=log["heldout"][-1], hits=log["heldout_hits"][-1])
            if check < best:
                best = check
                best_weights = {name: value.detach().clone() for name, value in head.state_dict().items()}
            checked = time.perf_counter()
    return best_weights, log


CARD = """---
license: psf-2.0
language: [code]
---
# nestling-eagle3

The EAGLE-3 draft head of `nestling` ({parameters:.2f} M parameters, bf16, `LlamaForCausalLMEagle3`): one decoder layer, a
draft vocabulary of {draft_vocab} of the {vocab} tokens, the target's own embedding. It reads the outputs of the target's layers
{layers} (residual stream, before the final norm).

- **Data**: {rows} rows of the target's own text ({own:.1f} M tokens written by the target: 60 % greedy, the rest at temperatures
  0.7 and 1.0), continuing passages of the CPython 3.11 standard library (Copyright (c) Python Software Foundation, PSF
  License Agreement version 2), and windows of that library itself. The target's held-out files are held out here too.
- **Training**: {steps} steps of {batch} generated rows of {row} slots and {corpus_batch} corpus rows of {corpus_row}; training-time test of
  {ttt} steps, step s weighted {decay}^s; soft labels: the target's distribution over the draft vocabulary, renormalised and
  weighted by its mass; AdamW, peak learning rate {learning_rate}, weight decay {weight_decay}, seed {seed}, bf16 autocast;
  {minutes:.1f} minutes on {machine}, of which {generation_minutes:.1f} to generate.
- **Held-out continuations**: hit rate of the first guess at steps 0 to {last}: {hits} (on true text at every step).
- The draft vocabulary covers {coverage:.1f} % of the tokens that the target writes.
- **Limits**: drafts for `nestling` only, on Python text; trained on contexts up to {corpus_row} tokens.

![losses](losses.png)
"""


def save(head: Eagle3Head, shape: HeadShape, folder: Path, result: dict) -> None:
    """Write weights (bf16; d2t int64, t2d bool), config, losses, plot and model card."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
        for name, value in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", shape.config())
    write_json(folder / "training.json", result)
    losses = result["losses"]
    curves = {name: (losses["step"], losses[name]) for name in ("train", "heldout")}
    plot_losses(folder / "losses.png", curves, "weighted cross-entropy, nats", "nestling-eagle3")
    settings = result["settings"]
    chosen = losses["heldout"].index(min(losses["heldout"]))
    card = CARD.format(
        **settings,
        parameters=sum(p.numel() for p in head.parameters()) / 1e6,
        draft_vocab=shape.draft_vocab,
        vocab=VOCAB_SIZE,
        layers=", ".join(map(str, shape.config()["eagle_config"]["eagle_aux_hidden_state_layer_ids"])),
        rows=result["generated_rows"],
        own=result["generated_tokens"] / 1e6,
        minutes=result["seconds"] / 60,
        generation_minutes=result["generation_seconds"] / 60,
        machine=result["machine"],
        last=settings["ttt"] - 1,
        hits=", ".join(f"{hit:.3f}" for hit in losses["heldout_hits"][chosen]),
        coverage=100 * result["draft_vocab_coverage"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The options; their defaults made the checkpoint in src/treetop/assets/nestling-eagle3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ASSETS / "nestling")
    parser.add_argument("--out", type=Path, default=ASSETS / "nestling-eagle3")
    parser.add_argument("--draft-vocab", type=int, default=HeadShape().draft_vocab)
    parser.add_argument("--intermediate", type=int, default=HeadShape().intermediate)
    parser.add_argument("--generated-rows", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--corpus-batch", type=int, default=8)
    parser.add_argument("--row", type=int, default=512)
    parser.add_argument("--corpus-row", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--ttt", type=int, default=6)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--every", type=int, default=250, help="steps between held-out losses")
    parser.add_argument("--chunk", type=int, default=2048, help="rows generated at a time")
    parser.add_argument("--heldout-rows", type=int, default=192)
    parser.add_argument("--reuse", action="store_true", help="train on the text that an earlier run generated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Generate, choose the draft vocabulary, train and write the checkpoint folder."""
    args = parse_arguments()
    names = ("steps", "batch", "corpus_batch", "generated_rows", "learning_rate", "weight_decay", "ttt", "decay")
    names += ("warmup", "seed", "row", "corpus_row")
    settings = Settings(**{name: getattr(args, name) for name in names})
    device = torch.device(args.device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    streams = load_streams(device)
    target = Target(args.target, device)
    newline = newline_tokens(args.target, device)

    began = time.perf_counter()
    if args.reuse:
        generated, prompt_lengths, heldout, generation_seconds = load_rows(device)
    else:
        share = settings.library_share
        sources = [(streams["library"], share), (streams["tests"], 1 - share)]
        generated, prompt_lengths = generate(target, sources, settings.generated_rows, settings, newline, args.chunk)
        heldout, _ = generate(target, [(streams["heldout"], 1.0)], args.heldout_rows, settings, newline, args.chunk)
        generation_seconds = time.perf_counter() - began
        save_rows(generated, prompt_lengths, heldout, generation_seconds)
    heldout = heldout[: max(1, len(heldout) // settings.batch) * settings.batch]
    draft_ids, coverage = choose_draft_ids(generated, prompt_lengths, streams["library"].ids, args.draft_vocab)
    own = int((generated.shape[1] - prompt_lengths).sum())
    print(f"{own} tokens written in {generation_seconds:.0f} s, draft vocabulary covers {coverage:.4f}", flush=True)

    shape = HeadShape(draft_vocab=args.draft_vocab, intermediate=args.intermediate)
    torch.manual_seed(settings.seed)  # whatever sampling has drawn by now
    head = initial_head(target, shape, draft_ids)
    began = time.perf_counter()
    weights, losses = train(head, target, generated, heldout, streams, settings, args.every, args.compiled)
    head.load_state_dict(weights)
    seconds = time.perf_counter() - began + generation_seconds
    result = {
        "settings": asdict(settings),
        "machine": machine(device),
        "seconds": round(seconds, 1),
        "generation_seconds": round(generation_seconds, 1),
        "generated_rows": len(generated),
        "generated_tokens": own,
        "draft_vocab_coverage": round(coverage, 4),
        "losses": losses,
    }
    save(head, shape, args.out, result)
    print(f"held-out {min(losses['heldout']):.4f}, {seconds:.0f} s, {bytes_of(args.out)} bytes")


if __name__ == "__main__":
    main()
