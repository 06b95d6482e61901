"""Options of the engine. They enter once, are validated once with all problems reported together, and are passed on."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from treetop.types.constraint import JsonWhitespace
from treetop.types.default_model import PAIRS, default_pair
from treetop.types.errors import ConfigError, shown
from treetop.types.kv_chunk import ALIGNMENT
from treetop.types.layout import PLAIN, SpecShape, shapes_beside
from treetop.types.options import option, options_of, validate

Algorithm = Literal[
    "EAGLE",
    "EAGLE3",
    "PEAGLE",
    "DFLASH",
    "DFLASH2",
    "DSPARK",
    "DOMINO",
    "GEMMA4",
    "STANDALONE",
    "MTP",
    "NEXTN",
    "NGRAM",
    "SUFFIX",
    "NONE",
]
_ALONE = ("MTP", "NEXTN", "NGRAM", "SUFFIX")
"""Algorithms that need no folder of a draft: the target's holds their weights, or there are none."""
Recurrence = Literal["auto", "before-norm", "after-norm"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Backend = Literal["auto", "torch", "triton", "segments", "fa3", "flashinfer", "fa4", "flashmla", "gluon"]
"""Each but auto is a file of `treetop.attention`, which this name registers."""
LinearPrefill = Literal["auto", "fla"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Graphs = Literal["auto", "off", "sim"]
MixedChunk = Literal["off", "auto", "on"]
Calibration = Literal["learn", "frozen", "off"]
SpeculativePolicy = Literal["auto", "fixed"]
SchedulePolicy = Literal["fcfs", "priority"]
Exactness = Literal["auto", "bits", "ties"]
ExactSums = Literal["auto", "packed", "linear", "integers"]
KVCacheDType = Literal["auto", "fp8_e4m3"]

_MAX_NAME = 64
"""Characters of an unknown option that are compared with the known."""
BUILTIN_MODEL, BUILTIN_DRAFT = PAIRS["nestling"]


PAGE_SIZE = 16
"""Tokens of a page where no backend asks for another size."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option of the engine, under the flag's name; `option` says of each what it does and which values it takes.

    `EngineOptions` is the same for `LLM(**options)`. Raises ConfigError with all problems at once.
    """

    model: str = option(
        BUILTIN_MODEL, "folder of the target; builtin:smollm2 by default where its package is installed"
    )
    draft: str | None = option(
        None,
        "folder of the draft head, or builtin:NAME; a model without one decodes plainly (default: none, and its own"
        " where no model is named)",
        flag="--speculative-draft-model-path",
        aliases=("--speculative-draft-model", "--spec-model"),
        metavar="FOLDER",
    )
    speculative_algorithm: Algorithm | None = option(
        None,
        "NONE forbids a draft; MTP (alias NEXTN) and NGRAM (alias SUFFIX) need no folder of one; STANDALONE drafts with"
        " a whole language model (default: what the draft's tensors are)",
    )
    speculative_suffix_lookup: bool = option(
        False,
        "beside a draft, look up what followed where the request's own text has stood as now; trees hold the best of"
        " both",
    )
    speculative_suffix_cache_tokens: int = option(
        0,
        "last tokens of earlier requests' texts, of those with the same cache_salt, where NGRAM and"
        " --speculative-suffix-lookup look drafts up too; 0 for none",
        minimum=0,
        maximum=2**30,
    )
    speculative_mtp_recurrence: Recurrence = option(
        "auto",
        "which state of an MTP layer feeds it again: before or after its norm (auto: as the family's reference does)",
    )
    speculative_eagle_recurrence: Recurrence = option(
        "auto",
        "which state of an EAGLE-3 head feeds it again: before or after its norm (auto: as norm_output of its config"
        " says)",
    )
    speculative_draft_window_size: int | None = option(
        None,
        "tokens that a draft's layers see, itself counted; its K/V take less memory (default: as many as its config"
        " says, or all)",
        minimum=1,
        maximum=2**40,
    )
    speculative_draft_kv_cache_dtype: KVCacheDType | None = option(
        None, "what a draft's own K/V are kept in, in the words of --kv-cache-dtype (default: as the target's)"
    )
    speculative_num_steps: int = option(5, "levels of the tree (S)")
    speculative_eagle_topk: int = option(4, "branches of each node (k); 1 is a chain")
    speculative_num_draft_tokens: int = option(16, "nodes verified in one pass, root included (T)")
    speculative_node_budget: int | None = option(
        None,
        "nodes that a round verifies of all its rows together: a root of each, then those of the likeliest paths, at"
        " most T of a row (default: T of each)",
        minimum=1,
        maximum=2**20,
    )
    speculative_policy: SpeculativePolicy | None = option(
        None,
        "fixed: every round has the shape above; auto: each round the shape that pays at this load, plain where none"
        " does (docs/policy.md; default: auto on a GPU, fixed on a CPU)",
    )
    speculative_shapes: str | None = option(
        None,
        'shapes that auto chooses from beside 0,1,1, as "S,k,T S,k,T"; S,k,T,N has a node budget (default: two chains,'
        " a tree of half the nodes, and the shape above)",
        metavar='"S,k,T S,k,T"',
    )
    speculative_max_deferred: int | None = option(
        None,
        "with auto: tokens of a request that plain rounds may leave to one later pass of the draft; 0 for none"
        " (default: 32 on a GPU, 128 on a CPU)",
        minimum=0,
        maximum=1024,
    )
    speculative_calibration: Calibration | None = option(
        None,
        "how a node's chance to be accepted is told from the draft's log-probabilities: off believes them, learn"
        " corrects them by what the target chooses, frozen by what was learned before; no token depends on it (default:"
        " learn with auto, else off)",
    )
    speculative_calibration_dir: str | None = option(
        None,
        "folder that keeps what was learned, a file for each pair of target and draft (default: nothing is kept)",
        metavar="FOLDER",
    )
    page_size: int | None = option(
        None,
        "tokens a KV page holds (default: 64 where compressed attention (MLA) has a faster kernel for such pages, else"
        " 16)",
        minimum=1,
        check=lambda size: size & (size - 1) == 0,
        must="must be a power of two",
        aliases=("--block-size",),
    )
    max_running_requests: int | None = option(
        None,
        "requests decoded at a time (default: 16 on a CPU, up to 256 on a GPU by its memory)",
        minimum=1,
        maximum=65536,
        aliases=("--max-num-seqs",),
    )
    context_length: int | None = option(
        None,
        "tokens a request may hold, prompt and output (default: the model's)",
        minimum=2,  # a token of a prompt and one of its output
        maximum=2**40,
        aliases=("--max-model-len",),
    )
    max_total_tokens: int | None = option(
        None,
        "tokens each KV pool holds, whatever the fraction below says (default: what fits, and no more than all running"
        " requests can use)",
        minimum=1,
        maximum=2**40,
    )
    mem_fraction_static: float = option(
        0.88,
        "share of the device's memory for weights, tables and KV pools",
        above=0,
        below=1,
        aliases=("--gpu-memory-utilization",),
    )
    chunked_prefill_size: int | None = option(
        None,
        "prompt tokens a prefill step processes, padding counted (default: 512 on a CPU, 2048 to 8192 on a GPU by its"
        " memory)",
        minimum=1,
        maximum=2**40,
        aliases=("--max-num-batched-tokens",),
    )
    prefill_tokens_per_round: int | None = option(
        None,
        "the same while requests decode, which wait for such a step between two rounds; fewer the more they attend to"
        " (default: about what a round computes, at least 2048 on a GPU and 128 on a CPU; while others wait for empty"
        " rows several such steps, up to --max-num-batched-tokens together; or what --target-gap-ms leaves)",
        minimum=1,
        maximum=2**40,
    )
    target_gap_ms: float | None = option(
        None,
        "milliseconds between two tokens of a stream, at p99, that prompts beside it keep to, by what steps have cost;"
        " 0 for no bound (default: steps of a fixed size)",
        minimum=0,
        maximum=3_600_000,
        unit=" ms",
    )
    mixed_chunk: MixedChunk = option(
        "off",
        "a chunk of prompts in the forward of a round, so that weights are read once for both: on beside every round,"
        " auto where costs say so, which large trees do not (docs/policy.md)",
    )
    prefill_graph_max_tokens: int = option(
        1024,
        "tokens up to which a prefill step is captured as a CUDA graph, of sizes in between, its prompts packed in"
        " blocks; 0 to launch all kernel by kernel",
        minimum=0,
        maximum=8192,
    )
    schedule_policy: SchedulePolicy = option(
        "fcfs",
        "who runs first, and is put back last: fcfs by arrival, priority by each request's `priority`, lower first",
        aliases=("--scheduling-policy",),
    )
    disable_radix_cache: bool = option(
        False,
        "do not keep the K/V of prompts and outputs for prompts that begin alike",
        aliases=("--no-enable-prefix-caching",),
    )
    state_checkpoint_every: int | None = option(
        None,
        "tokens of a prompt after which the states of recurrent layers are kept beside its K/V, for prompts that begin"
        " alike; a multiple of --page-size, 1024 by default; also at a prompt's last page, and where prompts part",
        minimum=1,
        maximum=2**20,
    )
    state_checkpoint_memory: float | None = option(
        None,
        "GiB on every GPU for these; by default as much as the states of --max-running-requests; 0 keeps none, and no"
        " prefix of a model with recurrent layers",
        minimum=0,
        maximum=2**20,
        unit=" GiB",
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory, those of all ranks of --tp-size together, that keep K/V which the GPU's prefix cache gives"
        " up, for prompts that begin alike (docs/offloading.md; default: none)",
        above=0,
        maximum=2**20,
        unit=" GiB",
    )
    kv_offloading_folder: str | None = option(
        None,
        "folder on a disk of this machine that keeps what --kv-offloading-size keeps, and more of it, also over a"
        " restart; with --kv-offloading-disk-size (docs/offloading.md#on-disk; default: none)",
        metavar="FOLDER",
    )
    kv_offloading_disk_size: float | None = option(
        None,
        "most GiB that each engine keeps in --kv-offloading-folder",
        above=0,
        maximum=2**30,
        unit=" GiB",
    )
    enable_return_routed_experts: bool = option(
        False,
        "keep which experts each token went to, beside its K/V, for requests with return_routed_experts"
        " (docs/rl.md#routed-experts); a model without experts is refused",
    )
    disable_logits_processors: bool = option(
        False,
        "refuse requests that change logits by penalties, biases, min_tokens or allowed tokens, and keep no memory for"
        " them",
    )
    attention_backend: Backend = option("auto", "who computes attention")
    linear_attn_prefill_backend: LinearPrefill = option(
        "auto",
        "who takes prompts through linear attention: auto, our kernels in float32; fla, flash-linear-attention in 16"
        " bits, on a GPU where it is installed",
    )
    graphs: Graphs = option("auto", "captured graphs; sim gives a CPU their semantics, for tests")
    overlap: bool | None = option(
        None, "launch a round before the last one's results are known; on by default where rounds are captured"
    )
    dtype: DType = option("auto", "what the model computes in; auto is float32 on a CPU and bfloat16 on a GPU")
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "what K/V are kept in; auto is the dtype above, fp8_e4m3 is FP8 with a scale for each head and plane, the"
        " checkpoint's or 1.0: twice the tokens in 16 bits' memory (docs/checkpoints.md)",
    )
    exactness: Exactness = option(
        "auto",
        "what equals plain decoding: bits (batch-invariant), every logit and token, whatever tree, batch, chunk or"
        " prefix, on a CPU in"
        " float32 and on a GPU in bfloat16 or float16 (docs/exactness.md); ties, all tokens but at near ties of"
        " rounding; auto, what a table has for the device and the kind of model: bits where it is nearly as fast",
    )
    exact_sums: ExactSums = option(
        "auto",
        "with bits on a CPU, whose sums are exact: auto, the fastest library call of which a probe says so when a shape"
        " is first met on a machine, and our sums of integers where none is; packed and linear, only oneDNN's or"
        " F.linear's; integers, ours, the same on every CPU and slower (docs/exactness.md)",
    )
    device: DeviceName = option("auto", "auto is a GPU if there is one")
    load_format: LoadFormat = option(
        "auto", "dummy: random weights; a folder with config.json is enough; for measuring speed"
    )
    compress_weights: bool | None = option(
        None,
        "keep weights in 12 bits too, or a target's in 13 with --exactness bits, without loss, which makes small"
        " batches faster; on by default in bfloat16 on a GPU like an H200 if that takes up to a quarter of what is left"
        " for KV pools",
    )
    dequantize_weights: bool | None = option(
        None,
        "decode quantized weights once, as they are loaded, which is the default on a CPU; if not, they stay packed in"
        " memory and products decode them, which is the default on a GPU in 16 bits; a CPU in bfloat16 takes"
        " integers of 4 bits as they are (docs/checkpoints.md)",
    )
    quantize_activations: bool = option(
        False,
        "products with FP8 weights round their inputs to FP8 as well, as the checkpoint says: by token, by groups of a"
        " token or by a fixed scale, at every number of rows (docs/checkpoints.md)",
    )
    simulate_accept_length: float | None = option(
        None, "tokens every round emits, in the mean if fractional: the output is wrong; for measuring speed only"
    )
    simulate_acceptance: str | None = option(
        None,
        "a profile, builtin:NAME or a file, that acceptance and what the draft says of it are drawn from: the output is"
        " wrong; for measuring only (docs/policy.md)",
        metavar="FILE",
    )
    check_level: int = option(
        1,
        "0 off, 1 host checks, 2 device probes, 3 poison and red zones",
        minimum=0,
        maximum=3,
        must="must be 0, 1, 2 or 3",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters that PEFT wrote, each under the name that a request gives instead of the model's; NAME=FOLDER, or a"
        " dict in Python (docs/lora.md)",
        metavar="NAME=FOLDER",
        several=True,
    )
    enable_lora: bool = option(False, "adapters may be loaded and unloaded while it runs (docs/lora.md)")
    enable_draft_lora: bool = option(
        False, "adapters that are loaded while it runs may have one for the draft head (docs/lora.md)"
    )
    max_loras: int | None = option(
        None, "adapters on the device at a time (default: those of --lora-modules, 1 at least)", minimum=1, maximum=1024
    )
    max_cpu_loras: int | None = option(
        None, "adapters that may be loaded in all (default: as many as on the device)", minimum=1, maximum=65536
    )
    max_lora_rank: int = option(
        16, "with --enable-lora, ranks of adapters; one of --lora-modules may have more", minimum=1, maximum=512
    )
    seed: int | None = option(
        None,
        "each prompt draws its own seed from this one: the same seed and prompts give the same sampled tokens (default:"
        " 0; of a server, drawn anew by each of its API processes)",
        minimum=0,
        below=2**63,
        must="must be in [0, 2^63)",
        aliases=("--random-seed",),
    )
    tp_size: int = option(
        1,
        "GPUs that share the model, each with a part of every layer (docs/scale.md)",
        minimum=1,
        maximum=64,
        aliases=("--tensor-parallel-size", "--tp"),
    )
    ep_size: int = option(
        1,
        "GPUs that share the experts of a model that has some, each with requests of its own (docs/scale.md)",
        minimum=1,
        maximum=64,
        aliases=("--expert-parallel-size", "--ep"),
    )
    disable_custom_all_reduce: bool = option(
        False, "with --tp-size: exchange by NCCL alone, not by peer memory (docs/distributed.md)"
    )
    step_timeout: float = option(
        60.0,
        "seconds after which a step that has not ended on every GPU ends them all; with --tp-size or --ep-size",
        above=0,
        maximum=86400,
        unit=" seconds",
    )
    structured_output_timeout: float = option(
        5.0,
        "seconds of a processor that a structure may take to compile, and each token; its request then ends with an"
        " error",
        minimum=0.01,
        maximum=3600,
        unit=" seconds",
    )
    structured_output_memory: int = option(
        256, "MiB that the parser of a structure may take", minimum=1, maximum=2**20, unit=" MiB"
    )
    structured_output_whitespace: JsonWhitespace = option(
        "bounded",
        "white space between tokens of JSON structures: at most one blank or line end (bounded), `, ` and `: ` and no"
        " other (fixed), or any",
    )
    disaggregation_slots: int = option(
        0,
        "staging slots, through which KV goes to another worker or comes from one; 0 for none",
        minimum=0,
        maximum=4096,
        aliases=("--handover-slots",),
    )
    disaggregation_slot_bytes: int = option(
        64 << 20,
        "bytes of each of these, on every GPU",
        minimum=ALIGNMENT,
        maximum=2**40,
        check=lambda size: size % ALIGNMENT == 0,
        must=f"must be a multiple of {ALIGNMENT} up to 2^40",
        aliases=("--handover-slot-bytes",),
    )

    def __post_init__(self) -> None:
        validate(self, ConfigError, self._rules)

    def _rules(self) -> list[tuple[bool, str]]:
        """What spans options, or is not a bound."""
        accepted, auto = self.simulate_accept_length, self.speculative_policy == "auto"
        maximum = min(self.speculative_num_steps + 1, self.speculative_num_draft_tokens) if self.speculates else 1
        try:
            self._tree()  # also without a draft: what it would be must make sense
            tree, _ = "", self._listed()
        except ConfigError as error:
            tree = str(error)
        return [
            (
                self.page_size is not None and self.page_size > 2**20,
                f"--page-size must lie between 1 and 2^20, got {shown(self.page_size)}",
            ),
            (
                self.speculative_algorithm == "NONE" and self.draft is not None,
                "--speculative-algorithm NONE forbids --speculative-draft-model-path",
            ),
            (
                self.speculative_algorithm not in (None, "NONE", *_ALONE) and self.draft is None,
                f"--speculative-algorithm {shown(self.speculative_algorithm)[1:-1]} needs"
                " --speculative-draft-model-path",
            ),
            (
                self.algorithm == "NGRAM" and self.draft is not None,
                f"--speculative-algorithm {self.speculative_algorithm} looks drafts up in the request's own text: drop"
                " --speculative-draft-model-path, or use it with --speculative-suffix-lookup instead",
            ),
            (
                self.speculative_suffix_lookup and (not self.speculates or self.algorithm == "NGRAM"),
                "--speculative-suffix-lookup looks up drafts beside a head's: give one; --speculative-algorithm NGRAM"
                " does so alone",
            ),
            (
                self.speculative_suffix_cache_tokens > 0 and not self.looks_up,
                "--speculative-suffix-cache-tokens is read by lookups: use --speculative-algorithm NGRAM or"
                " --speculative-suffix-lookup",
            ),
            (
                accepted is not None and not 1 <= accepted <= maximum,
                "--simulate-accept-length must lie between 1 and num-steps + 1, and not exceed num-draft-tokens"
                f" (1 without a draft), got {shown(accepted)}",
            ),
            (
                self.simulate_acceptance is not None and (accepted is not None or not self.speculates),
                "--simulate-acceptance simulates a draft: give one, and no --simulate-accept-length",
            ),
            (
                self.simulate_acceptance is not None and self.looks_up,
                "--simulate-acceptance draws what a head says; lookup in text says nothing: use a draft head",
            ),
            (
                self.simulates and self.speculative_calibration_dir is not None,
                "--speculative-calibration-dir keeps what is learned of a draft; drop it to simulate one",
            ),
            (
                auto and not self.speculates,
                "--speculative-policy auto needs a draft: give --speculative-draft-model-path or an algorithm that"
                " needs none",
            ),
            (
                self.speculative_eagle_recurrence != "auto" and (not self.speculates or self.algorithm in _ALONE),
                "--speculative-eagle-recurrence is of an EAGLE-3 head: give one, or drop it",
            ),
            (
                self.speculative_shapes is not None and self.speculative_policy == "fixed",
                "--speculative-shapes is for --speculative-policy auto",
            ),
            (
                self.speculative_calibration == "frozen" and self.speculative_calibration_dir is None,
                "--speculative-calibration frozen needs --speculative-calibration-dir, where something was learned",
            ),
            (
                self.speculative_calibration_dir is not None
                and (self.speculative_calibration == "off" or self.load_format == "dummy" or not self.speculates),
                "--speculative-calibration-dir keeps what is learned of a draft: give --speculative-calibration learn,"
                " a draft and no --load-format dummy, or drop it",
            ),
            (
                self.quantize_activations and self.dequantize_weights is True,
                "--quantize-activations multiplies FP8 weights as they are: drop --dequantize-weights",
            ),
            (
                self.kv_offloading_size is not None and self.disable_radix_cache,
                "--kv-offloading-size keeps what the prefix cache gives up: drop --disable-radix-cache",
            ),
            (
                self.enable_return_routed_experts and self.disaggregation_slots > 0,
                "--enable-return-routed-experts: not with --disaggregation-slots, whose workers hand over what drafts"
                " and tokens need; drop one of them",
            ),
            *self._rules_of_disk(),
            (bool(tree), tree),
            *self._rules_of_budget(),
            *self._rules_of_lora(),
        ]

    def _rules_of_disk(self) -> list[tuple[bool, str]]:
        folder, size = self.kv_offloading_folder, self.kv_offloading_disk_size
        return [
            (
                (folder is None) != (size is None),
                "--kv-offloading-folder, --kv-offloading-disk-size: give both, or neither",
            ),
            (
                folder is not None and self.kv_offloading_size is None,
                "--kv-offloading-folder keeps what the tier on the host passes on: give --kv-offloading-size too",
            ),
            (
                folder is not None and self.tp_size > 1,
                f"--kv-offloading-folder: not with --tp-size {shown(self.tp_size)}, whose ranks each have a part of a"
                " page; leave it out",
            ),
            (
                folder is not None and self.has_loras,
                "--kv-offloading-folder: not with adapters, whose names may mean others after a restart; leave it out",
            ),
        ]

    def _rules_of_budget(self) -> list[tuple[bool, str]]:
        name, own = "--speculative-node-budget", self.speculative_node_budget is not None
        budget = own or self._lists_budgets()
        return [
            (
                own and not self.speculates,
                f"{name} needs a draft: give --speculative-draft-model-path or an algorithm that needs none",
            ),
            (
                own and (self.speculative_policy == "auto" or self.speculative_shapes is not None),
                f"{name} is of one shape: use --speculative-policy fixed, or give --speculative-shapes with budgets of"
                " their own, S,k,T,N",
            ),
            (
                budget and self.simulate_accept_length is not None,
                f"{name} goes by what a draft says, which --simulate-accept-length passes over; use"
                " --simulate-acceptance",
            ),
        ]

    def _lists_budgets(self) -> bool:
        """Whether a shape to choose from has one; of shapes that are none, their own rule says so."""
        try:
            return any(shape.node_budget for shape in self._listed())
        except ConfigError:
            return False

    def _rules_of_lora(self) -> list[tuple[bool, str]]:
        names = [text.partition("=")[0] for text in self.lora_modules]
        wrong = next((text for text in self.lora_modules if not all(text.partition("="))), None)
        twice = next((name for name in names if names.count(name) > 1), None)
        named, most = len(names), self.max_cpu_loras
        return [
            (
                not names and not self.enable_lora and (self.max_loras or self.max_cpu_loras) is not None,
                "--max-loras and --max-cpu-loras: there are no adapters; add --enable-lora or --lora-modules",
            ),
            (
                most is not None and most < max(named, self.num_lora_slots),
                f"--max-cpu-loras {shown(most)}: need those of --lora-modules ({named}) and as many as on the device"
                f" (--max-loras {shown(self.num_lora_slots)}); raise it",
            ),
            (
                self.enable_draft_lora and not (self.enable_lora and self.speculates),
                "--enable-draft-lora: adapters of a draft head need --enable-lora and a draft",
            ),
            (wrong is not None, f"--lora-modules must be NAME=FOLDER, got {shown(wrong)}"),
            (twice is not None, f"--lora-modules names {shown(twice)} twice"),
        ]

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of `lora_modules` by their names, in their order."""
        return {name: folder for name, _, folder in (text.partition("=") for text in self.lora_modules)}

    @property
    def has_loras(self) -> bool:
        """Whether requests may have adapters."""
        return bool(self.lora_modules) or self.enable_lora

    @property
    def num_lora_slots(self) -> int:
        """Adapters on the device at a time."""
        return (self.max_loras or max(len(self.lora_modules), 1)) if self.has_loras else 0

    @property
    def most_loras(self) -> int:
        """Adapters in all, where they may be loaded later; else 0."""
        if not self.enable_lora:
            return 0
        return self.max_cpu_loras or max(self.num_lora_slots, len(self.lora_modules))

    @property
    def fp8_kv(self) -> bool:
        """Whether the target's K/V are kept in FP8."""
        return self.kv_cache_dtype == "fp8_e4m3"

    @property
    def fp8_draft_kv(self) -> bool:
        """Whether a draft's own K/V are."""
        return (self.speculative_draft_kv_cache_dtype or self.kv_cache_dtype) == "fp8_e4m3"

    @property
    def shape(self) -> SpecShape:
        """The tree shape of a round; PLAIN without a draft."""
        return self._tree() if self.speculates else PLAIN

    @property
    def shapes(self) -> tuple[SpecShape, ...]:
        """The shapes that rounds may have, smaller trees first; of a configuration with its policy said."""
        if not self.speculates or self.speculative_policy != "auto":
            return (self.shape,)
        return self._listed() or shapes_beside(self.shape)

    def _listed(self) -> tuple[SpecShape, ...]:
        """`speculative_shapes` and PLAIN; () if none are given."""
        if self.speculative_shapes is None:
            return ()
        listed = [SpecShape.parse(text, "--speculative-shapes") for text in self.speculative_shapes.split()]
        found = sorted({PLAIN, *listed}, key=lambda shape: (shape.num_draft_tokens, shape))
        if found == [PLAIN]:
            raise ConfigError(f"--speculative-shapes {shown(self.speculative_shapes)}: there is no tree among them")
        return tuple(found)

    @property
    def algorithm(self) -> str | None:
        """Under its one name; None to infer it, or for plain decoding."""
        asked = self.speculative_algorithm
        return {"NEXTN": "MTP", "SUFFIX": "NGRAM", "NONE": None}.get(asked, asked) if asked is not None else None

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in text, alone or beside a head's."""
        return self.algorithm == "NGRAM" or self.speculative_suffix_lookup

    @property
    def speculates(self) -> bool:
        """Whether rounds draft."""
        return self.draft is not None or self.speculative_algorithm in _ALONE

    @property
    def simulates(self) -> bool:
        """Whether what is accepted is not what is right."""
        return self.simulate_accept_length is not None or self.simulate_acceptance is not None

    def _tree(self) -> SpecShape:
        k, s, t = self.speculative_eagle_topk, self.speculative_num_steps, self.speculative_num_draft_tokens
        return SpecShape(k, s, t, self.speculative_node_budget or 0)

    @classmethod
    def of(cls, model: str | None, **options: object) -> "EngineConfig":
        """Build from what a caller gave. Without a model it is `default_pair`; a model brings no draft by itself.

        `draft` among the options, None included, is the caller's word; so is speculative_algorithm NONE. An unknown
        option is a ConfigError that names those that are near.
        """
        plain = model is not None or options.get("speculative_algorithm") in ("NONE", *_ALONE)
        own = default_pair() if model is None else (model, "")
        given = {"model": own[0], "draft": None if plain else own[1], **options}
        if isinstance(modules := given.get("lora_modules"), Mapping):
            given["lora_modules"] = tuple(f"{name}={folder}" for name, folder in modules.items())
        known = set(options_of(cls))
        unknown = sorted(set(given) - known)
        if unknown:
            near = [each for name in unknown[:3] for each in get_close_matches(name[:_MAX_NAME], known)]
            meant = f"near are {', '.join(near)}; " if near else ""
            names = ", ".join(shown(name)[1:-1] for name in unknown)
            raise ConfigError(f"unknown option {names}; {meant}docs/options.md lists all")
        return cls(**given)  # type: ignore[arg-type]  # values are checked by __post_init__


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigError, before any work, if the file that an option names cannot be written. Leaves none behind."""
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file in it")
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ConfigError(f"{option} {shown(str(path))}: {reason}") from None
