"""Requests with adapters that one engine prefills and another decodes: adapters go with them, by name and content."""

import pytest

from support.engines import build, greedy, sampled, tokens
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.handover_sides import SHAPE, Sides
from support.loras import save_lora
from support.refusing import refused
from support.tiny_models import copy_folder
from support.waiting import WAIT_S
from treetop.checkpoints.lora_folder import LoraFolder, LoraModule
from treetop.types.changes import LoadLora, UnloadLora
from treetop.types.errors import InputError

NAMES = ["", "a0", "a1", "a2"]


@pytest.fixture(scope="module")
def folders(strong_pair, tmp_path_factory):
    """Three adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = [("q_proj", "v_proj"), ("gate_proj", "down_proj", "o_proj"), ("k_proj", "up_proj")]
    return {f"a{i}": save_lora(folder / f"a{i}", strong_pair.target, 4, 12.0, i, kinds[i]) for i in range(3)}


def modules(folders, *names):
    return {name: str(folders[name]) for name in names}


def asked(pair):
    """Of each name a few, of which the second begins as the first does, for all names alike."""
    first, other = pair.prompts([40, 9])
    return [(name, prompt) for name in NAMES for prompt in (first, [*first[:30], *other], other)]


def wanted(pair, shape, folders, params):
    llm, found = build(pair, shape, context_length=128, lora_modules=modules(folders, *NAMES[1:])), []
    for (name, prompt), each in zip(asked(pair), params, strict=True):
        found.append(tokens(llm.generate([prompt], [each], lora=name or None))[0])
    llm.close()
    return found


CASES = [
    (SHAPE, {"max_running_requests": 12}, {"page_size": 2, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}),
    (None, {"chunked_prefill_size": 16}, {"page_size": 4}),
    ((4, 5, 16), {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 3, "page_size": 8}, {"graphs": "sim"}),
]


@pytest.mark.parametrize(("shape", "prefill", "decode"), few_of(CASES, 0, 1))
def test_two_workers_give_what_one_gives(strong_pair, folders, shape, prefill, decode):
    """Adapters in other orders and slots of either side, fewer slots than adapters; prefixes from both caches."""
    params = [greedy(10) if i % 2 else sampled(i, 10) for i in range(12)]
    want = wanted(strong_pair, shape, folders, params)
    assert len(set(want[1::3])) == 4, "adapters change nothing"
    workers = (
        Worker(strong_pair, shape, lora_modules=modules(folders, "a2", "a0", "a1"), **prefill),
        Worker(strong_pair, shape, lora_modules=modules(folders, "a0", "a1", "a2"), **decode),
    )
    relay, requests = Relay(*workers, 7), asked(strong_pair)
    for at in ([*range(0, 12, 3)], [each for each in range(12) if each % 3]):  # the second wave finds prefixes
        ids = relay.submit(
            [requests[i][1] for i in at], [params[i] for i in at], IDS, loras=[requests[i][0] for i in at]
        )
        relay.run()
        assert [relay.result(each)[0] for each in ids] == [want[i] for i in at]
    assert not relay.local, "a request was prefilled here"
    for worker in workers:
        worker.close()


def test_an_adapter_that_is_not_the_same_on_both_sides_is_named(strong_pair, folders, caplog, tmp_path):
    """Loaded on one side alone, or of other weights: prefilled here, with its own tokens, until it is loaded there."""
    prompt, params = strong_pair.prompts([40])[0], greedy(10)
    params_of_all = [params] * 12
    want = dict(zip(NAMES, wanted(strong_pair, SHAPE, folders, params_of_all)[::3], strict=True))
    other = save_lora(tmp_path / "other", strong_pair.target, 4, 12.0, 9)
    options = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4}
    sides = Sides(strong_pair, 4, 4, WAIT_S, options, {**options, "lora_modules": modules(folders, "a0")})
    numbers = iter(range(0, 1000, 10))

    def ask(name):
        """Tokens; whether it was handed over, and what was said if not."""
        before = sides.asks.load.num_requests_done
        caplog.clear()
        ((ids, _),) = sides.generate([prompt], [params], next(numbers), loras=[name])
        assert ids == want[name]
        sides.until(sides.nothing_is_held)
        handed = sides.asks.load.num_requests_done > before
        return handed, [each.getMessage() for each in caplog.records if "prefilled locally" in each.getMessage()]

    def change(side, what):
        side.core.prepare(what)()

    def forget_prefixes():
        for each in (sides.decode, sides.prefill):
            each.core._put_back_all()

    handed, said = ask("a0")
    assert not handed
    assert "the prefill worker refused: adapter 'a0' is not loaded on the prefill worker, which has none" in said[0]
    assert "load 'a0' on both, from the same folder" in said[0]
    assert ask("") == (True, [])
    change(sides.prefill, LoadLora("a0", str(other)))
    forget_prefixes()
    handed, said = ask("a0")
    assert not handed
    assert "adapter 'a0' has other weights on the prefill worker; unload it and load 'a0' on both" in said[0]
    change(sides.prefill, UnloadLora("a0"))
    change(sides.prefill, LoadLora("a0", str(copy_folder(folders["a0"], tmp_path / "a copy"))))
    forget_prefixes()
    assert ask("a0") == (True, [])
    change(sides.prefill, LoadLora("a1", str(folders["a1"])))
    refused(InputError, lambda: sides.generate([prompt], [params], 900, loras=["a1"]), "'a1'", "no adapter")
    change(sides.decode, LoadLora("a1", str(folders["a1"])))
    assert ask("a1") == (True, [])
    sides.close()


def test_a_digest_is_of_what_an_adapter_changes(folders, tmp_path):
    """Not of where it lies and what else its folder says; of its scale, and of every byte of its factors."""
    own = {"q_proj": LoraModule("q_proj", 4, 3.0)}
    one = LoraFolder(folders["a0"], own).digest()
    copied = copy_folder(folders["a0"], tmp_path / "copied")
    (copied / "README.md").write_text("words")
    assert LoraFolder(copied, own).digest() == one
    assert LoraFolder(copied, {"q_proj": LoraModule("q_proj", 4, 2.0)}).digest() != one
    file = copied / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert LoraFolder(copied, own).digest() != one
