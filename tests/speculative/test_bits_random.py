"""`--exactness bits` on a CPU against an adversary: engines with options and requests drawn by a seed.

Whatever goes together, a request has the tokens and log-probabilities of plain decoding alone, in a batch of one,
prefilled at once, without a prefix cache.
"""

import random
from contextlib import ExitStack

import pytest

from support.bits import bits
from support.engines import build
from support.examples import SEED
from support.families import FAMILIES
from support.handing import IDS, Relay, Worker
from support.loras import save_lora
from support.offloading import on_a_cpu
from support.tiny_models import Pair, copy_folder, save_random_experts, save_random_head
from treetop import SamplingParams
from treetop.doctor.conformance import RandomShapes
from treetop.types.errors import ConfigError

BITS = {"exactness": "bits", "dtype": "float32", "context_length": 192}
KINDS = ("llama 3", "gpt_oss", "qwen3_moe", "deepseek v3", "glm 5", "qwen3 next", "falcon h1")
"""Dense, experts with windows and sinks, experts, compressed and sparse attention, a hybrid, Mamba-2."""
LENGTHS = (1, 2, 9, 16, 17, 40, 63, 100, 120, 127, 128, 129)
SHAPES = ((4, 5, 16), (1, 4, 5), (2, 3, 5), (5, 4, 16), (8, 5, 60), (1, 1, 2), (3, 2, 9))
"""(k, S, T)."""
OPTIONS = {
    "retractions": {"max_total_tokens": 400, "max_running_requests": 6},
    "mixed chunks": {"mixed_chunk": "on"},
    "host tier": {"kv_offloading_size": 4 / 1024, "max_total_tokens": 400, "page_size": 16},
    "node budget": {"speculative_node_budget": 20},
    "switched shapes": {"speculative_policy": "auto", "speculative_max_deferred": 4},
    "simulated graphs": {"graphs": "sim", "check_level": 3},
    "calibration": {"speculative_calibration": "learn"},
    "adapters": {"enable_lora": True},
    "states kept": {"state_checkpoint_every": 8, "page_size": 4},
}
"""What an engine may have beside. One that is refused by name is left out."""
DAILY = 9
"""The seed of every day."""
REFUSED = {"sleep": {"simulated graphs", "host tier"}, "weights": {"adapters"}}
"""Changes that an engine with these options refuses by name; it forgets its prefixes instead."""


class Masked:
    """A `RevocableConstraint`: of three neighbouring tokens one may not come next, by the place in the output."""

    def __init__(self, vocab):
        self._vocab, self._length = vocab, 0

    def allowed(self, new_ids):
        self._length += len(new_ids)
        return [token for token in range(self._vocab) if (token + self._length) % 3]

    def rollback(self, num_tokens):
        self._length -= num_tokens


class Drawn:
    """What a seed stands for: a pair, a second checkpoint of it, an adapter, requests, an engine's options.

    tried: the names in `OPTIONS` that are asked for, and of those that are `kept`.
    """

    def __init__(self, seed, folder):
        self.dice = dice = random.Random(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.pair, self.other = (self._pair(folder / name, number) for name, number in (("one", 3), ("two", 4)))
        self.vocab = self.pair.config["vocab_size"]
        self.adapter = save_lora(folder / "adapter", self.pair.target) if self.kind == "llama 3" else None
        self.shape = dice.choice(SHAPES)
        self.own = {
            "max_running_requests": dice.choice((2, 3, 5, 8)),
            "chunked_prefill_size": dice.choice((7, 16, 333)),
            "page_size": dice.choice((1, 4, 16)),
        }
        known = [name for name in OPTIONS if name != "adapters" or self.adapter is not None]
        self.tried = dice.sample(known, dice.randint(1, 4))
        self.folder, self.kept = folder, []

    def _pair(self, folder, number):
        if self.kind in ("gpt_oss", "qwen3_moe"):
            target = save_random_experts(folder / "target", self.kind, seed=number, vocab_size=12)
        else:
            own = FAMILIES[self.kind].save(folder / "own", seed=number).pair.target
            target = copy_folder(own, folder / "target", max_position_embeddings=256)
        return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))

    def prompts(self, count):
        """Of a few beginnings, so that prefixes are met again."""
        dice = self.dice
        heads = [[dice.randrange(self.vocab) for _ in range(130)] for _ in range(2)]
        return [
            dice.choice(heads)[:length] if dice.random() < 0.7 else [dice.randrange(self.vocab) for _ in range(length)]
            for length in (dice.choice(LENGTHS) for _ in range(count))
        ]

    def params(self, count):
        dice = self.dice
        return [
            SamplingParams(
                max_tokens=dice.randint(6, 14),
                ignore_eos=True,
                logprobs=dice.randint(0, 2),
                **({} if dice.random() < 0.4 else self._changes()),
            )
            for _ in range(count)
        ]

    def _changes(self):
        dice = self.dice
        more = {"top_p": 0.8} if dice.random() < 0.4 else {}
        more |= {"top_k": 4, "min_p": 0.05} if dice.random() < 0.3 else {}
        more |= {"frequency_penalty": 0.6, "repetition_penalty": 1.2} if dice.random() < 0.4 else {}
        return {"seed": dice.randrange(10**6), "temperature": dice.choice((0.7, 1.0, 1.3)), **more}

    def engine(self):
        """With those options that were drawn and go with the ones before; another one is refused by name."""
        llm = self._build([])
        for name in self.tried:
            try:
                more = self._build([*self.kept, name])
            except ConfigError:
                continue
            llm.close()
            llm = more
            self.kept.append(name)
        if "switched shapes" in self.kept:
            llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, self.dice.randrange(100), loses=True)
        if "adapters" in self.kept:
            llm.load_lora("a", self.adapter)
        return llm

    def _build(self, names):
        options = {**BITS, **self.own}
        for name in names:
            options |= OPTIONS[name]
        if "calibration" in names:
            options["speculative_calibration_dir"] = str(self.folder / "learned")
        return build(self.pair, self.shape, **options)

    def alone(self):
        more = {"enable_lora": True} if "adapters" in self.kept else {}
        llm = build(
            self.pair,
            None,
            **{**BITS, "max_running_requests": 1, "chunked_prefill_size": 512, "disable_radix_cache": True, **more},
        )
        if more:
            llm.load_lora("a", self.adapter)
        return llm


