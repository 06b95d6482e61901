"""What idle ranks cost where ranks share experts: a round with one busy rank, and with all of them busy.

    python benchmarks/expert_ranks.py --model FOLDER --ranks 2 4 --batch 8 --speculative 3,1,4

Weights are random; FOLDER needs a config.json alone. Every busy rank decodes `--batch` requests for `--tokens` tokens.
A round's time is that of all rounds of a request, from its first token to its last, by their number; the median over
requests and repeats is printed with their least and most, a line of JSON a case. Prefill is not in it.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import cycle

from treetop.core.loop import SyncClient
from treetop.core.wire import ProcessOptions
from treetop.distributed.remote_engine import RankLink
from treetop.distributed.remote_thread import RemoteThread
from treetop.types.config import EngineConfig
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.types.sampling import SamplingParams

_PROMPT = 64


def rounds_ms(thread: RemoteThread, vocab_size: int, count: int, tokens: int) -> list[float]:
    """Milliseconds of a round of each of `count` requests, which run together."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = [tuple((7 * i + j) % vocab_size for j in range(_PROMPT)) for i in range(count)]
    rounds = dict.fromkeys((thread.next_id() for _ in prompts), 0)
    ended: list[RequestUpdate] = []
    with SyncClient(thread) as client:
        client.add([EngineRequest(i, prompt, params, 0) for i, prompt in zip(rounds, prompts, strict=True)])
        while len(ended) < count:
            for update in client.get():
                if update.engine_failed:
                    raise client.failure
                rounds[update.request_id] += update.accept_len is not None
                ended += [update] if update.finish_reason is not None else []
    found = []
    for update in ended:
        stats = update.stats
        assert stats is not None
        assert stats.first_token_s is not None
        found.append(1e3 * (stats.end_s - stats.first_token_s) / max(rounds[update.request_id], 1))
    return found


def next_place(links: Iterator[RankLink], request: EngineRequest, engine: int) -> RankLink:
    """The rank whose turn it is."""
    return next(links)


def measure(config: EngineConfig, batch: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Times of rounds, by who is busy."""
    thread = RemoteThread(ProcessOptions("", config))
    core = thread.core
    busy = {"one": [0], "all": [*range(config.ep_size)]}
    found: dict[str, list[float]] = {name: [] for name in busy}
    for repeat in range(repeats + 1):
        for name, ranks in busy.items():  # in turns, so that the machine's mood is the same for both
            links = cycle([core.engines[0].links[rank] for rank in ranks])
            core.engines[0].place = partial(next_place, links)
            times = rounds_ms(thread, core.info.vocab_size, batch * len(ranks), tokens)
            found[name] += times if repeat else []  # the first warms up
    thread.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--speculative", metavar="S,K,T", help="of the model's MTP layer; decodes plainly without it")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    options: dict[str, object] = {}
    if args.speculative:
        steps, topk, size = map(int, args.speculative.split(","))
        options = {"speculative_algorithm": "MTP", "speculative_num_steps": steps, "speculative_eagle_topk": topk}
        options["speculative_num_draft_tokens"] = size
    for ranks in args.ranks:
        config = EngineConfig.of(
            args.model,
            ep_size=ranks,
            load_format="dummy",
            device=args.device,
            max_running_requests=args.batch,
            context_length=args.context_length,
            **options,
        )
        times = measure(config, args.batch, args.tokens, args.repeats)
        medians = {name: statistics.median(each) for name, each in times.items()}
        line: dict[str, object] = {"ranks": ranks, "batch": args.batch, "speculative": args.speculative}
        for name, each in times.items():
            line[f"{name}_busy_ms"] = [round(n, 3) for n in (medians[name], min(each), max(each))]
        print(json.dumps({**line, "one_to_all": round(medians["one"] / medians["all"], 3)}), flush=True)


if __name__ == "__main__":
    main()
