"""Train a target, nestling or one of its variants, on the standard library, kept at its best held-out loss."""

import argparse
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import (
    ASSETS,
    BUILD,
    CONTEXT,
    TOKENIZER,
    VOCAB_SIZE,
    Progress,
    Stream,
    bytes_of,
    cosine_with_warmup,
    load_streams,
    machine,
    parameter_groups,
    plot_losses,
    write_json,
)
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel
from variants import ROUTER_LOSS, VARIANTS, use_fast_functions


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run depends on besides the corpus. `mixture`: share of the windows from each group."""

    steps: int
    batch: int
    length: int
    learning_rate: float
    weight_decay: float
    dropout: float
    warmup: int
    seed: int
    mixture: tuple[tuple[str, float], ...] = (("library", 0.60), ("tests", 0.36), ("tables", 0.04))
    share_at_start: float = 0.1


def add_dropout(model: PreTrainedModel, share: float) -> None:
    """Dropout on what every block adds to the residual stream; active in training mode only."""

    def drop(module: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, share, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        last = layer.mlp.experts if hasattr(layer.mlp, "experts") else layer.mlp.down_proj
        last.register_forward_hook(drop)


def next_token_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a token; ids [rows, n + 1] int64, of which n are predicted.

    While a model with experts trains, it comes with the loss that spreads tokens over them.
    """
    routed = {"output_router_logits": True} if model.training and hasattr(model.config, "num_local_experts") else {}
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        output = model(input_ids=ids[:, :-1], use_cache=False, **routed)  # logits: [rows, n, vocab]
    loss = functional.cross_entropy(output.logits.float().flatten(0, 1), ids[:, 1:].flatten())
    return loss + ROUTER_LOSS * output.aux_loss if routed else loss


def windows(streams: dict[str, Stream], settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """One training batch, [batch, length + 1] int64: each row from a group drawn by the mixture."""
    shares = torch.tensor([share for _, share in settings.mixture])
    groups = torch.multinomial(shares, settings.batch, replacement=True, generator=generator)
    counts = torch.bincount(groups, minlength=len(shares)).tolist()
    rows = [
        streams[name].chunks(count, settings.length + 1, generator, settings.share_at_start)
        for (name, _), count in zip(settings.mixture, counts, strict=True)
    ]
    return torch.cat(rows)


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, ids: torch.Tensor, length: int, rows: int = 16) -> float:
    """Loss over the held-out stream in windows of `length` that do not overlap (the rest is dropped)."""
    model.eval()
    count = (len(ids) - 1) // length
    parts = torch.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])
    used = count // rows * rows or count  # whole batches: one shape to compile
    losses = [next_token_loss(model, part) for part in parts[:used].split(rows)]
    model.train()
    return torch.stack(losses).mean().item()


