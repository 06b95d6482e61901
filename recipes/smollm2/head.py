"""Train the EAGLE-3 head of SmolLM2 on what the target wrote, by training-time test: build/smollm2/smollm2-eagle3.

    python recipes/smollm2/head.py --model FOLDER --minutes 8
    python recipes/smollm2/head.py --model FOLDER --minutes 0.8 --output build/smollm2/smollm2-eagle3-tenth
    python recipes/smollm2/head.py --model FOLDER --minutes 8 --resume      # goes on with the same schedule

Source: EAGLE-3, arXiv:2503.01840. The chain that begins at slot i reads, at step s, the embedding of token i + s + 1 and
its own last state (at step 0 the target's features of token i), sees the first step's slots 0..i and its own steps, and is
to predict what the target predicts behind token i + s + 1. The loss is the cross-entropy with the target's distribution
over the draft vocabulary, renormalised, weighted by the mass that it had.
"""

import torch
from network import Chains, Head, Shape, Target, loss_of_chains, visible
from torch import Tensor
from training import Pack, fit, parser_of, read_written


def main() -> None:
    """Train, measure on held-out conversations, and write the checkpoint."""
    parser = parser_of(__doc__, "smollm2-eagle3", decay=0.9)
    parser.add_argument("--ttt", type=int, default=6, help="steps of the training-time test")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    target = Target(args.model, device)
    written = read_written(args, target.vocab_size)
    head = Head(Shape.of(target, args.draft_vocab), written.vocab).to(device)
    head.begin_from(target)
    compiled = loss_of_chains if args.no_compile else torch.compile(loss_of_chains, dynamic=False)
    decay = args.decay ** torch.arange(args.ttt, device=device)

    def loss(batch: Pack, _: torch.Generator) -> Tensor:
        features = target.run(batch.ids, batch.position, visible(batch.document))
        part: Chains = compiled(head, features, batch.document, batch.position, batch.own, args.ttt, args.prompt_weight)
        return (part.losses * decay).sum() / decay.sum()

    def hits_of(batch: Pack) -> tuple[Tensor, Tensor]:
        features = target.run(batch.ids, batch.position, visible(batch.document))
        part = loss_of_chains(head, features, batch.document, batch.position, batch.own, args.ttt)
        return part.hits, part.counted

    fit(head, head.shape.config(), loss, hits_of, written, args)


if __name__ == "__main__":
    main()
