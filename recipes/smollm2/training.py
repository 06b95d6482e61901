"""What training a head has in common, of whatever kind: conversations in rows, the loop with its schedule, the folder.

A schedule is by time, so a run may be cut into pieces that `--resume` goes on from.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from texts import BUILD
from torch import Tensor, nn


class Pack(NamedTuple):
    """Conversations side by side in rows of one length. All [rows, length].

    ids: int64. document: int32, which conversation a token is of, -1 for padding. position: int64, within it.
    own: bool, the target wrote it.
    """

    ids: Tensor
    document: Tensor
    position: Tensor
    own: Tensor


def load(folder: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(kind, ids, own) of every conversation in a folder of parts."""
    found = []
    for file in sorted(folder.glob("*.npz")):
        with np.load(file) as part:
            ids, own, starts = part["ids"], part["own"], part["starts"]
            ends = [*starts[1:], len(ids)]
            for kind, begin, end in zip(part["kinds"], starts, ends, strict=True):
                found.append((str(kind), ids[begin:end], own[begin:end]))
    return found


def packed(conversations: list[tuple[np.ndarray, np.ndarray]], length: int) -> Pack:
    """First fit into rows of `length`, in the order given; longer conversations are cut."""
    rows: list[list[int]] = []
    room: list[int] = []
    open_rows: list[int] = []
    for number, (ids, _) in enumerate(conversations):
        need = min(len(ids), length)
        row = next((r for r in open_rows if room[r] >= need), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(length)
            open_rows = [*open_rows[-63:], row]
        rows[row].append(number)
        room[row] -= need
    shape = (len(rows), length)
    ids, position = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    document, own = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for row, numbers in enumerate(rows):
        at = 0
        for number in numbers:
            some = conversations[number][0][:length]
            here = slice(at, at + len(some))
            ids[row, here], own[row, here] = some, conversations[number][1][: len(some)]
            document[row, here], position[row, here] = number, np.arange(len(some))
            at += len(some)
    return Pack(*(torch.from_numpy(array) for array in (ids, document, position, own)))


def batch_of(pack: Pack, rows: Tensor, device: torch.device) -> Pack:
    """Some rows, on the device."""
    return Pack(*(part[rows].to(device, non_blocking=True) for part in pack))


def choose_vocab(train: list[tuple[str, np.ndarray, np.ndarray]], vocab: int, size: int) -> tuple[Tensor, float]:
    """The tokens that the target writes most often, ascending [size] int64, and the share of its text they cover."""
    counts = sum((np.bincount(ids[own], minlength=vocab) for _, ids, own in train), np.zeros(vocab, np.int64))
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / counts.sum())


Loss = Callable[[Pack, torch.Generator], Tensor]
"""Of some rows, on the device; what is drawn at random comes of the generator."""