def check(seed, folder, **more):
    """Turns of requests, with an engine that sleeps, forgets and gets other weights between. more: options of it."""
    drawn, dice = Drawn(seed, folder), random.Random(-1 - seed)
    drawn.own |= more
    with ExitStack() as open_engines:
        open_engines.enter_context(on_a_cpu())
        llm = drawn.engine()
        open_engines.callback(llm.close)
        alone = drawn.alone()
        open_engines.callback(alone.close)
        told = [seed, drawn.kind, drawn.shape, drawn.own, drawn.kept]
        for _ in range(3):
            prompts = drawn.prompts(6)
            params, masked = drawn.params(6), dice.random() < 0.4
            lora = "a" if "adapters" in drawn.kept and dice.random() < 0.6 else None
            told.append(("masked" if masked else "free", lora))
            held = [Masked(drawn.vocab) for _ in prompts] if masked else None
            got = bits(llm.generate(prompts, params, constraints=held, lora=lora))
            want = []
            for prompt, each in zip(prompts, params, strict=True):
                held = [Masked(drawn.vocab)] if masked else None
                want += bits(alone.generate([prompt], [each], constraints=held, lora=lora))
            assert got == want, f"other bits: {told}"
            llm.scheduler.check_integrity()
            change = dice.choice(("none", "sleep", "flush", "weights"))
            if not REFUSED.get(change, set()).isdisjoint(drawn.kept):
                change = "flush"
            told.append(change)
            if change == "sleep":
                llm.sleep(dice.choice((1, 2)))
                llm.wake_up()
            elif change == "flush":
                llm.flush_cache()
            elif change == "weights":
                for each in (llm, alone):
                    each.update_weights(drawn.other.target)
    return told


def check_handover(seed, folder):
    """Two workers of unlike pages and chunks."""
    drawn, dice = Drawn(seed, folder), random.Random(-1 - seed)
    sizes = dice.sample((1, 2, 4, 8, 16), 2)
    options = {**BITS, **drawn.own, "max_running_requests": 4}
    alone = drawn.alone()
    workers = [Worker(drawn.pair, drawn.shape, **{**options, "page_size": size}) for size in sizes]
    try:
        relay, prompts, params = Relay(*workers, dice.choice((7, 32, 96))), drawn.prompts(5), drawn.params(5)
        ids = relay.submit(prompts, params, IDS)
        relay.run()
        results = [relay.result(each) for each in ids]
        for prompt, each, (tokens, _, logprobs) in zip(prompts, params, results, strict=True):
            (want,) = bits(alone.generate([prompt], [each]))
            got = tuple(tokens), [one.logprob.hex() for one in logprobs]
            assert got == (tuple(want[0]), [one for one, _ in want[1]]), (seed, drawn.kind, drawn.shape, sizes)
        assert not relay.local, "a request was prefilled where it was decoded"
    finally:
        for each in (*workers, alone):
            getattr(each, "llm", each).close()


def slow(first, last):
    return (pytest.param(number, marks=pytest.mark.slow) for number in range(first, last))


@pytest.mark.parametrize("number", [DAILY, *slow(0, DAILY), *slow(DAILY + 1, 42)])
def test_whatever_goes_together_changes_no_bit(tmp_path, number):
    print(check(SEED + number, tmp_path))


def test_the_comparison_sees_sums_of_ties(tmp_path):
    with pytest.raises(AssertionError, match="other bits"):
        check(0, tmp_path, exactness="ties")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(14))
def test_a_hand_over_of_any_kind_changes_no_bit(tmp_path, number):
    check_handover(SEED + number, tmp_path)