def train(
    model: PreTrainedModel,
    streams: dict[str, Stream],
    settings: Settings,
    every: int,
    compiled: bool,
    keep: str,
    limit_s: float | None,
) -> tuple[dict, dict]:
    """Train, watching the held-out loss. Returns the weights to keep (best or last) and the log of the losses."""
    device = streams["library"].ids.device
    generator = torch.Generator().manual_seed(settings.seed)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    progress = Progress(settings.steps, limit_s)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(progress.at(step), settings.warmup, settings.steps, floor=0.02)
    )
    log = {"step": [], "train": [], "heldout": []}
    best, best_weights, running = float("inf"), {}, []
    model.train()
    bar = tqdm(range(1, settings.steps + 1), desc="target", mininterval=5)
    for step in bar:
        loss = next_token_loss(forward, windows(streams, settings, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running.append(loss.detach())
        ended = progress.at(step) == settings.steps
        if step % every == 0 or ended:
            heldout = heldout_loss(forward, streams["heldout"].ids, settings.length)
            log["step"].append(step)
            log["train"].append(round(torch.stack(running).mean().item(), 4))
            log["heldout"].append(round(heldout, 4))
            running = []
            bar.set_postfix(train=log["train"][-1], heldout=log["heldout"][-1], best=round(min(best, heldout), 4))
            if heldout < best or keep == "last":
                best = min(best, heldout)
                best_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        if ended:
            break
    return best_weights, log


CARD = """---
license: psf-2.0
language: [code]
library_name: transformers
---
# {name}

A small Python code model ({parameters:.1f} M parameters, `{architecture}`, bf16), made to try out and test speculative
decoding without a download. Its draft head is `{name}-eagle3`.

- **Data**: the source of the CPython 3.11 standard library, tests included, Copyright (c) Python Software Foundation
  and its contributors, used under the PSF License Agreement version 2. {heldout_files} held-out files (by hash of the path)
  were seen by neither the tokenizer nor the training.
- **Tokenizer**: byte-level BPE, {vocab} tokens, trained on the library files alone (no tests, no tables). It adds no tokens and
  round-trips every text. `<|endoftext|>` stands between files.
- **Training**: {done} steps of {batch} x {length} tokens ({tokens:.0f} M tokens; library 60 %, tests 36 %, tables 4 % of the windows),
  AdamW, peak learning rate {learning_rate}, weight decay {weight_decay}, residual dropout {dropout}, seed {seed}, bf16 autocast;
  {minutes:.1f} minutes on {machine}. The checkpoint with the best held-out loss is kept.
- **Held-out loss**: {heldout:.3f} nats a token (perplexity {perplexity:.1f}), in bf16, windows of {length} tokens.
  Training loss at the end, with dropout: {train:.3f}.
- **Limits**: it writes plausible, not correct, code; it has seen one code base, English comments and nothing else, and
  repeats passages of it; under greedy decoding it often ends in a loop. Tests of held-out modules were
  in the training data. Contexts beyond {length} tokens were never seen.
"""


def write_card(
    folder: Path, model: PreTrainedModel, settings: Settings, result: dict, parameters: int, heldout_files: int
) -> None:
    """Write the model card from the run's own figures."""
    losses = result["losses"]
    card = CARD.format(
        name=folder.name,
        architecture=type(model).__name__,
        done=losses["step"][-1],
        **asdict(settings),
        parameters=parameters / 1e6,
        vocab=VOCAB_SIZE,
        heldout_files=heldout_files,
        tokens=losses["step"][-1] * settings.batch * settings.length / 1e6,
        minutes=result["seconds"] / 60,
        machine=result["machine"],
        heldout=result["heldout_loss_bf16"],
        perplexity=2.718281828 ** result["heldout_loss_bf16"],
        train=losses["train"][-1],
    )
    plot = "\n![losses](losses.png)\n" if (folder / "losses.png").exists() else ""
    (folder / "README.md").write_text(card + plot, encoding="utf-8")


def save(model: PreTrainedModel, folder: Path, result: dict, plot: bool) -> None:
    """Write weights in bf16, tokenizer, losses and perhaps their plot."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    write_json(folder / "training.json", result)
    if plot:
        losses = result["losses"]
        curves = {name: (losses["step"], losses[name]) for name in ("train", "heldout")}
        plot_losses(folder / "losses.png", curves, "nats a token", folder.name)


def parse_arguments() -> argparse.Namespace:
    """The options; their defaults made the checkpoint in src/treetop/assets/nestling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="nestling")
    parser.add_argument("--out", type=Path, help="folder to write; nestling's is in src/treetop/assets")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=CONTEXT)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--every", type=int, default=200, help="steps between held-out losses")
    parser.add_argument("--keep", choices=("best", "last"), default="best", help="which weights, by held-out loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, help="seconds of training after which the schedule is over")
    parser.add_argument("--no-plot", dest="plot", action="store_false")
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out = args.out or (ASSETS / "nestling" if args.variant == "nestling" else BUILD / f"nestling-{args.variant}")
    return args


def main() -> None:
    """Train and write the checkpoint folder."""
    args = parse_arguments()
    names = ("steps", "batch", "length", "learning_rate", "weight_decay", "dropout", "warmup", "seed")
    settings = Settings(**{name: getattr(args, name) for name in names})
    device = torch.device(args.device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    streams = load_streams(device)
    model = VARIANTS[args.variant]().to(device)
    use_fast_functions(model)
    add_dropout(model, settings.dropout)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters, {settings}")

    began = time.perf_counter()
    weights, losses = train(model, streams, settings, args.every, args.compiled, args.keep, args.limit_s)
    seconds = time.perf_counter() - began
    model.load_state_dict(weights)
    model = model.to(torch.bfloat16)
    heldout = heldout_loss(model, streams["heldout"].ids, settings.length)
    result = {
        "settings": asdict(settings),
        "machine": machine(device),
        "seconds": round(seconds, 1),
        "heldout_loss_bf16": round(heldout, 4),
        "losses": losses,
    }
    save(model, args.out, result, args.plot)
    write_card(args.out, model, settings, result, parameters, len(streams["heldout"].starts))
    tokens = losses["step"][-1] * settings.batch * settings.length
    speed = f"{seconds:.0f} s, {tokens / seconds:.0f} tokens/s"
    print(f"held-out {heldout:.4f} in bf16, {speed}, {bytes_of(args.out)} bytes")


if __name__ == "__main__":
    main()
