"""The engine: turns plans into results."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap
from typing import TypeVar

import torch
from torch import Tensor

from treetop.attention.layer import DenseAttention
from treetop.checkpoints.sent_tensors import copies_of, received, sent_bytes
from treetop.checks.host import PlanChecker, check_padded, check_result
from treetop.checks.poison import poison
from treetop.engine.adapters import EngineAdapters
from treetop.engine.changes.in_place import check_room
from treetop.engine.changes.sleep import (
    Models,
    SleepState,
    asked_to_wake,
    check_sleep,
    dropped_models,
    fall_asleep,
    give_back,
    held_bytes,
    wake,
    with_kv,
    without_kv,
)
from treetop.engine.changes.update_weights import (
    NewWeights,
    check_headers,
    check_update,
    on_all_ranks,
    plan_of_update,
    read_weights,
    weight_bytes,
)
from treetop.engine.cuda_graphs import CudaGraphs, CudaRecorder
from treetop.engine.experience import Experience
from treetop.engine.graphs import GraphSim
from treetop.engine.kv_transfer import collect_exports, collect_imports, export_chunks, import_chunks, import_columns
from treetop.engine.memory import gib, memory_of, out_of_memory_explained
from treetop.engine.node_masks import NodeMaskWriter
from treetop.engine.packed_trees import PackedTrees
from treetop.engine.prefill import (
    FirstTokens,
    PrefillBatch,
    batch_of_blocks,
    chunk_columns,
    chunk_width,
    make_batch,
    prefill,
)
from treetop.engine.prompt_blocks import block_lines, block_numbers
from treetop.engine.prompt_logprobs import prompt_columns, with_prompt
from treetop.engine.rounds import Eager, HostStep, RoundKey, RoundLauncher, mixed_verify, paths_of_round
from treetop.engine.routed_experts import check_told, experts_of_chunks, experts_of_round, told, told_of
from treetop.engine.staging import (
    HostResults,
    InFlightResults,
    RowResults,
    Slot,
    StagingBuffers,
    check_own_memory,
    collect,
    copy_out,
)
from treetop.engine.startup.build import build_runner, zeros_on
from treetop.engine.startup.exactness import whose_sums
from treetop.engine.startup.kept_calibration import kept_calibration
from treetop.engine.startup.kept_head import kept_head
from treetop.engine.startup.plan import EnginePlan, captures, plan_engine, prefill_costs_of
from treetop.engine.startup.round_costs import cost_table
from treetop.engine.startup.self_test import (
    self_test_acceptance,
    self_test_capacity,
    self_test_kv_transfer,
    self_test_learning,
    self_test_padding,
)
from treetop.engine.startup.stages import stage
from treetop.engine.startup.startup_log import start_up_block
from treetop.engine.step_digest import StepDigest, TreeAndPathDigest, no_digest
from treetop.kernels.tree.calibration import Calibration
from treetop.models.config import attention_of_rank
from treetop.parallel.weight_groups import WeightGroups
from treetop.types.changes import (
    TAGS,
    Change,
    Commit,
    DestroyWeightsUpdateGroup,
    FlushCache,
    InitWeightsUpdateGroup,
    LoadLora,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
)
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, InvariantError
from treetop.types.ids import NULL_PAGE, GroupName, PageId
from treetop.types.layout import SpecShape
from treetop.types.messages import (
    ExportPlan,
    ImportPlan,
    MixedPlan,
    NodeMasks,
    OffloadPlan,
    PageEdit,
    PrefillPlan,
    RoundPlan,
    RowResult,
    StepPlan,
    StepResult,
    TreeMasks,
    WholePlan,
    parts_of_plan,
    prefill_of,
    round_of,
)
from treetop.types.parallel import SINGLE_RANK, Parallel
from treetop.types.sampling import SamplingMode
from treetop.types.tree import Accepted, DraftTree

log = logging.getLogger("treetop")
_MARGIN = 2**30
"""Bytes that are free while new weights are read, beside them: what is decoded or packed on its way."""
Value = TypeVar("Value", Accepted, DraftTree)
_TOLD_EVERY = 8
"""Plain rounds from one that tells a calibration's counts to the next: as seldom as a policy looks at them."""
_SAMPLED_S = 2.0
"""Of a start, for rounds that the first sampled requests would else wait for: some 0.1 s each, of an 8B model."""
Observer = Callable[[RoundPlan, DraftTree, Accepted], None]
"""Told of every round when it is collected: its plan, trees and accepted paths, which it may keep."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched. It may be dropped.

    posted: of each of its parts, see `parts_of_plan`. seen: what the observer will be told of a round.
    """

    plan: StepPlan
    posted: tuple[InFlightResults, ...]
    seen: tuple[DraftTree, Accepted] | None


