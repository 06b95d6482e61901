"""Train a draft for nestling or a variant on the target's own text, by training-time test: EAGLE-3 head or MTP layer."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from common import (
    ASSETS,
    BUILD,
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
from draft import Eagle3Head, HeadShape, Target
from mtp import MtpLayer, save_with_target
from safetensors.torch import save_file
from tqdm import tqdm
from written import Rows, Settings, choose_draft_ids, load_rows, newline_tokens, write_rows

Draft = Eagle3Head | MtpLayer


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
    head: Draft, aux: torch.Tensor, embedding: torch.Tensor, logits: torch.Tensor, ttt: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [ttt] and greedy hits [ttt, batch, n] of each step of the training-time test.

    aux [batch, n + ttt, sizes], embedding [batch, n + ttt, hidden] and logits [batch, n + ttt, vocab] of
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
    hidden = head.start(aux[:, :n]).float()
    keys, values, losses, hits = [], [], [], []
    for step in range(ttt):
        here = slice(step + 1, step + 1 + n)
        positions = torch.arange(step, step + n, device=aux.device)
        residual, q, k, v = head.project(embedding[:, here], hidden, positions)
        keys.append(k)
        values.append(v)
        hidden = head.finish(residual, mix(q, keys, values))
        guess = head.logits(hidden).float()
        entropy = -(labels[:, here] * guess.log_softmax(-1)).sum(-1)
        losses.append((entropy * mass[:, here]).mean())
        hits.append((head.draft_ids[guess.argmax(-1)] == best[:, here]).float())
    return torch.stack(losses), torch.stack(hits)


def make_loss(head: Draft, target: Target, ttt: int, compiled: bool):
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


def check_heldout(
    losses_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    rows: Rows,
    batch: int,
    weights: torch.Tensor,
) -> tuple[float, list[float], float]:
    """Loss, hit rates and the tokens that a chain of drafts gives a round, over the held-out rows.

    The last is one token of the target and the drafts before the first miss, over what the target wrote itself.
    Gradients are on, though unused: the same compiled code as for training.
    """
    used = max(1, len(rows.heldout) // batch) * batch  # whole batches: one shape to compile
    parts = [[value.detach() for value in losses_of(part)] for part in rows.heldout[:used].split(batch)]
    hits = torch.cat([part[1] for part in parts], dim=1)  # [ttt, rows, n]
    slots = torch.arange(hits.shape[2], device=hits.device)
    own = slots[None] >= rows.heldout_lengths[:used, None].to(hits.device) - 1
    tokens = 1 + hits.cumprod(0).sum(0)[own].mean().item()
    loss = (torch.stack([part[0] for part in parts]).mean(0) * weights).sum().item()
    return loss, [round(hit, 4) for hit in hits.mean((1, 2)).tolist()], tokens


def train(
    head: Draft,
    target: Target,
    rows: Rows,
    streams: dict[str, Stream],
    settings: Settings,
    every: int,
    compiled: bool,
    limit_s: float | None,
) -> tuple[dict, dict]:
    """Train on generated rows and corpus windows. Returns the best weights and the log of the losses."""
    device = rows.ids.device
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
    progress = Progress(settings.steps, limit_s)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(progress.at(step), settings.warmup, settings.steps, floor=0.02)
    )
    log = {"step": [], "train": [], "heldout": [], "heldout_hits": [], "heldout_chain": [], "step_ms": []}
    best, best_weights, running = float("inf"), {}, []
    checked = time.perf_counter()
    bar = tqdm(range(1, settings.steps + 1), desc="head", mininterval=5)
    for step in bar:
        chosen = torch.randint(0, len(rows.ids), (settings.batch,), generator=generator).to(device)
        losses, _ = losses_of(rows.ids[chosen])
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
        ended = progress.at(step) == settings.steps
        if step % every == 0 or ended:
            log["train"].append(round(torch.stack(running).mean().item(), 4))
            log["step_ms"].append(round(1000 * (time.perf_counter() - checked) / len(running), 2))
            running = []
            check, hits, tokens = check_heldout(losses_of, rows, settings.batch, step_weights)
            log["step"].append(step)
            log["heldout"].append(round(check, 4))
            log["heldout_hits"].append(hits)
            log["heldout_chain"].append(round(tokens, 3))
            bar.set_postfix(train=log["train"][-1], heldout=log["heldout"][-1], hits=hits, chain=round(tokens, 3))
            if check < best:
                best = check
                best_weights = {name: value.detach().clone() for name, value in head.state_dict().items()}
            checked = time.perf_counter()
        if ended:
            break
    return best_weights, log


CARD = """---
license: psf-2.0
language: [code]
---
# {name}