class Training:
    """The head, its optimizer and how far it has come; all of it goes into a file for `--resume`."""

    def __init__(self, head: nn.Module, loss: Loss, pack: Pack, args: argparse.Namespace, device: torch.device) -> None:
        self._head, self._loss, self._pack, self._args, self._device = head, loss, pack, args, device
        matrices = [p for p in head.parameters() if p.ndim > 1]
        vectors = [p for p in head.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=fused)
        self._generator = torch.Generator().manual_seed(args.seed)
        self.log: list[dict] = []
        self.spent_s, self.step = 0.0, 0

    def run(self) -> None:
        """Train until the schedule's end, or the piece's. What compiling takes is no training."""
        losses = [self._one_step(0.0)]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        before, began = self.spent_s, time.perf_counter()
        said = began
        total, piece = 60 * self._args.minutes, 60 * (self._args.piece_minutes or self._args.minutes)
        while self.spent_s < min(total, before + piece):
            losses.append(self._one_step(self.spent_s / total))
            now = time.perf_counter()
            self.spent_s = before + now - began
            if now - said > 30:
                said, mean = now, torch.stack(losses).mean().item()
                self.log.append({"step": self.step, "minutes": round(self.spent_s / 60, 2), "loss": round(mean, 4)})
                losses = []
                print(json.dumps(self.log[-1]), flush=True)

    def _one_step(self, share: float) -> Tensor:
        """One step, `share` of the schedule done; returns its loss."""
        args = self._args
        rate = min(1.0, (self.step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * min(1.0, share))))
        for group in self._optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        rows = torch.randint(0, len(self._pack.ids), (args.batch,), generator=self._generator)
        batch = batch_of(self._pack, rows, self._device)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._loss(batch, self._generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def keep(self, file: Path) -> None:
        """Write what `resume` reads."""
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict(), "log": self.log}
        state |= {"spent_s": self.spent_s, "step": self.step, "generator": self._generator.get_state()}
        torch.save(state, file)

    def resume(self, file: Path) -> None:
        """Go on from what an earlier run kept."""
        kept = torch.load(file, map_location=self._device, weights_only=False)
        self._head.load_state_dict(kept["head"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._generator.set_state(kept["generator"].cpu())
        self.log, self.spent_s, self.step = kept["log"], kept["spent_s"], kept["step"]


def parser_of(description: str | None, output: str, decay: float) -> argparse.ArgumentParser:
    """The options that all heads have. output: a name in BUILD. decay: the weight of a depth over that of the one before."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=BUILD / output)
    parser.add_argument("--minutes", type=float, default=8, help="of training; the schedule is by time")
    parser.add_argument("--piece-minutes", type=float, help="end this run then, for --resume to go on")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--decay", type=float, default=decay)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--draft-vocab", type=int, default=10240)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


class Written(NamedTuple):
    """What the target wrote: rows to train on, rows of each kind that are held out, the draft vocabulary.

    vocab: [draft_vocab] int64 ids of the target, ascending. facts: for the record.
    """

    pack: Pack
    checks: dict[str, Pack]
    vocab: Tensor
    facts: dict[str, float]


def read_written(args: argparse.Namespace, vocab_size: int) -> Written:
    """All of it, in rows of `--length`."""
    train, heldout = load(BUILD / "answers"), load(BUILD / "heldout")
    vocab, coverage = choose_vocab(train, vocab_size, args.draft_vocab)
    tokens = sum(int(own.sum()) for _, _, own in train)
    order = np.random.default_rng(args.seed).permutation(len(train))
    pack = packed([train[i][1:] for i in order], args.length)
    kinds = sorted({kind for kind, _, _ in heldout})
    checks = {kind: packed([c[1:] for c in heldout if c[0] == kind], args.length) for kind in kinds}
    print(
        f"{len(train)} conversations, {tokens / 1e6:.1f} M tokens of the target's, {len(pack.ids)} rows;"
        f" draft vocabulary {args.draft_vocab} covers {coverage:.2%}",
        flush=True,
    )
    return Written(pack, checks, vocab, {"coverage": coverage, "written": tokens})


Hits = Callable[[Pack], tuple[Tensor, Tensor]]
"""Of some rows: greedy hits by depth, and whether the target wrote what was to be predicted, [depths, ...] bool each."""


@torch.no_grad()
def evaluate(hits_of: Hits, packs: dict[str, Pack], device: torch.device) -> dict:
    """Of each kind of held-out conversation: hit rates by depth, and the tokens that a greedy chain gives a round."""
    figures = {}
    for kind, pack in packs.items():
        parts = [hits_of(batch_of(pack, rows, device)) for rows in torch.arange(len(pack.ids)).split(8)]
        hit, counted = (torch.cat([part[i].flatten(1) for part in parts], 1) for i in (0, 1))
        whole = counted.all(0)
        tokens = 1 + hit[:, whole].float().cumprod(0).sum(0).mean()
        rates = [round(some[there].float().mean().item(), 4) for some, there in zip(hit, counted, strict=True)]
        figures[kind] = {"hits": rates, "chain": round(tokens.item(), 3)}
    return figures


def fit(head: nn.Module, config: dict, loss: Loss, hits_of: Hits, written: Written, args: argparse.Namespace) -> None:
    """Train, measure on held-out conversations, and write the checkpoint with this config.json beside it."""
    device = torch.device(args.device)
    print(f"head {sum(p.numel() for p in head.parameters()) / 1e6:.2f} M", flush=True)
    training, state = Training(head, loss, written.pack, args, device), args.output.with_suffix(".state.pt")
    if args.resume:
        training.resume(state)
    training.run()
    training.keep(state)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        figures = evaluate(hits_of, written.checks, device)
    for kind, each in figures.items():
        print(kind, json.dumps(each), flush=True)
    facts = {**written.facts, "steps": training.step, "minutes": training.spent_s / 60}
    save(head, config, args, training.log, facts, figures)


def save(head: nn.Module, config: dict, args: argparse.Namespace, log: list[dict], facts: dict, figures: dict) -> None:
    """The checkpoint in bfloat16, and what its training was."""
    args.output.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in head.state_dict().items()
    }
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, args.output / "model.safetensors")
    (args.output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    chosen = {name: value for name, value in chosen.items() if name not in ("model", "output", "resume")}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {
        "settings": chosen,
        **facts,
        "machine": f"{name}, torch {torch.__version__}",
        "heldout": figures,
        "log": log,
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