class Engine:
    """Owns device memory and runs steps. Raises UserError before any weight is read where it can."""

    def __init__(
        self, config: EngineConfig, parallel: Parallel = SINGLE_RANK, expert_ranks: Parallel = SINGLE_RANK
    ) -> None:
        """`observer` and `launcher` may be set between steps; `treetop trace` sets both.

        parallel: the rank that this engine is; engines of all ranks are made, and run the same steps, side by side.
        expert_ranks: the same of engines that share only experts. They run steps of one kind and size side by side,
        each with rows of its own.
        config: what was left to device and memory is in it.
        target, draft: what was read of the checkpoints; spec: the target's configuration. pace: of prefill steps
        between rounds. costs: of rounds, where a policy chooses their shape. experience: what service teaches.
        slots: to hand requests over by, None for none.
        """
        if parallel.size != config.tp_size:
            raise InvariantError(f"an engine of --tp-size {config.tp_size} was made for a group of {parallel.size}")
        if expert_ranks.size != config.ep_size:
            raise InvariantError(f"an engine of --ep-size {config.ep_size} was made for {expert_ranks.size} ranks")
        self.observer: Observer | None = None
        with stage("the plan"):
            engine_plan = plan_engine(config, parallel, expert_ranks)
        self._serve(engine_plan)
        config, self.parallel = engine_plan.config, parallel
        self._step_digest: StepDigest = (
            TreeAndPathDigest() if parallel.size > 1 and config.check_level >= 1 else no_digest
        )
        self.dtype, device = engine_plan.place.dtype, engine_plan.place.device
        self.prefill_costs = prefill_costs_of(self.target, engine_plan.place)
        first = parallel.rank == 0 and expert_ranks.rank == 0
        self._kept = kept_calibration(config, self.model_path, self.draft, first) if self.draft is not None else None
        self._rounds, self._untold = 0, -1
        built = build_runner(engine_plan)
        self.layout, self.memory, self._zones = built.runner.layout, built.use, built.zones
        self._chosen = built.chosen
        self.products, self.sums = built.products, whose_sums(engine_plan.place, built.products)
        self.runner, self.slots, self.host_pages = built.runner, built.slots, built.host_pages
        tables = built.runner.adapters
        self.adapters = (
            None
            if tables is None
            else EngineAdapters(engine_plan, tables, built.runner.draft_adapters, built.runner.state.calibration)
        )
        self._stream: torch.cuda.Stream | None = None  # of all rounds that are captured
        self.launcher = self._make_launcher()
        self._asleep = SleepState()
        self._groups, self._received = WeightGroups(), dict[str, dict[str, Tensor]]()
        self._sent = frozenset[str]()
        """Which of "model" and "draft" are in force and in no folder."""
        self._plans = PlanChecker(self.layout)
        self._node_masks = NodeMaskWriter(self.spec.vocab_size)
        zeros = partial(zeros_on, device) if self._zones is None else self._zones.zeros
        with self._explained("starting"):
            widths = self.runner.state.setup_widths(self.layout)
            checksums = 0 if self.slots is None else parallel.size * self.slots.spec.num_own
            classes = len(self.runner.state.calibration.nodes)
            self._staging = StagingBuffers(self.layout, device, zeros, config.check_level, widths, checksums, classes)
        started_s = time.perf_counter()
        teaches = parallel.rank == 0 and config.load_format != "dummy" and not config.simulates
        self.costs, self.experience = None, Experience(folder=self.model_path if teaches else None)
        with torch.inference_mode(), self._explained("starting"):
            self._start_up()
            if len(self.layout.shapes) > 1:
                with stage("timing rounds"):
                    self.costs = cost_table(engine_plan, self.runner, self.launcher)
                self.experience.head = kept_head(engine_plan, writes=first)
            self._forget_pages()
        start_s = time.perf_counter() - started_s
        if log.isEnabledFor(logging.INFO):  # saying why other backends were refused tries them
            log.info("%s", start_up_block(engine_plan, self.runner, self.products, self.launcher, self.memory, start_s))

    def _explained(self, doing: str) -> AbstractContextManager[None]:
        """Out of memory becomes an EngineError with the numbers and the options to change."""
        return out_of_memory_explained(doing, self.runner.buffers.rows.device, self.memory)

    def _make_launcher(self) -> RoundLauncher:
        """Over the runner as it is; nothing is captured yet."""
        if captures(self.config, self.runner.buffers.rows.device, self.runner.backend.capabilities):
            self._stream = self._stream or torch.cuda.Stream()
            return CudaGraphs(self.runner, CudaRecorder(self._stream))
        return GraphSim(self.runner, self._keys()) if self.config.graphs == "sim" else Eager(self.runner)

    def set_tree_masks(self, tree_masks: TreeMasks) -> None:
        """Who says what may follow the nodes of constrained rows' trees. Without it their drafts are not accepted."""
        self._node_masks.tree_masks = tree_masks

    def tell_tree_masks(self, tell: Callable[[Sequence[NodeMasks]], object]) -> None:
        """tell: is given those masks, for the other ranks that share the model."""
        self._node_masks.tell = tell

    def _keys(self) -> Iterator[RoundKey]:
        rounds = [(bucket, shape) for bucket in self.layout.buckets for shape in self.layout.shapes_at(bucket)]
        if self.layout.mixed:
            yield from starmap(RoundKey.of_mixed, rounds)
        for (bucket, shape), choice in product(rounds, self.runner.state.choices):
            yield RoundKey(bucket, shape, choice)
            if choice.processes and self.runner.state.masks is not None:
                yield RoundKey(bucket, shape, choice, grammar_masked=True)
            if not choice.processes and bucket in self.layout.coarse_buckets:
                block = self.layout.prompt_block
                yield from (RoundKey(bucket, shape, choice, prompts=n, block=block) for n in self.layout.prompt_sizes)
        for (size, block), choice in product(self.layout.prefill_sizes, self.runner.state.choices):
            if not choice.processes:
                yield RoundKey.of_prompts(size, block, choice)
                yield RoundKey.of_prompts(size, block, choice, undrafted=True)
        if self.layout.max_deferred:
            yield from map(RoundKey.of_catch_up, self.layout.buckets)

    def _start_up(self) -> None:
        if isinstance(self.launcher, CudaGraphs):
            with stage("capturing graphs"):
                self.launcher.capture_all()
                self.launcher.capture_sampled(_SAMPLED_S)
            if prefills := self.launcher.num_prefills:
                log.info("start: of this %d prefill steps took %.1f s", prefills, self.launcher.prefill_seconds)
            self._check_graphs(self.launcher)
        if self.config.check_level >= 1:
            with stage("self-tests"):
                self_test_acceptance(self.runner)
                self_test_padding(self.runner, self.launcher)
                self_test_capacity(self.runner, self.launcher)
                if self.runner.state.learning is not None:
                    self_test_learning(self.runner, self.runner.state.learning)
        self._begin_calibration()
        if self.slots is not None:
            self_test_kv_transfer(self.runner, self.slots)

    def _check_graphs(self, graphs: CudaGraphs) -> None:
        """Raises CapacityError if graphs took what steps need. Pools of a size that was asked for are the user's."""
        assert graphs.memory is not None
        if self.config.max_total_tokens is None:
            graphs.memory.check(self.memory.budget)
        elif graphs.memory.missing(self.memory.budget) > 0:
            log.warning("captured graphs: %s; --max-total-tokens leaves too little to the worst step", graphs.memory)

    def _forget_pages(self) -> None:
        """Level 3: page tables hold nothing, and pages what nobody may read."""
        if self.config.check_level >= 3:
            self.runner.state.forget_pages(list(range(self.layout.max_requests)))
            for name in self.layout.token_groups:
                self._poison_pages((name, PageId(page)) for page in range(1, self.layout.num_pages[name]))

    def prepare(self, change: Change) -> Commit:
        """Read and check what a change asks for. What is returned puts it in force, once no step is out.

        Nothing has changed before. Raises UserError, also for what cannot be here.
        """
        match change:
            case UpdateWeights():
                return self._prepare_weights(change)
            case InitWeightsUpdateGroup():
                place = self._plan.place
                group = self._groups.meet(change, self.parallel.rank, self.parallel.size, place.device)
                return partial(self._groups.add, group)
            case DestroyWeightsUpdateGroup(name):
                return partial(self._groups.remove, name)
            case LoadLora():
                assert self.adapters is not None  # the scheduler has refused it
                return self.adapters.prepare(change)
            case UnloadLora(number=number):
                assert self.adapters is not None  # likewise
                return self.adapters.prepare_to_forget(number)
            case Sleep(level):
                check_sleep(self._plan, level, self._sent)
                if self._asleep.tags and (self._asleep.tags != TAGS or level > self._asleep.level):
                    raise ConfigError("sleep: a part is awake, or weights are on the host; wake_up first")
                return partial(self._fall_asleep, level)
            case FlushCache():  # the scheduler's books have what is cached
                return lambda: None
            case WakeUp(tags):
                asked = asked_to_wake(self._asleep, tags)
                return partial(
                    self._wake, asked, dropped_models(self._plan, self._chosen, self.runner, self._asleep, asked)
                )

    def drop(self, change: Change) -> None:
        """What was prepared for it is not wanted any more; whoever prepared it holds it no longer."""
        if isinstance(change, InitWeightsUpdateGroup):
            self._groups.drop()
        if isinstance(change, UpdateWeights):
            if not change.more:
                self._received = {}
            self._have_kv()

    def lacks_room(self, change: UpdateWeights) -> bool:
        """Whether new weights do not fit beside those in force, unless K/V go first.

        Raises ConfigError, InputError and CheckpointError where K/V would go for nothing.
        """
        room = self._room()
        if room is None or not self.runner.pools or (need := self._room_needed(change)) <= room[0]:
            return False
        check_update(self._plan, replace(change, makes_room=True))
        check_headers(plan_of_update(self._plan, change), change, self._received)
        check_room(need, room[1])
        return True

    def _room(self) -> tuple[int, int] | None:
        """Bytes of a GPU that are free, and at most once all but weights has gone; None on a CPU."""
        device = self.runner.buffers.rows.device
        if device.type != "cuda":
            return None
        free = memory_of(device).free
        return free, free + torch.cuda.memory_reserved(device) - weight_bytes(self.runner)

    def _room_needed(self, change: UpdateWeights) -> int:
        received = sum(sent_bytes(each) for each in (change.model_tensors, change.draft_tensors) if each is not None)
        return _MARGIN + received + (0 if change.more else weight_bytes(self.runner))

    def _prepare_weights(self, asked: UpdateWeights) -> Commit:
        try:
            check_update(self._plan, asked)
            if asked.makes_room and self.runner.pools:
                self._drop_kv()
            received = on_all_ranks(self.model_path, self._plan.place, partial(self._receive, asked))
            if asked.more:
                return partial(self._keep, received)
            new = read_weights(self._plan, asked, self._chosen, self.runner, received, self._sent)
        except BaseException:
            self.drop(asked)
            raise
        return partial(self._replace_weights, new)

    def _receive(self, asked: UpdateWeights) -> dict[str, dict[str, Tensor]]:
        """What is sent, with what was sent before, unless a folder takes its place; all of it has come before anything
        is looked at.
        """
        named, device = {"model": asked.model, "draft": asked.draft}, self._plan.place.device
        found = {kind: dict(tensors) for kind, tensors in self._received.items() if named[kind] is None}
        for kind, sent in (("model", asked.model_tensors), ("draft", asked.draft_tensors)):
            if sent is not None:
                broadcast = self._groups.named(sent.group).broadcast if sent.group else None
                came = received(sent, device, broadcast)
                if asked.more and broadcast is None:  # whoever has it may change it then
                    came = copies_of(came, device)
                found.setdefault(kind, {}).update(came)
        return found

    def _keep(self, received: dict[str, dict[str, Tensor]]) -> None:
        """Until what completes it has come."""
        self._received = received
        self._have_kv()

    def _drop_kv(self) -> None:
        if isinstance(self.launcher, CudaGraphs):
            self.launcher.release()
        self.runner = without_kv(self.runner)
        self.launcher = Eager(self.runner)
        give_back(self.runner)

    def _have_kv(self) -> None:
        """Pools again, if they were dropped, and rounds over them."""
        if self.runner.pools or self._asleep.tags:
            return
        give_back(self.runner)
        with torch.inference_mode(), self._explained("making the KV pools again"):
            self.runner = with_kv(self._plan, self.layout, self.runner)
            self._capture()

    def _capture(self) -> None:
        self.launcher = self._make_launcher()
        if isinstance(self.launcher, CudaGraphs):
            self.launcher.capture_all()
            self.launcher.capture_sampled(_SAMPLED_S)

    def _fall_asleep(self, level: int) -> None:
        """Nothing runs until all of it is awake again."""
        if self._asleep.tags:
            return
        before = held_bytes(self.runner)
        self._release_rounds()
        self.runner, self._asleep = fall_asleep(self.runner, level)
        self.launcher = Eager(self.runner)
        give_back(self.runner)
        log.info("asleep, level %d: %s given back", level, gib(before - held_bytes(self.runner)))

    def _wake(self, asked: set[str], models: Models | None) -> None:
        if not asked:
            return
        with torch.inference_mode(), self._explained("waking up"):
            self.runner, self._asleep = wake(self._plan, self.layout, self.runner, self._asleep, asked, models)
            if not self._asleep.tags:
                self._capture()

    def _replace_weights(self, new: NewWeights) -> None:
        """Put other weights in the place of target and draft. No K/V of before may be read.

        Where it fails, what runs is neither; the folders in force are those of before, to be read again.
        """
        before, self._received = self._plan, {}
        try:
            self._serve(new.plan)
            self._put(new)
        except BaseException:
            self._serve(before)
            raise
        self._sent = new.sent

    def _put(self, new: NewWeights) -> None:
        swaps = not new.in_place
        if swaps and isinstance(self.launcher, CudaGraphs):
            self.launcher.release()
        self.runner = new.put(self.runner)
        give_back(self.runner)
        for name, scales in new.kv_scales.items():
            if name not in self.runner.pools:
                continue  # K/V sleep, and wake with these
            held = self.runner.pools[name].scales
            assert held is not None
            held.copy_(scales)
        if not self.runner.pools:
            self._have_kv()
        elif swaps:
            with torch.inference_mode(), self._explained("capturing rounds of other weights"):
                self._capture()
        self._kept = new.kept
        if self.costs is not None:
            self.experience.head = kept_head(new.plan, writes=self.parallel.rank == 0)
        self._begin_calibration()

    def _serve(self, engine_plan: EnginePlan) -> None:
        """These are the models that run, or are about to."""
        self._plan, self.config = engine_plan, engine_plan.config
        self.target, self.draft = engine_plan.target, engine_plan.draft
        self.model_path, self.spec = self.target.folder, self.target.config
        self.draft_path = self.draft.folder if self.draft is not None else None

    def _begin_calibration(self) -> None:
        """What was learned of this pair, or nothing: what rounds of another or of the self-tests taught is
        forgotten."""
        known = dict[str, Calibration]()
        if self._kept is not None:
            known = self._kept.restore(self.runner.state.calibration, self.parallel)
        else:
            self.runner.state.calibration.reset()
        if self.adapters is not None:
            self.adapters.calibrations.begin(known)

    def _learned_of_adapters(self) -> dict[str, Calibration]:
        """By digest."""
        return {} if self.adapters is None else self.adapters.calibrations.learned

    def release(self) -> None:
        """Give back what captured rounds hold of others, such as of a group of ranks. Nothing runs afterwards."""
        self._groups.close()
        self._release_rounds()

    def let_go(self) -> None:
        """Close groups by which trainers send weights, whose names are free again, and give back pages on the host."""
        self._groups.close()
        if self.host_pages is not None:
            self.host_pages.release()

    def _release_rounds(self) -> None:
        if isinstance(self.launcher, CudaGraphs):
            self.launcher.release()
        if self.host_pages is not None:
            self.host_pages.release()

    def step(self, plan: StepPlan) -> StepResult:
        """Run one prefill step or one decode round, and wait for its result. Zero rows are a legal batch."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start a step and return at once. Up to `max_steps` may be out; they are collected in this order."""
        level, runner = self.config.check_level, self.runner
        if level >= 1:
            self._plans.check(plan)
        if level >= 3:
            self._poison_pages(plan.freed)
            prefill = prefill_of(plan)
            if prefill is not None:
                runner.state.forget_pages([setup.row for setup in prefill.setups])
        slot = self._staging.take()
        with self._explained("running"):
            run = self._run(plan, slot)
        posted = list[InFlightResults]()
        for each in run:
            behind = sum(len(before.values) for before in posted)
            posted.append(self._staging.post(slot, each, runner.probes.posted, behind))
        if runner.probes.enabled:
            runner.probes.record.zero_()
        seen, round = None, round_of(plan)
        if self.observer is not None and round is not None:
            bucket = posted[-1].rows
            tree = runner.buffers.tree_of(bucket, round.shape)
            seen = (self._hand_out(tree), self._hand_out(runner.buffers.accepted_of(bucket, round.shape)))
        return InFlightStep(plan, tuple(posted), seen)

    def collect(self, in_flight: InFlightStep) -> StepResult:
        """Wait for the end of a step, and nothing later, and read its result. Raises CheckError if a probe fired."""
        plan, got = in_flight.plan, [collect(posted) for posted in in_flight.posted]
        round = round_of(plan)
        if self.observer is not None and in_flight.seen is not None and round is not None:
            self.observer(round, *in_flight.seen)
        self.runner.probes.check(got[-1].record)
        if self._kept is not None and round is not None:
            self._rounds += 1
            self._kept.after(self._rounds, self.runner.state.calibration, self._learned_of_adapters)
        if self._zones is not None:
            self._zones.check()
        if isinstance(plan, OffloadPlan):
            return StepResult(digest=got[0].record[-1], intact=bool(got[0].accept_len[0]))
        if isinstance(plan, ExportPlan | ImportPlan):
            return self._collect_chunks(plan, got[0])
        parts = zip(parts_of_plan(plan), got, strict=True)
        rows = [row for part, of_part in parts for row in self._collect_rows(part, of_part)]
        return StepResult(tuple(rows), got[-1].record[-1], proposals=got[-1].proposals)

    def _collect_rows(self, plan: WholePlan, got: HostResults) -> list[RowResult]:
        """What a prefill or a round gave its rows."""
        assert isinstance(plan, PrefillPlan | RoundPlan)
        rows, checked = list[RowResult](), self.config.check_level >= 1
        vocab_size, width = self.spec.vocab_size, self.layout.commit_width
        if got.experts is not None and checked:
            check_told(told(self.layout), got.experts)
        round = plan if isinstance(plan, RoundPlan) else None
        cut = round is not None and round.shape.is_ragged_at(len(got.finite))
        for i, row in enumerate(plan.rows):
            ends = isinstance(plan, RoundPlan) or plan.chunks[i].next_token is None  # else a chunk, and no token yet
            tokens = got.tokens[i][: got.accept_len[i] + 1] if ends and got.finite[i] else ()
            maximum = plan.logprobs[i] if plan.logprobs else None
            logprobs = () if maximum is None else got.logprobs_of(i, len(tokens), maximum)
            ranks: tuple[int, ...] = ()
            if round is not None and got.candidates and len(tokens) > 1:
                topk = round.shape.topk
                ranks = tuple([each % topk for each in got.candidates[i][: len(tokens) - 1]])
            tree = None
            if round is not None and got.trees is not None and tokens and row in round.told_trees:
                tree = got.trees.tree_of(i, tokens)
            num_nodes = got.candidates[i][-1] if cut else 0
            rows.append(RowResult(row, tokens, got.finite[i], logprobs, ranks=ranks, tree=tree, num_nodes=num_nodes))
            if isinstance(plan, PrefillPlan) and got.prompt is not None:
                rows[-1] = with_prompt(rows[-1], plan, i, got.prompt)
            if got.experts is not None:
                rows[-1] = rows[-1]._replace(experts=told_of(told(self.layout), plan, i, len(tokens), got.experts))
            if checked:
                check_result(rows[-1], vocab_size, width)
        return rows

    def _collect_chunks(self, plan: ExportPlan | ImportPlan, got: HostResults) -> StepResult:
        assert self.slots is not None
        digest, level = got.record[-1], self.config.check_level
        if isinstance(plan, ImportPlan):
            return StepResult(digest=digest, imports=collect_imports(plan, got, level))
        return StepResult(digest=digest, exports=collect_exports(self.slots.spec, plan, got, level))

    @torch.inference_mode()
    def next_logits(self, ids: list[int]) -> Tensor:
        """The target's logits after `ids`, [vocab], computed densely and outside all state; for comparisons."""
        positions = torch.arange(len(ids))[None].to(self.runner.buffers.rows.device)
        mine = {i: attention_of_rank(each, self.parallel.size) for i, each in self.spec.attention.items()}
        places = {i: (self.layout.group(at.group).kv, at.kv.scales) for i, at in self.runner.target_layers.items()}
        layers = {
            i: (places[i][0], each.window, each.chunked, each.source(i), places[i][1]) for i, each in mine.items()
        }
        caps = {i: each.score_cap for i, each in mine.items() if each.score_cap is not None}
        attend = DenseAttention(len(ids), self.dtype, positions.device, layers, caps=caps)
        target, adapters = self.runner.target, self.runner.adapters
        tokens = torch.tensor([ids], device=positions.device)
        if adapters is not None:
            adapters.select(torch.zeros_like(tokens[:, 0]), len(ids), self.runner.ops)
        return target.logits(target.forward(tokens, positions, attend).hidden[0, -1])

    def _run(self, plan: StepPlan, slot: Slot) -> tuple[RowResults, ...]:
        """Launch a step. Returns the results of its parts."""
        match plan:
            case PrefillPlan():
                return (self._packed(plan, slot) if plan.packed else self._prefill(plan, slot),)
            case RoundPlan():
                return (self._round(plan, slot),)
            case MixedPlan():
                return self._with_prompts(plan, slot) if plan.prefill.packed else self._mixed(plan, slot)
            case ExportPlan():
                return (self._export(plan, slot),)
            case ImportPlan():
                return (self._import(plan, slot),)
            case OffloadPlan():
                assert self.host_pages is not None
                return (self.host_pages.run(plan),)

    def _export(self, plan: ExportPlan, slot: Slot) -> RowResults:
        assert self.slots is not None
        state = self.runner.state
        state.apply_edits(self._staging.send(slot, edits=state.edit_columns(plan.edits))["edits"])
        return export_chunks(self.runner, self.slots, plan)

    def _import(self, plan: ImportPlan, slot: Slot) -> RowResults:
        assert self.slots is not None
        state, spec = self.runner.state, self.slots.spec
        sent = self._staging.send(
            slot,
            edits=state.edit_columns(plan.edits),
            setups=state.setup_columns(plan.setups),
            checks=import_columns(spec, plan, self.parallel),
        )
        state.apply_edits(sent["edits"])
        if self.adapters is not None:
            self.adapters.apply(plan.adapters)
        state.move_in(plan.setups, sent["setups"], self.config.check_level)
        expected, known, last_rows = sent["checks"]
        return import_chunks(self.runner, self.slots, plan, expected.view(-1, spec.num_own), known, last_rows)

    def _prefill(self, plan: PrefillPlan, slot: Slot) -> RowResults:
        edits, columns = self.runner.state.edit_columns(plan.edits), self._columns_of(plan)
        sent = self._staging.send(slot, rows=[self._row_lists(plan)], edits=edits, **columns)
        row_lists = self._apply(sent)
        return self._of_prefill(plan, row_lists[0], prefill(self.runner, self._batch_of(plan, row_lists, sent)))

    def _columns_of(self, plan: PrefillPlan) -> dict[str, Sequence[Sequence[int]]]:
        """What a prefill sends to the device beside row list and cells."""
        return {
            "setups": self.runner.state.setup_columns(plan.setups),
            "chunks": chunk_columns(plan, self.bucket_of(plan)),
            "prompt": prompt_columns(plan, chunk_width(plan)),
        }

    def _batch_of(self, plan: PrefillPlan, row_lists: Tensor, sent: Mapping[str, list[Tensor]]) -> PrefillBatch:
        """Requests move in, and their chunks as a batch. row_lists: [2, bucket] int64. sent: `_columns_of`, on the
        device.
        """
        if self.adapters is not None:
            self.adapters.apply(plan.adapters)
        self.runner.state.move_in(plan.setups, sent["setups"], self.config.check_level)
        allowed = self._node_masks.roots(plan.rows, plan.masks, row_lists.shape[1], row_lists.device)
        return make_batch(plan, row_lists, sent["chunks"], sent["prompt"], allowed, self.layout.bucket_for)

    def _of_prefill(self, plan: PrefillPlan, rows: Tensor, first: FirstTokens) -> RowResults:
        self.runner.state.states.keep(plan.chunks)
        zeros, experts = torch.zeros_like(first.token), experts_of_chunks(self.runner, plan, rows)
        return RowResults(first.token[:, None], zeros, first.finite, first.logprobs, first.prompt, experts=experts)

    def _round(self, plan: RoundPlan, slot: Slot) -> RowResults:
        edits = self.runner.state.edit_columns(plan.edits)
        row_lists = self._apply(self._staging.send(slot, rows=[self._row_lists(plan)], edits=edits))
        undrafted = len(plan.no_draft) == len(plan.rows) and self.layout.defers(plan.shape)
        key = RoundKey(row_lists.shape[1], plan.shape, plan.choice, bool(plan.masks), undrafted=undrafted)
        self._launch_round(plan, key, plan.committed_bound, self._host_step(plan, key))
        return self._of_round(plan, key)

    def _mixed(self, plan: MixedPlan, slot: Slot) -> tuple[RowResults, ...]:
        """A round between whose DRAFT and EXTEND one forward takes its nodes and the chunks of a prefill."""
        chunks, round, runner = plan.prefill, plan.round, self.runner
        lists = {"rows": [self._row_lists(round)], "prompts": [self._row_lists(chunks)]}
        edits, columns = runner.state.edit_columns(plan.edits), self._columns_of(chunks)
        sent = self._staging.send(slot, **lists, edits=edits, **columns)
        row_lists = self._apply(sent)
        batch = self._batch_of(chunks, sent["prompts"][0].view(2, -1), sent)
        key = RoundKey(row_lists.shape[1], round.shape, round.choice, bool(round.masks))
        host_step, first = self._host_step(round, key), list[FirstTokens]()

        def between() -> None:
            if host_step is not None:
                host_step()
            first.append(mixed_verify(runner, batch, key, round.committed_bound))

        self._launch_round(round, RoundKey.of_mixed(key.bucket, key.shape), round.committed_bound, between)
        return self._of_prefill(chunks, batch.rows, first[0]), self._of_round(round, key)

    def _with_prompts(self, plan: MixedPlan, slot: Slot) -> tuple[RowResults, ...]:
        """A round with chunks packed into a batch of fixed size in its forward: one graph, as any other round."""
        chunks, round = plan.prefill, plan.round
        row_lists, end, numbers = self._send_blocks(chunks, slot, plan.edits, self._row_lists(round))
        self.runner.buffers.prompts.write(chunks.packed, chunks.block, numbers)
        choice = SamplingMode.costliest((chunks.choice, round.choice))
        key = RoundKey(row_lists.shape[1], round.shape, choice, prompts=chunks.packed, block=chunks.block)
        self._launch_round(round, key, max(round.committed_bound, end), None)
        return self._of_blocks(chunks), self._of_round(round, key)

    def _packed(self, plan: PrefillPlan, slot: Slot) -> RowResults:
        """Chunks packed into blocks: a batch of fixed size, which is a graph of its own, or as many as they take."""
        _, end, numbers = self._send_blocks(plan, slot, plan.edits, [])
        no_draft = len(plan.no_draft) == len(plan.chunks)
        if (plan.packed, plan.block) not in self.layout.prefill_sizes:
            lines = block_lines(numbers, plan.packed, plan.block)
            batch = batch_of_blocks(plan, lines, end, self.bucket_of(plan))
            return self._of_prefill(plan, batch.rows, prefill(self.runner, batch))
        self.runner.buffers.prompts.write(plan.packed, plan.block, numbers)
        undrafted = no_draft and self.layout.max_deferred > 0
        self.launcher.launch(RoundKey.of_prompts(plan.packed, plan.block, plan.choice, undrafted), end)
        return self._of_blocks(plan)

    def _send_blocks(
        self, plan: PrefillPlan, slot: Slot, edits: Sequence[PageEdit], row_lists: Sequence[int]
    ) -> tuple[Tensor, int, Tensor]:
        """Requests move in. row_lists: of a round beside them, or empty. Returns these on the device, the end of the
        chunk that goes furthest, and the chunks as `block_numbers`, on the device until the next step.
        """
        state = self.runner.state
        sent = self._staging.send(
            slot,
            rows=[row_lists],
            edits=state.edit_columns(edits),
            setups=state.setup_columns(plan.setups),
            blocks=[block_numbers(plan.chunks, plan.packed, plan.block, self.layout.dummy_row, plan.no_draft)],
        )
        on_device = self._apply(sent)
        if self.adapters is not None:
            self.adapters.apply(plan.adapters)
        state.move_in(plan.setups, sent["setups"], self.config.check_level)
        (numbers,) = sent["blocks"]
        return on_device, max(chunk.start + len(chunk.token_ids) for chunk in plan.chunks), numbers

    def _of_blocks(self, plan: PrefillPlan) -> RowResults:
        """What a step with chunks in blocks gave these."""
        prompts = self.runner.buffers.prompts
        count = prompts.blocks_of(plan.packed, plan.block)
        token, finite = prompts.token[:count], prompts.finite[:count]
        experts = experts_of_chunks(self.runner, plan, prompts.lines_of(plan.packed, plan.block).rows)
        return RowResults(token[:, None], torch.zeros_like(token), finite, experts=experts)

    def _host_step(self, plan: RoundPlan, key: RoundKey) -> HostStep | None:
        """What the host does once trees are grown; None if no row is constrained."""
        if not key.grammar_masked:
            return None
        buffers = self.runner.buffers
        tree, places = buffers.tree_of(key.bucket, key.shape), buffers.places_of(key.bucket, key.shape)
        return partial(
            self._node_masks.hold, plan, tree, places, self.runner.state.grammar_masks_of(key.bucket, key.shape)
        )

    def _launch_round(self, plan: RoundPlan, key: RoundKey, bound: int, between: HostStep | None) -> None:
        if key.grammar_masked:
            self._node_masks.force(plan, self.runner.state.grammar_masks_of(key.bucket, key.shape))
        if plan.catches_up:  # with as many rows on all ranks where these have agreed
            drafting = key.bucket if plan.min_rows else self.layout.bucket_for(len(plan.rows) - len(plan.no_draft))
            self.launcher.launch(RoundKey.of_catch_up(drafting, self._deferred(plan, drafting)), plan.committed_bound)
        self.launcher.launch(key, bound, between)
        self._step_digest(self.runner.probes.digest, self.runner.buffers, key)

    def _deferred(self, plan: RoundPlan, drafting: int) -> int:
        """Columns of a catch-up: on a CPU, where the counts are at hand, no more than it needs; 0 for all that there
        are, as in graphs, and where ranks run it together.
        """
        rows, deferred = self.runner.buffers.draft_rows[:drafting], self.runner.state.deferred
        if rows.device.type != "cpu" or plan.min_rows or deferred is None:
            return 0
        return int(deferred.count[rows].max())

    def _of_round(self, plan: RoundPlan, key: RoundKey) -> RowResults:
        buffers = self.runner.buffers
        accepted = buffers.accepted_of(key.bucket, key.shape)
        logprobs = buffers.logprobs_of(key.bucket, key.shape) if plan.logprobs else None
        candidates = None
        if plan.shape.num_steps:
            candidates = buffers.growth_of(key.bucket, key.shape).chosen.gather(1, accepted.path[:, 1:])
            flat = buffers.flat_of(key.bucket, key.shape)
            if flat is not None:
                candidates = torch.cat([candidates, flat.count[:, None]], dim=1)
        learning, counts = self.runner.state.learning, None
        if self.costs is not None and learning is not None and self._tells_counts(plan.shape):
            counts = learning.calibration.acceptance
        trees = None
        if plan.told_trees and plan.shape.num_steps:
            trees = PackedTrees.of(buffers.tree_of(key.bucket, key.shape), accepted)
        experts = None
        if plan.told_experts:
            experts = experts_of_round(self.runner, paths_of_round(self.runner, key, None))
        of_round = accepted.tokens, accepted.accept_len, accepted.finite
        return RowResults(*of_round, logprobs, candidates=candidates, proposals=counts, trees=trees, experts=experts)

    def _tells_counts(self, shape: SpecShape) -> bool:
        """Whether a round tells what its calibration has counted. Plain ones, which count nothing, seldom do, of what
        was known at a start or came with an adapter.
        """
        self._untold = 0 if shape.num_steps else (self._untold + 1) % _TOLD_EVERY
        return self._untold == 0

    def _apply(self, sent: Mapping[str, list[Tensor]]) -> Tensor:
        """Write row lists into their buffer, and page-table cells into the tables. Returns the lists, [2, bucket]."""
        listed = sent["rows"][0].view(2, -1)
        row_lists = self.runner.buffers.row_lists[:, : listed.shape[1]].copy_(listed)
        self.runner.state.apply_edits(sent["edits"])
        return row_lists

    def _hand_out(self, value: Value) -> Value:
        """Values that may be kept past the next round. At level 1 a view of the buffers is refused (sgl-23037)."""
        copies = {}
        for name in value.__dataclass_fields__:
            tensor: Tensor = getattr(value, name)
            copies[name] = copy_out(tensor, torch.empty_like(tensor))
            if self.config.check_level >= 1:
                check_own_memory(name, copies[name], tensor)
        return replace(value, **copies)

    def bucket_of(self, plan: StepPlan) -> int:
        """Rows that a step runs with, padding included, of all its parts; of KV chunks, how many."""
        if isinstance(plan, MixedPlan):
            return self.bucket_of(plan.prefill) + self.bucket_of(plan.round)
        if isinstance(plan, ExportPlan | ImportPlan | OffloadPlan):
            return len(plan.rows)
        minimum = plan.min_rows if isinstance(plan, RoundPlan) else 0
        return self.layout.bucket_for(max(len(plan.rows), minimum))

    def tokens_of(self, plan: PrefillPlan) -> int:
        """Tokens of a prefill's batch that ranks with shared experts exchange, padding included."""
        return max(self.bucket_of(plan) * chunk_width(plan), plan.min_batch_tokens)

    def _row_lists(self, plan: PrefillPlan | RoundPlan) -> list[int]:
        """The row list, padded with the dummy row to its bucket before anything else happens; behind it, that of the
        draft.
        """
        dummy = self.layout.dummy_row
        padded = pad_rows(plan.rows, self.bucket_of(plan), dummy)
        if self.config.check_level >= 1:
            check_padded(padded, plan.rows, self.layout)
        return padded + [dummy if row in plan.no_draft else row for row in padded] if plan.no_draft else padded * 2

    def _poison_pages(self, pages: Iterable[tuple[GroupName, PageId]]) -> None:
        """Level 3: NaN into pages that nobody owns; never into the null page."""
        size = self.layout.page_size
        for group, page in pages:
            assert page != NULL_PAGE
            poison(self.runner.pools[group].data[:, page * size : (page + 1) * size])


def pad_rows(rows: Sequence[int], bucket: int, dummy: int) -> list[int]:
    """The row list of a bucket: the batch, then the dummy row (sgl-23037)."""
    return [*rows, *[dummy] * (bucket - len(rows))]
