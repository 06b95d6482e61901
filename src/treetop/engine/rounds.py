"""A decode round: three functions of device state, one after another.

DRAFT   grow the tree                                  writes buffers.tree, buffers.places
VERIFY  target forward, accept, commit the path         writes buffers.accepted, buffers.features, pages, states
        with prompts in it: their K/V, first tokens     writes buffers.prompts, pages, row state
EXTEND  rebuild the draft's K/V, propose, finish        writes pages and row state

A round of no rows is prompts alone: one phase, PREFILL.

A plain round may defer the draft's part of EXTEND: it keeps what that needs (`kernels/tree/deferred.py`) and finishes.
An EXTEND alone catches up in one pass, before such a row grows a tree or has no room for more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from treetop.attention.layer import Attend, TailColumns
from treetop.attention.recurrent import NodeRecurrence
from treetop.checks.poison import poison
from treetop.engine.features.feature import AcceptedRound
from treetop.engine.mixed import run_together
from treetop.engine.model_runner import ModelRunner, TargetInput
from treetop.engine.prefill import FirstTokens, PrefillBatch, begin_prefill, end_prefill, last_hidden, prefill
from treetop.engine.recurrence import keep_states, node_recurrence
from treetop.engine.routed_experts import keep_nodes
from treetop.engine.tree_growth import grow_trees
from treetop.kernels.flat import packed_nodes, spread_nodes
from treetop.kernels.tree.accept import MaskedDrafts
from treetop.kernels.tree.commit import Paths, feature_nodes, flat_entries
from treetop.kernels.tree.deferred import ExtendPairs, defer, deferred_pairs
from treetop.kernels.tree.rows import store_draft
from treetop.models.target import TargetOutput
from treetop.speculative.verify import choose, logits_for, path_logprobs, spread_choice
from treetop.types.errors import CheckError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode
from treetop.types.tree import FlatNodes, copy_into


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What a captured round is made for. Everything else is data in buffers.

    grammar_masked: it has constrained rows. Their trees begin with what is forced, and it is split before VERIFY, where
        the host says what may follow their nodes.
    catches_up: no round, but the draft extend of what rows have deferred.
    deferred: of that the columns, which hold all that a row has deferred; 0 for as many as it may, as in a graph.
    mixed: its VERIFY shares a forward with a prefill, which runs between its DRAFT and its EXTEND.
    undrafted: no row has a draft: nothing is kept for one, and it reads no prompts. Of a round with rows who launches
        phase by phase knows it; to a graph it is data, and its kernels find nothing to keep.
    prompts, block: tokens of prompts that are in the forward of its VERIFY, padding counted, in blocks of so many, as
        it is captured; without rows they are all of it.
    """

    bucket: int
    shape: SpecShape
    choice: SamplingMode
    grammar_masked: bool = False
    catches_up: bool = False
    mixed: bool = False
    prompts: int = 0
    block: int = 0
    undrafted: bool = False
    deferred: int = 0

    @classmethod
    def of_prompts(cls, size: int, block: int, choice: SamplingMode, undrafted: bool = False) -> "RoundKey":
        return cls(0, PLAIN, choice, prompts=size, block=block, undrafted=undrafted)

    @classmethod
    def of_mixed(cls, bucket: int, shape: SpecShape) -> "RoundKey":
        """How tokens are chosen, and what may follow, is a matter of the forward between its phases."""
        return cls(bucket, shape, SamplingMode.GREEDY, mixed=True)

    @classmethod
    def of_catch_up(cls, bucket: int, deferred: int = 0) -> "RoundKey":
        return cls(bucket, PLAIN, SamplingMode.GREEDY, catches_up=True, deferred=deferred)


PhaseFunction = Callable[[ModelRunner, RoundKey, int], None]
"""(runner, key, bound): bound is a host number no row's committed length exceeds."""
HostStep = Callable[[], object]
"""What is done between DRAFT and VERIFY of a round that is `held`, or DRAFT and EXTEND of one that is `mixed`."""


