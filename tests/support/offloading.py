"""Engines on a CPU with the tier of K/V on the host, which users get on a GPU alone."""

import errno
import json
import random
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from unittest.mock import patch

from support.engines import build, greedy, hold_core_thread, rest, steps
from treetop.cache import disk_store
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest

GIB = 2**30
NUMBERS = count(10**7)
VOCAB = 7
POOL = {
    "context_length": 160,
    "max_total_tokens": 208,
    "max_running_requests": 2,
    "page_size": 16,
    "chunked_prefill_size": 64,
}
"""Room for one request at the context wall and a little more."""


@contextmanager
def on_a_cpu(least_tokens=16):
    """What is made inside may have a tier on a CPU. least_tokens: that a load brings at least."""
    with (
        patch("treetop.engine.startup.host_layout.refuse_cpu", lambda size, device: None),
        patch("treetop.cache.host_tier.LEAST_TOKENS", least_tokens),
        patch("treetop.engine.startup.host_layout.COPIED_BYTES", 2**14),
    ):
        yield


def with_tier(pair, shape=(3, 3, 8), mib=4, **options):
    return build(pair, shape, kv_offloading_size=mib / 1024, **options)


def turns(rng, agents=5, count=2, first=90, more=20, vocab=VOCAB):
    """(agent, prompt so far) of agents that take turns, each prompt the beginning of its next."""
    texts = [[rng.randrange(vocab) for _ in range(first)] for _ in range(agents)]
    for _ in range(count):
        for agent, text in enumerate(texts):
            yield agent, list(text)
            text += [rng.randrange(vocab) for _ in range(more)]


def ask(llm, asked):
    """(tokens, accept lengths) of prompts that are served one after the other."""
    outputs = [llm.generate([prompt], [greedy(9, whole=True)])[0] for _, prompt in asked]
    return [(each.token_ids, each.metrics.accept_lens) for each in outputs]


def stats(llm):
    return llm.scheduler.load.host_tier


def ask_salted(llm, asked, salt):
    """Cached tokens of prompts of one salt, one after the other."""
    cached = []
    for _, prompt in asked:
        if not llm.scheduler.has_work:
            hold_core_thread(llm)
        given = EngineRequest(RequestId(next(NUMBERS)), tuple(prompt), greedy(9, whole=True), 0, cache_salt=salt)
        request = llm.scheduler.add(given)
        for _ in steps(llm):
            pass
        cached.append(request.num_cached_tokens)
    return cached


def live(target, head, folder, seed, turns_asked, most_gib):
    """An engine with a disk that is full now and then: a line of JSON a prompt, then one of its books; for a process of
    its own, which may be killed at any time.
    """
    rng, write = random.Random(seed), disk_store._write

    def now_and_then(path, parts):
        parts = [*parts]
        if rng.random() < 0.1:
            write(path, parts[:1])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, parts)

    disk = {"kv_offloading_folder": folder, "kv_offloading_disk_size": most_gib}
    pair = SimpleNamespace(target=target, head=head)
    with on_a_cpu(), patch.object(disk_store, "_write", now_and_then), patch.object(disk_store, "RETRY_S", 0.05):
        llm = with_tier(pair, mib=0.6, **{**POOL, **disk})
        asked = [*turns(random.Random(4), count=turns_asked)]
        for at in rng.sample(range(len(asked)), len(asked)):
            print(json.dumps([at, *ask(llm, asked[at : at + 1])[0]]), flush=True)
        rest(llm)
        llm.scheduler.check_integrity()
        print(json.dumps(stats(llm)._asdict()), flush=True)
        llm.close()
