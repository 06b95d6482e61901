"""The capacity algebra: every dimension of every device buffer has a name, a formula and an option.

Buffers are made from a `Layout`, and admission is limited by the same formulas, so that what is filled can never
exceed what was sized (the fault class of sgl-27338, sgl-19016, sgl-26972).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from treetop.types.errors import CapacityError, ConfigError, shown
from treetop.types.ids import EXPERTS, GroupName, is_draft
from treetop.types.kv import KVFormat
from treetop.types.routed_experts import ExpertShape
from treetop.types.state import StateGroup

MAX_TOPK, MAX_STEPS, MAX_NODES = 64, 64, 512
"""Past these a tree costs far more than it can win, and its tables (masks of T^2 a row) grow without a use."""


@dataclass(frozen=True, slots=True, order=True)
class SpecShape:
    """A tree's shape: `topk` branches a node, `num_steps` levels, `num_draft_tokens` nodes verified, root included; and
    with a `node_budget`, so many nodes of all rows of a batch together, a root of each at least (0: no budget).

    Valid iff it is plain decoding (1, 0, 1) or `2 <= T <= 1 + k + (S - 1) k^2`, with `k == 1` implying `T == S + 1`,
    and each number is at most its `MAX_`.
    Source: EAGLE-2, arXiv:2406.16858; SGLang's meaning of the three options.
    """

    topk: int
    num_steps: int
    num_draft_tokens: int
    node_budget: int = 0

    def __post_init__(self) -> None:
        k, s, t = self.topk, self.num_steps, self.num_draft_tokens
        if self.node_budget and (k, s, t) == (1, 0, 1):
            raise ConfigError(f"--speculative-node-budget {shown(self.node_budget)}: a plain round has roots alone")
        given = (
            f"--speculative-eagle-topk {shown(k)}, --speculative-num-steps {shown(s)},"
            f" --speculative-num-draft-tokens {shown(t)}"
        )
        if (k, s, t) == (1, 0, 1):
            return
        if k < 1 or s < 1 or t < 2:
            raise ConfigError(f"no tree has {given}: topk and num-steps must be >= 1, num-draft-tokens >= 2")
        if k > MAX_TOPK or s > MAX_STEPS or t > MAX_NODES:
            raise ConfigError(
                f"too large a tree: {given}; topk may be {MAX_TOPK}, num-steps {MAX_STEPS} and num-draft-tokens"
                f" {MAX_NODES} at most"
            )
        if k == 1 and t != s + 1:
            raise ConfigError(f"no chain has {given}: with topk 1, num-draft-tokens must be num-steps + 1 = {s + 1}")
        if t > 1 + self.num_candidates:
            raise ConfigError(
                f"no tree has {given}: num-draft-tokens must be <= 1 + k + (S - 1) k^2 = {1 + self.num_candidates}"
            )

    def nodes_at(self, rows: int) -> int:
        """Nodes that the target's forward of a batch of so many rows holds, padding rows included."""
        full = rows * self.num_draft_tokens
        return min(full, max(rows, self.node_budget)) if self.node_budget else full

    def is_ragged_at(self, rows: int) -> bool:
        """Whether the budget cuts the trees of a batch of so many rows."""
        return self.nodes_at(rows) < rows * self.num_draft_tokens

    @property
    def depth(self) -> int:
        """Drafts of the longest path, at most."""
        return min(self.num_steps, self.num_draft_tokens - 1)

    @classmethod
    def parse(cls, text: str, option: str) -> "SpecShape":
        """A shape from "S,k,T", or "S,k,T,N" with a budget of N nodes. Raises ConfigError that names the option."""
        try:
            s, k, t, *budget = (int(part) for part in text.split(","))
            (n,) = budget or (0,)
            if n < len(budget):
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{option} {shown(text)[1:-1]}: a shape is S,k,T, three integers, or S,k,T,N with N nodes of all rows"
                " together; 0,1,1 is plain decoding"
            ) from None
        return cls(k, s, t, n)

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return f"{self.num_steps},{self.topk},{self.num_draft_tokens}" + f",{self.node_budget}" * (self.node_budget > 0)

    @property
    def num_candidates(self) -> int:
        """Nodes that growing creates: k at level 0, k^2 at each later level."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def commit_width(self) -> int:
        """Most tokens a round can commit: a full path of S drafts and the root before it."""
        return self.num_steps + 1

    @property
    def draft_tail(self) -> int:
        """Tail capacity of the draft levels: k nodes at each of levels 1 .. S-1."""
        return self.topk * max(self.num_steps - 1, 0)


PLAIN = SpecShape(1, 0, 1)
"""Plain decoding is the round of this shape."""


def shapes_beside(shape: SpecShape) -> tuple[SpecShape, ...]:
    """What to choose from, up to a shape's size and with it: plain rounds, chains of S, S / 2 and S / 4 steps,
    trees of 8 and 16 nodes.

    A tree that is hardly larger than the chain, or smaller than the one that was asked for, is its near twin.
    """
    k, s, t = shape.topk, shape.num_steps, shape.num_draft_tokens
    chains = [SpecShape(1, steps, steps + 1) for steps in sorted({-(-s // 4), -(-s // 2), s})]
    between = [SpecShape(k, s, nodes) for nodes in (8, 16) if k > 1 and s + 2 < nodes <= t / 1.5]
    return tuple(dict.fromkeys([PLAIN, *chains, *between, shape]))


MAX_CHOSEN_NODES = 1024
"""Nodes of all rows that a round of a shape which was chosen among others has at most. Long before, an 8B model's round
takes a GPU time in proportion to them (`bench.modelled_costs`), so that fewer nodes a row give more tokens a second."""

MAX_NODES_BESIDE_PROMPTS = 256
"""Nodes of all rows up to which rounds with prompts in their forward are captured at start: more gain nothing by it."""

MAX_PROMPT_BLOCK = 64
"""A chunk's last block is padded, by half of this in the mean; attention to pages reads a row's keys once a block."""


def num_blocks(count: int, width: int) -> int:
    """Blocks that a chunk of `count` tokens takes."""
    return -(-count // width)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a page table and a pool.

    kv: what each keeps of a token.
    window: how far they see at most, the query itself counted; None is everything.
    chunked: they see what is in their own chunk of so many positions alone. Pages go by the window: they are kept as
        long as a query could see them if it were none.
    """

    name: GroupName
    num_layers: int
    kv: KVFormat
    window: int | None = None
    chunked: bool = False

    @property
    def is_draft(self) -> bool:
        return is_draft(self.name)

    @property
    def is_attended(self) -> bool:
        """Whether layers of the target see it."""
        return not (self.is_draft or self.name == EXPERTS)

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token's K/V take in all layers of the group."""
        return self.num_layers * self.kv.numbers

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of these. element_size: of a number of the engine's dtype."""
        return self.numbers_per_token * self.kv.itemsize(element_size)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One named size: its value, the formula with its numbers filled in, and the option that changes it."""

    name: str
    value: int
    formula: str
    option: str


class PrefillCosts(NamedTuple):
    """What a prefill step costs, for one that stands between two rounds.

    minimum: tokens that it takes in for little more than reading the weights.
    usual: tokens that it holds at least where no target for gaps is given.
    attended: tokens before a token that cost as much as the token's products; None where that does not grow with their
        number.
    mixed: as `usual`, of a step with a round in its forward; None for as many.
    """

    minimum: int
    usual: int
    attended: int | None
    mixed: int | None = None


@dataclass(frozen=True)  # without slots: sums over shapes are made once, and a step reads some of them for each row
class Layout:
    """Every dimension of the engine's device state, from a handful of options.

    shapes: the tree shapes the engine may run.
    page_size: tokens a page.
    max_context: tokens a request may hold, prompt and output.
    chunk: most prompt tokens a prefill step processes.
    max_in_flight: steps in flight that compute.
    max_deferred: tokens of a row whose draft extend may be deferred; 0 for rounds that all extend.
    pool_tokens: tokens that each pool without a window holds.
    disaggregation_slots: staging slots.
    slot_tokens: most tokens whose K/V one holds.
    block: queries of the pass that the drafter makes once a round; 0 for none.
    lead: of these, those that the nodes of its tree see: all or none.
    state_groups: layers that keep a state by row instead of K/V in pages.
    checkpoints: slots for states that prompts which begin alike go on from; 0 where no prefix is kept of them.
    checkpoint_every: tokens of a prompt from one to the next, a multiple of the page.
    host: of the pages on the host that keep what leaves these, with rows and tokens in proportion; None for none.
    copied_pages: pages of each group that one step copies there or back.
    mixed: a prefill step may have a round in its forward.
    prompt_sizes: tokens of prompts, padding counted, that a captured round may have in its forward, rising; each a
        multiple of `prompt_block`. () for none.
    prefill_sizes: of batches in which a prefill step without a round is captured: tokens, padding counted, and tokens
        of each block, of which they are a multiple; the smallest first, of several alike the one with larger blocks.
        () for none.
    prefill_blocks: tokens of the blocks that chunks of other prefill steps may be packed into, the largest first; ()
        where each chunk has a line.
    experts: of those that each token went to, which one of the groups keeps; None if none does.
    """

    shapes: tuple[SpecShape, ...]
    page_size: int
    max_requests: int
    max_context: int
    chunk: int
    groups: tuple[KVGroup, ...]
    pool_tokens: int
    max_in_flight: int = 1
    max_deferred: int = 0
    disaggregation_slots: int = 0
    slot_tokens: int = 0
    block: int = 0
    lead: int = 0
    state_groups: tuple[StateGroup, ...] = ()
    checkpoints: int = 0
    checkpoint_every: int = 0
    host: "Layout | None" = None
    copied_pages: int = 0
    mixed: bool = False
    prompt_sizes: tuple[int, ...] = ()
    prefill_sizes: tuple[tuple[int, int], ...] = ()
    prefill_blocks: tuple[int, ...] = ()
    experts: ExpertShape | None = None

    @property
    def prompt_block(self) -> int:
        """Tokens of a block of prompts in a captured round: of the smallest of its batches two, if these are large."""
        return min(MAX_PROMPT_BLOCK, max(min(self.prompt_sizes, default=0) // 2, 1))

    @property
    def packed_sizes(self) -> tuple[tuple[int, int], ...]:
        """All batches of fixed size that prompts are packed into: tokens, and tokens of a block."""
        return (*((size, self.prompt_block) for size in self.prompt_sizes), *self.prefill_sizes)

    def may_pack(self, size: int, block: int) -> bool:
        """Whether a prefill step may be a batch of `size` tokens in blocks of `block`, captured or not."""
        loose = block in self.prefill_blocks and size <= self.chunk and size % block == 0
        return loose or (size, block) in self.packed_sizes

    @property
    def largest_in_blocks(self) -> tuple[tuple[int, int], ...]:
        """Of prefill steps that are not captured the largest of each width: blocks, and tokens of one."""
        return tuple((self.chunk // block, block) for block in self.prefill_blocks if block <= self.chunk)

    @cached_property
    def commit_width(self) -> int:
        return max(shape.commit_width for shape in self.shapes)

    @property
    def extend_tail(self) -> int:
        """Columns of a draft extend: a path, or all that a row has deferred."""
        return max(self.commit_width, self.max_deferred)

    def defers(self, shape: SpecShape) -> bool:
        """Whether rounds of a shape leave the draft's part of their tokens to a later one: plain ones, if any may."""
        return shape == PLAIN and self.max_deferred > 0

    @cached_property
    def headroom(self) -> int:
        """Positions past the context that rounds in flight may touch: `max_in_flight * (S + 1)`."""
        return self.max_in_flight * self.commit_width

    @property
    def max_steps(self) -> int:
        """Steps in flight with one that packs or unpacks what is transferred, and one that copies to the host or back,
        so that these keep no other from it.
        """
        return self.max_in_flight + (self.disaggregation_slots > 0) + (self.host is not None)

    @cached_property
    def max_committed(self) -> int:
        """Bounds the committed tokens of a row when a round starts.

        The rounds that are out may have passed the context, which the host learns later.
        """
        return self.max_context + (self.max_in_flight - 1) * self.commit_width

    @cached_property
    def max_positions(self) -> int:
        """Positions a request can have K/V at, and rows of the RoPE tables of both models (vllm-48894)."""
        block = (self.max_in_flight - 1) * self.commit_width + self.block
        return self.max_context + max(self.headroom, block)

    @cached_property
    def page_columns(self) -> int:
        return self.pages_for(self.max_positions)

    @cached_property
    def max_topk(self) -> int:
        return max(shape.topk for shape in self.shapes)

    @property
    def draft_tail(self) -> int:
        return max(self.block, *(self.lead + shape.draft_tail for shape in self.shapes))

    @property
    def prompt_lines(self) -> int:
        """Prompt tokens whose logits are made at once, where log-probabilities are asked for: as a round's nodes, if
        these are not few or many. Each time the vocabulary's weights are read once.
        """
        return max(min(self.max_requests * self.verify_tail, 64), 16)

    @cached_property
    def verify_tail(self) -> int:
        return max(shape.num_draft_tokens for shape in self.shapes)

    @property
    def most_flat_nodes(self) -> int:
        """Nodes of a batch whose trees a budget cuts; 0 if none does."""
        batches = ((shape, rows) for shape in self.shapes for rows in self.buckets if shape.is_ragged_at(rows))
        return max((shape.nodes_at(rows) for shape, rows in batches), default=0)

    @property
    def num_rows(self) -> int:
        """Request rows and the dummy row, which is the last."""
        return self.max_requests + 1

    @property
    def dummy_row(self) -> int:
        return self.max_requests

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that rounds run at: powers of two, from 16 on half way between them too, and the maximum."""
        halves = (3 * 2**i for i in range(3, self.max_requests.bit_length()))
        sizes = {*self.coarse_buckets, *(size for size in halves if size < self.max_requests)}
        return tuple(sorted(sizes))

    @cached_property
    def coarse_buckets(self) -> tuple[int, ...]:
        """Those of them that an engine makes ready at its start: powers of two, and the maximum."""
        powers = [2**i for i in range(self.max_requests.bit_length()) if 2**i < self.max_requests]
        return (*powers, self.max_requests)

    def shapes_at(self, rows: int) -> tuple[SpecShape, ...]:
        """What a round of so many rows may be. Of several shapes: plain rounds, the smallest tree, and all others whose
        nodes of all rows are `MAX_CHOSEN_NODES` at most.
        """
        if len(self.shapes) == 1:
            return self.shapes
        smallest = min(shape.num_draft_tokens for shape in self.shapes if shape != PLAIN)
        most = max(smallest, MAX_CHOSEN_NODES // rows) * rows
        return tuple(shape for shape in self.shapes if shape.nodes_at(rows) <= most)

    def few_nodes_beside_prompts(self, shape: SpecShape, rows: int) -> bool:
        """Whether rounds of so many rows gain by prompts in their forward pass, and are captured with them at start."""
        return shape.nodes_at(rows) <= MAX_NODES_BESIDE_PROMPTS

    def most_rows(self, shape: SpecShape) -> int:
        """The largest bucket whose rounds may have this shape."""
        return max((bucket for bucket in self.buckets if shape in self.shapes_at(bucket)), default=1)

    @property
    def most_batch_rows(self) -> int:
        """Rows of the largest batch of the target. In a mixed step each token is one, and so is each node where a
        budget cuts trees, and each block of a prefill step.
        """
        if not self.mixed:
            blocks = [size // block for size, block in self.prefill_sizes]
            blocks += [count for count, _ in self.largest_in_blocks]
            return max(self.num_rows, self.most_flat_nodes, *blocks)
        return max(self.buckets) * self.verify_tail + max(self.chunk, *self.prompt_sizes, self.num_rows)

    @cached_property
    def prefill_widths(self) -> dict[int, int]:
        """Rows of a prefill step -> most tokens of each. A step has at most `chunk` tokens, padding counted, and so no
        more rows.
        """
        longest = max(self.max_context - 1, 1)
        return {rows: min(self.chunk // rows, longest) for rows in self.buckets if rows <= self.chunk}

    def bucket_for(self, live: int) -> int:
        """Smallest bucket that holds `live` rows."""
        self.require("max_requests", live)
        return next(bucket for bucket in self.buckets if bucket >= live)

    def coarse_bucket_for(self, live: int) -> int:
        """Smallest of the coarse buckets that holds `live` rows."""
        self.require("max_requests", live)
        return next(bucket for bucket in self.coarse_buckets if bucket >= live)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    @property
    def tokens_per_request(self) -> int:
        """Pool tokens that one request at the context wall holds, its last page counted whole."""
        return self.page_columns * self.page_size

    @property
    def tokens_for_all(self) -> int:
        """Pool tokens with which every row can reach the context wall at once; more are never used."""
        return self.max_requests * self.tokens_per_request

    def window_pages(self, window: int) -> int:
        """Most pages of a window group that one request holds at a time."""
        return min(self.pages_for(window - 1 + self._ahead) + 1, self.page_columns)

    @property
    def _ahead(self) -> int:
        """Tokens of a row past those that are complete in every group: of a chunk, or of rounds and what they defer."""
        return max(self.chunk, self.headroom + self.max_deferred)

    def window_spares(self, group: KVGroup) -> int:
        """Tokens of a request at the context wall for which the group has no pages: they lie behind its window."""
        return (self.page_columns - self.pages_per_request(group)) * self.page_size

    def pages_per_request(self, group: KVGroup) -> int:
        """Pages of `group` that one request at the context wall holds."""
        return self.page_columns if group.window is None else self.window_pages(group.window)

    @cached_property
    def max_edits(self) -> int:
        """Page-table cells that one plan may change, each once.

        A running row gets pages for its next step and loses those that slid behind a window since its last plan. Pages
        that chunks or imports have filled may be exchanged for the prefix cache's. New rows get pages for a chunk of
        prompts, and one of them for all it may hold. Admission keeps to it.
        """
        slides = 2 * self.pages_for(self._ahead)
        grows = self.pages_for(self.headroom) + 1
        imported = self.disaggregation_slots * (self.pages_for(self.slot_tokens) + 1)
        exchanged = self.max_steps * (self.pages_for(self.chunk) + self.max_requests + imported)
        new = self.page_columns + self.pages_for(self.chunk)
        maximum = sum(
            new + exchanged + self.max_requests * (grows if g.window is None else grows + slides) for g in self.groups
        )
        return min(maximum, len(self.groups) * self.max_requests * self.page_columns)

    @property
    def num_pages(self) -> dict[GroupName, int]:
        """Pages of each group, the null page included. A window's pool holds every request's window, and one that is
        being copied to the host or from there.
        """
        windows = self.max_requests + (self.copied_pages > 0)
        return {
            group.name: 1
            + (self.pages_for(self.pool_tokens) if group.window is None else windows * self.window_pages(group.window))
            for group in self.groups
        }

    def page_bytes(self, element_size: int) -> dict[GroupName, int]:
        """Bytes of a page of each group, and of a slot for states of each group of these."""
        pages = {group.name: self.page_size * group.bytes_per_token(element_size) for group in self.groups}
        return pages | {group.name: group.row_bytes(element_size) for group in self.state_groups if self.checkpoints}

    def copied(self, name: GroupName) -> int:
        """Pages of a group that one step copies to the host or back; of states one slot."""
        return 1 if any(group.name == name for group in self.state_groups) else self.copied_pages

    @property
    def token_groups(self) -> tuple[GroupName, ...]:
        return tuple(group.name for group in self.groups)

    @property
    def has_draft(self) -> bool:
        return any(group.is_draft for group in self.groups)

    def group(self, name: GroupName) -> KVGroup:
        """The group called `name`; a missing group is a construction error."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ConfigError(f"no KV group {name!r}; this engine has {', '.join(self.token_groups)}")

    def dimensions(self) -> dict[str, Dimension]:
        """All dimensions by name, for buffers, errors and the capacity table."""
        c, w, p, max_in_flight = self.max_context, self.commit_width, self.page_size, self.max_in_flight
        extends = "max over shapes of S + 1"
        if self.max_deferred:
            extends = f"max(max over shapes of S + 1 {w}, deferred {self.max_deferred})"
        drafts = "max over shapes of k * (S - 1)" + (f" + the draft's block {self.lead}" if self.lead else "")
        if self.block > self.lead:
            drafts = f"max({drafts}, the draft's block {self.block})"
        rows = [
            Dimension("max_requests", self.max_requests, "--max-running-requests", "--max-running-requests"),
            Dimension("max_context", c, "--context-length", "--context-length"),
            Dimension("chunk", self.chunk, "--chunked-prefill-size", "--chunked-prefill-size"),
            Dimension(
                "page_columns",
                self.page_columns,
                f"ceil((context {c} + in_flight {max_in_flight} * (S + 1) {w}) / page {p})",
                "--context-length",
            ),
            Dimension(
                "max_positions",
                self.max_positions,
                f"context {c} + in_flight {max_in_flight} * (S + 1) {w}",
                "--context-length",
            ),
            Dimension("max_edits", self.max_edits, "cells that one plan may change", "--max-running-requests"),
            Dimension("draft_tail", self.draft_tail, drafts, "--speculative-num-steps"),
            Dimension("verify_tail", self.verify_tail, "max over shapes of T", "--speculative-num-draft-tokens"),
            Dimension("extend_tail", self.extend_tail, extends, "--speculative-num-steps"),
        ]
        if self.disaggregation_slots:
            formula = "(--disaggregation-slot-bytes - record and alignment) / bytes a token"
            rows.append(
                Dimension(
                    "disaggregation_slots",
                    self.disaggregation_slots,
                    "--disaggregation-slots",
                    "--disaggregation-slots",
                )
            )
            rows.append(Dimension("slot_tokens", self.slot_tokens, formula, "--disaggregation-slot-bytes"))
        for group in self.groups:
            formula = "pool tokens / page + null page"
            rows.append(Dimension(f"pages.{group.name}", self.num_pages[group.name], formula, "--max-total-tokens"))
        for state in self.state_groups:
            size, steps, nodes = "--max-running-requests", "--speculative-num-steps", "--speculative-num-draft-tokens"
            rows.append(Dimension(f"rows.{state.name}", self.num_rows, f"{size} + the dummy row", size))
            rows.append(Dimension(f"pending.{state.name}", w, "max over shapes of S + 1", steps))
            rows.append(Dimension(f"stash.{state.name}", self.verify_tail, "max over shapes of T", nodes))
        if self.state_groups:
            formula = "--state-checkpoint-memory / bytes of a row's states"
            rows.append(Dimension("checkpoints", self.checkpoints, formula, "--state-checkpoint-memory"))
        return {row.name: row for row in rows}

    def require(self, name: str, need: int) -> None:
        """Raise CapacityError if `need` exceeds the dimension that is the attribute `name`."""
        if need > getattr(self, name):
            have = self.dimensions()[name]
            raise CapacityError(
                f"{name}: need {need}, have {have.value} = {have.formula}; lower the load or raise {have.option}"
            )

    def validate(self) -> None:
        """Raise CapacityError unless every group holds one request at the context wall."""
        for group in self.groups:
            need = self.pages_per_request(group) + 1
            have = self.num_pages[group.name]
            if need > have:
                raise CapacityError(
                    f"pages.{group.name}: need {need} = one request of {self.max_positions} tokens in pages of"
                    f" {self.page_size} + the null page, have {have}; lower --context-length or raise"
                    f" --max-total-tokens to at least {(need - 1) * self.page_size}"
                )