def draft_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """Grow each row's tree from the proposals stored with it, behind what must follow its root."""
    forced = runner.state.grammar_masks_of(key.bucket, key.shape).forced if key.grammar_masked else None
    grow_trees(runner, runner.buffers.rows[: key.bucket], key.shape, max_kv_len, forced)


def verify_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """One target forward over the trees; accept each row's path, commit its K/V and states, and keep its features."""
    begun = begin_verify(runner, key, max_kv_len)
    output = runner.run_target(begun.given)
    end_verify(runner, key, begun, output, logits_for(runner.target, output.hidden, key.choice))


@dataclass(frozen=True, slots=True)
class BegunVerify:
    """A verification before the target's forward, and what it is given. recurrence: None without recurrent layers."""

    given: TargetInput
    recurrence: NodeRecurrence | None


def begin_verify(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> BegunVerify:
    """What the target is given of the trees of a round's rows: [rows, T] nodes, or those that a budget has left of
    them, [N, 1].
    """
    buffers, shape, phase = runner.buffers, key.shape, Phase.VERIFY
    rows, tree = buffers.rows[: key.bucket], buffers.tree_of(key.bucket, key.shape)
    places, flat = buffers.places_of(key.bucket, shape), buffers.flat_of(key.bucket, shape)
    prefix, plans = (rows, places.committed, max_kv_len), {}
    for g in runner.target_groups:
        plans[g.name] = runner.plan(runner.metadata(phase, g, prefix, places.nodes, places.nodes, tree.mask, flat))
    recurrence = node_recurrence(runner, rows, tree.parent)
    tokens, positions, node_rows = tree.tokens, places.nodes, rows
    attend: Attend
    if flat is None:
        columns = TailColumns(key.bucket, 0, shape.num_draft_tokens, shape.num_draft_tokens)
        layers = runner.target_layers
        attend = runner.tail_attention(phase, layers, buffers.verify_tails, plans, columns, shape, recurrence)
    else:
        tokens, positions = packed_nodes(flat, tokens), packed_nodes(flat, positions)
        node_rows = packed_nodes(flat, rows[:, None].expand_as(tree.tokens))[:, 0]
        attend = runner.ragged_attention(flat, node_rows, plans, recurrence)
    tokens = runner.probes.index(tokens, 0, runner.target.config.vocab_size, "tree_token", phase, node_rows)
    return BegunVerify(TargetInput(node_rows, tokens, positions, attend), recurrence)


def end_verify(runner: ModelRunner, key: RoundKey, begun: BegunVerify, output: TargetOutput, logits: Tensor) -> None:
    """Accept, commit and keep what the target's forward gave. output, logits: of the nodes that it was given."""
    buffers, shape, ops = runner.buffers, key.shape, runner.ops
    rows, tree = buffers.rows[: key.bucket], buffers.tree_of(key.bucket, key.shape)
    places, accepted = buffers.places_of(key.bucket, shape), buffers.accepted_of(key.bucket, shape)
    flat, given = buffers.flat_of(key.bucket, shape), begun.given
    masks = runner.state.grammar_masks_of(key.bucket, shape) if key.grammar_masked else None
    allowed = None if masks is None else masks.allowed
    if flat is None:
        chosen = choose(ops, logits, runner.state.sampler, rows, places.nodes, tree, key.choice, allowed)
    elif key.choice.processes:  # what changes or tells logits goes by rows
        logits = spread_nodes(flat, logits)
        chosen = choose(ops, logits, runner.state.sampler, rows, places.nodes, tree, key.choice, allowed)
    else:
        of_nodes = choose(ops, logits, runner.state.sampler, given.rows, given.positions, tree, key.choice)
        chosen = spread_choice(flat, of_nodes)
    growth = buffers.growth_of(key.bucket, shape) if shape.num_steps else None
    forced, masked_drafts, drawn, draft_rows = None, None, chosen, buffers.draft_rows[: key.bucket]
    if growth is not None:
        masked_drafts = MaskedDrafts(rows, draft_rows, None if masks is None else masks.masked_drafts)
        if runner.simulation is not None:
            chosen, forced = runner.simulation.choose(chosen, growth, ops, runner.drawn_at(rows))
            forced = None if forced is None else forced * (rows == draft_rows)
    ops.accept(chosen, tree, accepted, forced, masked_drafts)
    if key.choice is SamplingMode.LOGPROBS:
        found = buffers.logprobs_of(key.bucket, shape)
        copy_into(found, path_logprobs(ops, logits, drawn, accepted, found.ids.shape[2]))
    paths = paths_of_round(runner, key, accepted.path)
    keep_nodes(runner, output, flat)
    runner.state.accepted(ops, AcceptedRound(key.choice, paths, draft_rows, places, accepted, growth))
    tail_paths = paths if flat is None else paths.of_flat(flat, runner.layout.verify_tail)
    runner.commit(buffers.verify_tails, tail_paths)
    keep_states(runner, begun.recurrence, paths)
    if runner.drafter is None:
        ops.finish(runner.state.tables, rows, runner.layout.dummy_row, accepted.accept_len, accepted.bonus, None)
    elif output.aux_hidden and not key.undrafted:
        path = accepted.path if flat is None else flat_entries(flat, accepted.path, 1)
        _probe_feature_nodes(runner, rows, path, given.tokens.shape[1], flat)
        ops.path_aux_hidden(buffers.aux_hidden_of(key.bucket, shape), output.aux_hidden, path)


def mixed_verify(runner: ModelRunner, batch: PrefillBatch, key: RoundKey, max_kv_len: int) -> FirstTokens:
    """VERIFY of a round whose trees are grown, and a prefill beside it; see `prefill` and `verify_phase`.

    batch: of other rows, in memory of its own. Either end may come first, for what they write is by row.
    """
    if runner.check_level >= 1 and batch.rows.data_ptr() == runner.buffers.rows.data_ptr():
        raise CheckError("mixed step: the rows of its prefill lie where those of its round do")
    if runner.check_level >= 3 and not key.prompts:
        poison_undeclared(runner, Phase.VERIFY)
    prompts, nodes = begin_prefill(runner, batch), begin_verify(runner, key, max_kv_len)
    exchanged = batch.exchanged and batch.exchanged + nodes.given.tokens.numel()
    of_prompts, of_nodes = run_together(runner, (prompts.given, nodes.given), exchanged)
    of_both = _logits_together(
        runner, (key.choice, batch.choice), of_nodes.hidden, last_hidden(runner, prompts, of_prompts)
    )
    end_verify(runner, key, nodes, of_nodes, of_both[0])
    return end_prefill(runner, prompts, of_prompts, of_both[1])


def _logits_together(runner: ModelRunner, choices: tuple[SamplingMode, SamplingMode], *hidden: Tensor) -> list[Tensor]:
    """Logits of what two parts of a forward gave, [rows, n, hidden] each: of one product, where both choose alike."""
    if (SamplingMode.GREEDY in choices) and choices[0] is not choices[1]:  # one needs a rank's own alone, one all
        return [logits_for(runner.target, each, how) for each, how in zip(hidden, choices, strict=True)]
    flat = torch.cat([each.flatten(0, 1) for each in hidden])
    parts = logits_for(runner.target, flat[:, None], choices[0]).split(
        [each.shape[0] * each.shape[1] for each in hidden]
    )
    return [part.view(*each.shape[:2], -1) for part, each in zip(parts, hidden, strict=True)]


def verify_with_prompts(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """VERIFY with what `buffers.prompts` holds in its forward, in a batch of fixed size: all of it is data."""
    first = mixed_verify(runner, _blocks(runner, key, max_kv_len), key, max_kv_len)
    runner.buffers.prompts.keep(first.token, first.finite)


def prefill_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """A prefill step of what `buffers.prompts` holds."""
    first = prefill(runner, _blocks(runner, key, max_kv_len))
    runner.buffers.prompts.keep(first.token, first.finite)


def _blocks(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> PrefillBatch:
    lines, drafting = runner.buffers.prompts.lines_of(key.prompts, key.block), 0 if key.undrafted else None
    return PrefillBatch(*lines, max_kv_len, key.choice, num_drafting=drafting)


def extend_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """Rebuild the draft's K/V of the accepted tokens from the target's features, propose what follows, and finish.

    S + 1 columns a row, causal; those past the path write to the null page.
    """
    buffers, shape = runner.buffers, key.shape
    rows, places = buffers.rows[: key.bucket], buffers.places_of(key.bucket, shape)
    accepted, aux_hidden = buffers.accepted_of(key.bucket, shape), buffers.aux_hidden_of(key.bucket, shape)
    runner.probes.nan(aux_hidden, "features", Phase.EXTEND, rows)
    prefix = runner.draft_prefix(key.bucket, max_kv_len)
    paths = replace(paths_of_round(runner, key, None), rows=prefix[0])
    pairs = ExtendPairs(prefix[1], accepted.accept_len, places.path, accepted.tokens, aux_hidden)
    classes = buffers.growth_of(key.bucket, shape).classes
    draft = runner.extended(rows, accepted.bonus, _extended(runner, key, pairs, paths, max_kv_len), classes)
    runner.ops.finish(runner.state.tables, rows, runner.layout.dummy_row, accepted.accept_len, accepted.bonus, draft)


def defer_phase(runner: ModelRunner, key: RoundKey, _: int) -> None:
    """Keep what the draft needs of a plain round's token, if a row has one, and finish."""
    state, buffers, dummy = runner.state, runner.buffers, runner.layout.dummy_row
    rows, accepted = buffers.rows[: key.bucket], buffers.accepted_of(key.bucket, key.shape)
    if not key.undrafted:
        assert state.deferred is not None
        aux_hidden = buffers.aux_hidden_of(key.bucket, key.shape)
        runner.probes.nan(aux_hidden, "features", Phase.EXTEND, rows)
        defer(state.deferred, buffers.draft_rows[: key.bucket], dummy, accepted.bonus, aux_hidden[:, 0])
    runner.ops.finish(state.tables, rows, dummy, accepted.accept_len, accepted.bonus, None)


def catch_up_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """Extend all that rows have deferred, and propose what follows. Rows without any keep their state."""
    state, rows, dummy = runner.state, runner.buffers.draft_rows[: key.bucket], runner.layout.dummy_row
    assert state.deferred is not None
    assert state.draft is not None
    width = key.deferred or runner.layout.max_deferred
    pairs, count = deferred_pairs(state.deferred, rows, state.committed[rows], width)
    paths = Paths(rows, pairs.first, count - 1, width, None, dummy)
    extended = _extended(runner, key, pairs, paths, max_kv_len)
    draft = runner.extended(rows, state.root[rows], extended, state.numbers["classes"][rows])
    if draft is not None:
        store_draft(state.draft, rows, count > 0, draft)
    state.deferred.count.index_fill_(0, rows, 0)  # a copy of a number of the host cannot be captured


def _extended(runner: ModelRunner, key: RoundKey, pairs: ExtendPairs, paths: Paths, max_kv_len: int) -> Tensor:
    """The draft's K/V of pairs, committed along paths of its rows. Returns the state after each row's last pair."""
    assert runner.drafter is not None
    buffers, phase, width = runner.buffers, Phase.EXTEND, paths.width
    prefix, plans = (paths.rows, pairs.first, max_kv_len), {}
    causal = buffers.causal[:width, :width].expand(key.bucket, -1, -1)
    for g in runner.draft_groups:
        plans[g.name] = runner.plan(runner.metadata(phase, g, prefix, pairs.positions, pairs.positions, causal))
    columns = TailColumns(key.bucket, 0, width, width)
    attend = runner.tail_attention(phase, runner.draft_layers, buffers.extend_tails, plans, columns, key.shape)
    at = runner.extension(paths.rows, pairs.last, width)
    runner.select_for_draft(paths.rows, width)
    draft_state = runner.drafter.extend(pairs.tokens, pairs.aux_hidden, pairs.positions, at, attend)
    runner.commit(buffers.extend_tails, paths)
    return draft_state


ROUND: dict[Phase, PhaseFunction] = {
    Phase.DRAFT: draft_phase,
    Phase.VERIFY: verify_phase,
    Phase.EXTEND: extend_phase,
}


def phases_of(runner: ModelRunner, key: RoundKey) -> dict[Phase, PhaseFunction]:
    """The phases of a round on this device, in order; without a drafter there is nothing to extend. That of a mixed
    round which is not its own is left out.
    """
    if key.catches_up:
        return {Phase.EXTEND: catch_up_phase}
    if not key.bucket:
        return {Phase.PREFILL: prefill_phase}
    phases = dict(ROUND)
    if runner.drafter is None:
        del phases[Phase.EXTEND]
    elif runner.layout.defers(key.shape):
        phases[Phase.EXTEND] = defer_phase
    if key.mixed:
        del phases[Phase.VERIFY]
    if key.prompts:
        phases[Phase.VERIFY] = verify_with_prompts
    return phases


def run_phases(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """A whole round, which is what a graph captures."""
    for run in phases_of(runner, key).values():
        run(runner, key, max_kv_len)


def run_behind_draft(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """What follows the step between, in a round that is held or mixed."""
    for phase, run in phases_of(runner, key).items():
        if phase is not Phase.DRAFT:
            run(runner, key, max_kv_len)


def parts_of(runner: ModelRunner, key: RoundKey) -> tuple[PhaseFunction, ...]:
    """What runs without the host taking part: all of a round, or what comes before and after its step."""
    if not (key.grammar_masked or key.mixed):
        return (run_phases,)
    return (draft_phase, run_behind_draft) if len(phases_of(runner, key)) > 1 else (draft_phase,)


def poison_undeclared(runner: ModelRunner, phase: Phase) -> None:
    """Poison scratch and outputs of a phase: whatever they hold before it runs must not matter."""
    of_features = (tensor for feature in runner.state.features for tensor in feature.scratch(phase))
    for tensor in (*runner.buffers.undeclared(phase), *of_features):
        poison(tensor)


class RoundLauncher(Protocol):
    """Runs the phases of one round over what the buffers hold."""

    def launch(self, key: RoundKey, max_kv_len: int, host_step: HostStep | None = None) -> None:
        """host_step: of a round that is `held` or `mixed`, behind DRAFT."""
        ...


class Eager:
    """Calls each phase with the batch's own bound."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, key: RoundKey, max_kv_len: int, host_step: HostStep | None = None) -> None:
        for phase, run in phases_of(self._runner, key).items():
            if self._runner.check_level >= 3:
                poison_undeclared(self._runner, phase)
            run(self._runner, key, max_kv_len)
            if phase is Phase.DRAFT and host_step is not None:
                host_step()


def paths_of_round(runner: ModelRunner, key: RoundKey, node: Tensor | None) -> Paths:
    """What the rows of a round commit. node: the tail entries of the columns, in order if None."""
    buffers, width = runner.buffers, key.shape.commit_width
    places, accepted = buffers.places_of(key.bucket, key.shape), buffers.accepted_of(key.bucket, key.shape)
    rows = buffers.rows[: key.bucket]
    return Paths(rows, places.committed, accepted.accept_len, width, node, runner.layout.dummy_row)


def _probe_feature_nodes(
    runner: ModelRunner, rows: Tensor, path: Tensor, num_nodes: int, flat: FlatNodes | None
) -> None:
    """Level 2: the features that extend is given are nodes of their own row's tree."""
    if runner.probes.enabled:
        nodes = feature_nodes(path, num_nodes).view(path.shape)
        if flat is None:
            first = torch.arange(path.shape[0], device=path.device)[:, None] * num_nodes
            end = first + num_nodes
        else:
            first, end = flat.row_start[:, None], (flat.row_start + flat.count)[:, None]
        runner.probes.index(nodes, first, end, "feature_node", Phase.VERIFY, rows)
