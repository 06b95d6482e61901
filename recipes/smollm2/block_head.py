"""Train a block head of SmolLM2, DSpark's, on what the target wrote: build/smollm2/smollm2-dspark, in `speculators`' layout.

    python recipes/smollm2/block_head.py --model FOLDER --minutes 5.5
    python recipes/smollm2/block_head.py --model FOLDER --minutes 5.5 --resume      # goes on with the same schedule

Each step draws places of a batch of rows, and runs all blocks that begin there in one pass over the rows' context.
`block_network.py` has the mathematics.
"""

import torch
from block_network import MASK, TAPS, BlockHead, Blocks, BlockShape, drawn_anchors, loss_of_blocks
from network import Shape, Target, visible
from torch import Tensor
from training import Pack, fit, parser_of, read_written


def main() -> None:
    """Train, measure on held-out conversations, and write the checkpoint."""
    parser = parser_of(__doc__, "smollm2-dspark", decay=0.85)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block", type=int, default=8, help="tokens that a pass proposes")
    parser.add_argument("--rank", type=int, default=128, help="of the recurrence over a path")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of a row in a step")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    target = Target(args.model, device, TAPS)
    written = read_written(args, target.vocab_size)
    shape = BlockShape(Shape.of(target, args.draft_vocab), args.layers, args.block, args.rank)
    head = BlockHead(shape, written.vocab).to(device)
    head.begin_from(target)
    mask_row = target.model.model.embed_tokens.weight[MASK].detach()
    compiled = loss_of_blocks if args.no_compile else torch.compile(loss_of_blocks, dynamic=False)
    decay = args.decay ** torch.arange(args.block, device=device)
    check = torch.Generator().manual_seed(args.seed)

    def loss(batch: Pack, generator: torch.Generator) -> Tensor:
        features = target.run(batch.ids, batch.position, visible(batch.document))
        anchors = drawn_anchors(batch.document, batch.own, args.anchors, args.block, generator)
        part: Blocks = compiled(head, features, mask_row, *batch, anchors, args.prompt_weight)
        return (part.losses * decay).sum() / decay.sum()

    def hits_of(batch: Pack) -> tuple[Tensor, Tensor]:
        features = target.run(batch.ids, batch.position, visible(batch.document))
        anchors = drawn_anchors(batch.document, batch.own, args.anchors, args.block, check)
        part = loss_of_blocks(head, features, mask_row, *batch, anchors)
        return part.hits, part.counted

    fit(head, shape.config(), loss, hits_of, written, args)


if __name__ == "__main__":
    main()
