"""Two engines of one process, and a small relay between them, which copies slots from memory to memory.

The real state machines and transports have tests of their own; this one is in order, and loses nothing unless it is
told to.
"""

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from support.engines import build, hold_core_thread
from support.families import FAMILIES
from support.mtp_layers import NAMES, mtp_tensors
from support.tiny_models import Pair, copy_folder, save_copying_head, save_random_llama, save_weak_llama
from treetop.debug import two_group
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.scheduling import Admitted, Computed, Dropped, Imported, Recv, Stage, Staged
from treetop.types.requests import EngineRequest, RequestUpdate, Whose
from treetop_debug.patching import Patch, replaced

LENGTHS = [1, 4, 5, 17, 33, 60]
IDS = count(10**6)
SLOTS = {"disaggregation_slots": 3, "disaggregation_slot_bytes": 1 << 17}


@contextmanager
def slots_kept():
    """The staging slots of engines that are made inside, by rank; the last engine's of each rank."""
    kept = {}

    def make(real):
        def build_runner(engine_plan):
            built = real(engine_plan)
            kept[engine_plan.place.parallel.rank] = built.slots
            return built

        return build_runner

    with replaced([Patch("treetop.engine.engine:build_runner", make)]):
        yield kept


class Worker:
    """An engine with staging slots, whose steps the test runs. slots: by rank."""

    def __init__(self, pair, shape, make=build, **options):
        with slots_kept() as kept:
            self.llm = make(pair, shape, **{"context_length": 128, **SLOTS, **options})
        hold_core_thread(self.llm)
        self.slots, self.core, self.scheduler = kept, self.llm._core.core, self.llm.scheduler
        self.engine = self.llm.engine
        self.free = list(range(self.engine.layout.disaggregation_slots))

    @property
    def kv_transfer(self):
        return self.scheduler.kv_transfer  # another one after a failure

    @property
    def slot_tokens(self) -> int:
        return self.engine.layout.slot_tokens

    def close(self):
        self.llm.close()


def copy_chunk(chunk, source, slot, target, landing):
    """Each target rank's heads from the source rank that has them, and the record from the first: bytes, nothing else.

    source, target: staging slots by rank. So ranks of any number get what they need of ranks of any other.
    """
    size = len(target)
    for rank, mine in target.items():
        begins, begin = {}, 0
        for group in mine.spec.whole.groups:
            begins[group.name] = begin, rank * group.kv.heads // size
            begin += group.kv.heads
        for segment in mine.spec.own.segments(chunk):
            if segment.group is None:
                theirs = source[0].spec.own.segments(chunk)[-1]
                rank_of = 0
            else:
                begin, first = begins[segment.group]
                rank_of, place = source[0].spec.sources[begin + first + segment.head]
                theirs = source[rank_of].spec.own.segments(chunk)[place]
            assert theirs.num_bytes == segment.num_bytes
            found = source[rank_of].memory[slot, theirs.offset : theirs.offset + theirs.num_bytes]
            mine.memory[landing, segment.offset : segment.offset + segment.num_bytes] = found


@dataclass
class Handed:
    """A request on its way: P's id of it, the tokens that D has and that P has packed, and what waits to be moved."""

    request: EngineRequest
    remote_id: RequestId
    start: int
    asked: int
    computed: int = 0
    first: object = None
    waiting: deque = field(default_factory=deque)