{what}

- **Data**: {rows} rows of the target's own text ({own:.1f} M tokens written by the target: 60 % greedy, the rest at temperature
  {temperatures}), continuing passages of the CPython 3.11 standard library (Copyright (c) Python Software Foundation, PSF
  License Agreement version 2), and windows of that library itself. The target's held-out files are held out here too.
- **Training**: {done} steps of {batch} generated rows of {row} slots and {corpus_batch} corpus rows of {corpus_row}; training-time test of
  {ttt} steps, step s weighted {decay}^s; soft labels: the target's distribution over the draft vocabulary, renormalised and
  weighted by its mass; AdamW, peak learning rate {learning_rate}, weight decay {weight_decay}, seed {seed}, bf16 autocast;
  {minutes:.1f} minutes on {machine}, of which {generation_minutes:.1f} to generate.
- **Held-out continuations**: hit rate of the first guess at steps 0 to {last}: {hits} (on true text at every step);
  a chain of {ttt} drafts gives {chain:.2f} tokens a round, bonus included.
- **Limits**: drafts for `{target}` only, on Python text; trained on contexts up to {longest} tokens.
"""
EAGLE3 = """The EAGLE-3 draft head of `{target}` ({parameters:.2f} M parameters, bf16, `LlamaForCausalLMEagle3`): one decoder layer, a
draft vocabulary of {draft_vocab} of the {vocab} tokens, the target's own embedding. It reads the outputs of the target's layers
{layers} (residual stream, before the final norm). The draft vocabulary covers {coverage:.1f} % of the tokens that the target writes."""
MTP = """A small Python code model (Qwen2, bf16) with an MTP layer of {parameters:.2f} M parameters in MiMo's naming, made as test
data of treetop. The target was trained first, as `{target}` by `target.py`; then the layer alone, by using it again and again
on its own normed output. Target: {target_training}."""


def write_card(draft: Draft, target: Path, folder: Path, result: dict, target_training: str) -> None:
    """Write the model card from the run's own figures."""
    losses, settings = result["losses"], result["settings"]
    chosen = losses["heldout"].index(min(losses["heldout"]))
    facts = {"target": target.name, "parameters": sum(p.numel() for p in draft.parameters()) / 1e6}
    if isinstance(draft, Eagle3Head):
        layers = draft.shape.config()["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        what = EAGLE3.format(
            **facts,
            draft_vocab=draft.shape.draft_vocab,
            vocab=VOCAB_SIZE,
            layers=", ".join(map(str, layers)),
            coverage=100 * result["draft_vocab_coverage"],
        )
    else:
        what = MTP.format(**facts, target_training=target_training)
    told = {name: value for name, value in settings.items() if name != "temperatures"}
    card = CARD.format(
        **told,
        what=what,
        name=folder.name,
        target=target.name if isinstance(draft, Eagle3Head) else folder.name,
        temperatures=" and ".join(map(str, settings["temperatures"])),
        done=losses["step"][-1],
        rows=result["generated_rows"],
        own=result["generated_tokens"] / 1e6,
        minutes=result["seconds"] / 60,
        generation_minutes=result["generation_seconds"] / 60,
        machine=result["machine"],
        last=settings["ttt"] - 1,
        hits=", ".join(f"{hit:.3f}" for hit in losses["heldout_hits"][chosen]),
        chain=losses["heldout_chain"][chosen],
        longest=max(settings["row"], settings["corpus_row"]),
    )
    plot = "\n![losses](losses.png)\n" if (folder / "losses.png").exists() else ""
    (folder / "README.md").write_text(card + plot, encoding="utf-8")


def save(draft: Draft, target: Path, folder: Path, result: dict, plot: bool) -> None:
    """Write weights (bf16; d2t int64, t2d bool), config, losses and model card; of an MTP layer with its target."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = json.loads((target / "training.json").read_text(encoding="utf-8"))
    if isinstance(draft, Eagle3Head):
        tensors = {
            name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
            for name, value in draft.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", draft.shape.config())
        write_json(folder / "training.json", result)
    else:
        save_with_target(draft, target, folder)
        write_json(folder / "training.json", {"target": trained, "mtp": result})
    losses = result["losses"]
    if plot:
        curves = {name: (losses["step"], losses[name]) for name in ("train", "heldout")}
        plot_losses(folder / "losses.png", curves, "weighted cross-entropy, nats", folder.name)
    of_target = f"{trained['losses']['step'][-1]} steps, held-out loss {trained['heldout_loss_bf16']:.3f} nats a token"
    write_card(draft, target, folder, result, of_target)


def parse_arguments() -> argparse.Namespace:
    """The options; their defaults made the checkpoint in src/treetop/assets/nestling-eagle3."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--target", type=Path, default=ASSETS / "nestling")
    parser.add_argument("--out", type=Path, default=ASSETS / "nestling-eagle3")
    parser.add_argument("--draft-vocab", type=int, default=HeadShape().draft_vocab)
    parser.add_argument("--intermediate", type=int, default=HeadShape().intermediate)
    parser.add_argument("--generated-rows", type=int, default=16384)
    parser.add_argument("--prompt-lengths", type=int, nargs="+", default=(64, 128, 256, 384))
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.7, 1.0), help="beside greedy")
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
    parser.add_argument("--limit-s", type=float, help="seconds of training after which the schedule is over")
    parser.add_argument("--no-plot", dest="plot", action="store_false")
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Generate, choose the draft vocabulary, train and write the checkpoint folder."""
    args = parse_arguments()
    args.prompt_lengths, args.temperatures = tuple(args.prompt_lengths), tuple(args.temperatures)
    names = [field.name for field in fields(Settings) if hasattr(args, field.name)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    device = torch.device(args.device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    streams = load_streams(device)
    target = Target(args.target, device, last_hidden=args.kind == "mtp")

    file = BUILD / f"{args.target.name}-generated.npz"
    if args.reuse:
        rows = load_rows(file, device)
    else:
        newline = newline_tokens(args.target, device)
        rows = write_rows(target, streams, settings, newline, args.chunk, args.heldout_rows)
        rows.save(file)
    own = int((rows.ids.shape[1] - rows.prompt_lengths).sum())
    print(f"{own} tokens written in {rows.seconds:.0f} s", flush=True)

    torch.manual_seed(settings.seed)  # whatever sampling has drawn by now
    result = {
        "settings": asdict(settings),
        "machine": machine(device),
        "generation_seconds": round(rows.seconds, 1),
        "generated_rows": len(rows.ids),
        "generated_tokens": own,
    }
    if args.kind == "mtp":
        draft = MtpLayer(target).to(device)
    else:
        library = streams["library"].ids
        draft_ids, coverage = choose_draft_ids(rows.ids, rows.prompt_lengths, library, args.draft_vocab)
        result["draft_vocab_coverage"] = round(coverage, 4)
        shape = HeadShape(args.draft_vocab, target.model.config.hidden_size, intermediate=args.intermediate)
        draft = initial_head(target, shape, draft_ids)
    began = time.perf_counter()
    weights, losses = train(draft, target, rows, streams, settings, args.every, args.compiled, args.limit_s)
    draft.load_state_dict(weights)
    seconds = time.perf_counter() - began + rows.seconds
    result |= {"seconds": round(seconds, 1), "losses": losses}
    save(draft, args.target, args.out, result, args.plot)
    figures = f"hits {losses['heldout_hits'][-1]}, {losses['heldout_chain'][-1]:.3f} tokens a round in a chain"
    print(f"held-out {min(losses['heldout']):.4f}, {figures}, {seconds:.0f} s, {bytes_of(args.out)} bytes")


if __name__ == "__main__":
    main()