class Relay:
    """Runs both workers until all requests have ended.

    spoil: called with (chunk, landing slot) once a chunk has been moved. maximum: tokens of a chunk at most. updates,
    errors, imported: of each request. received: chunks in all.
    """

    def __init__(self, prefill, decode, maximum=10**6, spoil=None):
        self.prefill, self.decode, self.spoil = prefill, decode, spoil
        self.maximum = min(maximum, prefill.slot_tokens, decode.slot_tokens)
        self.handed, self.by_remote = {}, {}
        self.updates: dict[RequestId, list[RequestUpdate]] = {}
        self.local, self.received, self._ids = set(), 0, iter(range(10**9, 2 * 10**9))
        self.busy = {"prefill": {}, "decode": {}}

    def submit(self, prompts, params, ids, remote=True, loras=()):
        """loras: of each the name of its adapter, if any has one."""
        asked = [
            EngineRequest(RequestId(next(ids)), tuple(p), s, s.seed or 0, cache_salt=Whose(lora=lora).salt, lora=lora)
            for p, s, lora in zip(prompts, params, loras or [""] * len(prompts), strict=True)
        ]
        for each in asked:
            self.decode.scheduler.add(each, remote=remote)
            self.updates[each.request_id] = []
        return [each.request_id for each in asked]

    @property
    def done(self) -> bool:
        return not (self.decode.core.busy or self.prefill.core.busy)

    def run(self, limit=20_000):
        for _ in range(limit):
            self.step()
            if self.done and not any(self.busy.values()):
                return
        raise AssertionError("the work was not done")

    def step(self):
        for worker, hear in ((self.decode, self._hear_decode), (self.prefill, self._hear_prefill)):
            for update in worker.core.step():
                if worker is self.decode:
                    self.updates[update.request_id].append(update)
            worker.scheduler.check_integrity()
            for event in worker.kv_transfer.take_events():
                hear(event)
        self.move()

    def _hear_decode(self, event):
        match event:
            case Admitted(request_id, start, prompt):
                if request_id in self.local:  # told while it waited
                    return
                asked = prompt.request(RequestId(next(self._ids)))
                self.handed[request_id] = Handed(asked, asked.request_id, start, start)
                self.by_remote[asked.request_id] = request_id
                self.prefill.scheduler.add(asked, export_from=start, digest=prompt.digest)
            case Imported(_, slot):
                del self.busy["decode"][slot]
            case Dropped(request_id):
                self.drop(request_id)

    def _hear_prefill(self, event):
        handed = self.handed.get(self.by_remote.get(event.request_id))
        match event:
            case Computed(_, num_tokens, first):
                if handed is not None:
                    handed.computed, handed.first = max(handed.computed, num_tokens), first or handed.first
            case Staged(_, slot, chunk, checksums):
                if handed is None:
                    del self.busy["prefill"][slot]
                else:
                    handed.waiting.append((slot, chunk, checksums))
            case Dropped(remote_id):
                request_id = self.by_remote.get(remote_id)
                if request_id is not None:
                    self.drop(request_id)
                    self.decode.kv_transfer.prefill_locally(request_id)

    def drop(self, request_id):
        """Nothing more of a request is moved."""
        self.local.add(request_id)
        handed = self.handed.pop(request_id, None)
        if handed is None:
            return
        for slot, _, _ in handed.waiting:
            del self.busy["prefill"][slot]
        self.prefill.scheduler.abort(handed.remote_id)

    def give_up(self, request_id):
        """The decode worker goes on without the other worker."""
        self.drop(request_id)
        self.decode.kv_transfer.prefill_locally(request_id)

    def move(self):
        """Ask for chunks, and move what has been packed, as far as slots are free."""
        for request_id, handed in [*self.handed.items()]:
            total = len(handed.request.prompt_ids)
            while handed.asked < handed.computed and (slot := _free(self.prefill, self.busy["prefill"])) is not None:
                end = min(handed.asked + self.maximum, handed.computed)
                if end == total and handed.first is None:
                    break
                chunk = KVChunk(handed.asked, end - handed.asked, total)
                self.busy["prefill"][slot], handed.asked = handed.remote_id, end
                self.prefill.kv_transfer.stage(Stage(handed.remote_id, slot, chunk))
            while handed.waiting and (landing := _free(self.decode, self.busy["decode"])) is not None:
                slot, chunk, checksums = handed.waiting.popleft()
                copy_chunk(chunk, self.prefill.slots, slot, self.decode.slots, landing)
                del self.busy["prefill"][slot]
                if self.spoil is not None:
                    self.spoil(chunk, landing)
                self.busy["decode"][landing] = request_id
                self.received += 1
                first = handed.first if chunk.last else None
                self.decode.kv_transfer.recv(Recv(request_id, landing, chunk, checksums, first))
                if chunk.last:
                    del self.handed[request_id], self.by_remote[handed.remote_id]
                    self.prefill.scheduler.finish_export(handed.remote_id)

    def result(self, request_id):
        """Tokens, accepted lengths and log-probabilities."""
        updates = self.updates[request_id]
        assert all(update.error is None for update in updates), updates
        new = tuple(token for update in updates for token in update.new_ids)
        accepted = [update.accept_len for update in updates if update.accept_len is not None]
        return new, accepted, [each for update in updates for each in update.logprobs]


def _free(worker, busy):
    return next((slot for slot in worker.free if slot not in busy), None)


def make_pairs(folder, strong_pair):
    """Targets and heads by name, and a target with an MTP layer."""
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    small = {"vocab_size": 7}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        windows = Pair(*two_group.write_two_group_pair(folder, 9))
    return {
        "weak": Pair(weak, save_copying_head(folder / "weak-head", weak, draft_vocab=188)),
        "strong": strong_pair,
        "windows": windows,
        "mtp": Pair(target_with_mtp(folder), None),
        "latents": FAMILIES["glm 5.2"].save(folder / "latents", seed=5).pair,
        "chunks": FAMILIES["llama 4"].save(folder / "chunks", seed=5).pair,
    }


def target_with_mtp(folder):
    """A target whose folder holds an MTP layer, in GLM's names."""
    alone = save_random_llama(folder / "alone", seed=7, vocab_size=12)
    tensors, more = load_file(alone / "model.safetensors"), mtp_tensors("GLM")
    more[f"{NAMES['GLM'][0]}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{NAMES['GLM'][0]}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return copy_folder(alone, folder / "mtp", tensors=more, num_nextn_predict_layers=1)


def bits(value):
    return value.reshape(-1).view(torch.uint8)


def run_plans(worker):
    while (plan := worker.scheduler.plan()) is not None:
        worker.scheduler.commit(plan, worker.engine.step(plan))


def stopped(kind, act, *parts):
    """The message of an error that only a bug can cause."""
    with pytest.raises(kind) as error:
        act()
    assert all(part in str(error.value) for part in parts), error.value


def parts(worker):
    """The first token, and (slot, chunk, checksums) of what was packed."""
    events = worker.kv_transfer.take_events()
    (first,) = [e.first for e in events if getattr(e, "first", None) is not None]
    return first, [(e.slot, e.chunk, e.checksums) for e in events if isinstance(e, Staged)]
