"""Configuration enters once, is validated once with all problems reported together, and is passed on."""

from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Literal, get_args

from treetop.types.errors import ConfigError, shown
from treetop.types.kv_chunk import ALIGNMENT
from treetop.types.layout import PLAIN, SpecShape

Algorithm = Literal["EAGLE", "EAGLE3", "MTP", "NEXTN", "NGRAM", "NONE"]
_ALONE = ("MTP", "NEXTN", "NGRAM")
"""Algorithms that need no folder of a draft: the target's holds their weights, or there are none."""
MtpRecurrence = Literal["auto", "before-norm", "after-norm"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Backend = Literal["auto", "torch", "triton", "fa3", "flashinfer", "fa4"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Graphs = Literal["auto", "off", "sim"]
SchedulePolicy = Literal["fcfs", "priority"]

BUILTIN_MODEL = "builtin:nestling"
BUILTIN_DRAFT = "builtin:nestling-eagle3"

CHOICES: dict[str, tuple[str, ...]] = {
    "speculative_algorithm": get_args(Algorithm),
    "speculative_mtp_recurrence": get_args(MtpRecurrence),
    "dtype": get_args(DType),
    "attention_backend": get_args(Backend),
    "graphs": get_args(Graphs),
    "device": get_args(DeviceName),
    "load_format": get_args(LoadFormat),
    "schedule_policy": get_args(SchedulePolicy),
}

_COUNTS = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "page_size",
    "check_level",
    "seed",
    "tp_size",
    "ep_size",
    "structured_output_memory",
    "disaggregation_slots",
    "disaggregation_slot_bytes",
)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_COUNTS, (int,)),
    **dict.fromkeys(
        (
            "max_running_requests",
            "context_length",
            "max_total_tokens",
            "chunked_prefill_size",
            "prefill_tokens_per_round",
            "simulate_accept_length",
        ),
        (int, NoneType),
    ),
    **dict.fromkeys(("draft", "speculative_algorithm"), (str, NoneType)),
    **dict.fromkeys(("disable_radix_cache", "disable_logits_processors", "disable_custom_all_reduce"), (bool,)),
    **dict.fromkeys(("overlap", "compress_weights"), (bool, NoneType)),
    **dict.fromkeys(("mem_fraction_static", "step_timeout", "structured_output_timeout"), (float, int)),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every option of the engine, under the flag's name. Raises ConfigError with all problems at once.

    draft None decodes plainly, but for algorithms that need none: MTP, alias NEXTN, whose weights the target's folder
    holds, and NGRAM, which has none. speculative_algorithm None is inferred from the draft's tensors.
    speculative_mtp_recurrence: which state of an MTP layer feeds it again; auto is the family's. context_length
    None is the model's. max_running_requests: decoded at a time; None goes by the device and its memory.
    mem_fraction_static: share of the device's memory for weights, tables and KV pools. max_total_tokens: tokens each KV
    pool holds, whatever that share is; None gives every running request its whole context if it fits. load_format:
    dummy makes random weights of the shapes that config.json gives. compress_weights: keep weights in 12 bits too,
    without loss, for products of few rows; None does where products gain and memory is plenty. simulate_accept_length:
    tokens every round emits, whatever is right; for measuring speed only. chunked_prefill_size: most prompt tokens a
    prefill step processes, its padding counted; None goes by the device and its memory, and by what staging slots
    hold. prefill_tokens_per_round: the same while requests decode, which take turns with prefill steps, and fewer the
    more they attend to; None is about what their round computes.
    schedule_policy: who is admitted first, and retracted last: by arrival, or by each request's priority, lower first,
    and then by arrival. disable_radix_cache: do not keep the K/V of prompts and outputs for prompts that begin alike.
    disable_logits_processors: refuse requests with penalties, biases and the like, and keep no memory for them.
    check_level: 0 off, 1 host checks, 2 device probes, 3 poison and red zones. overlap: launch a round before the
    results of the last one are known; None is on where rounds are captured CUDA graphs. graphs: `sim` runs rounds with
    the semantics of captured graphs, on a CPU. tp_size: GPUs, or processes on a CPU, that share the model, a rank each.
    ep_size: the same, but each has requests of its own, and they share only the experts of a model that has some.
    disable_custom_all_reduce: GPUs exchange by NCCL alone, also where they reach each other's memory.
    step_timeout: seconds after which a step that has not ended on every rank ends them all; of one rank it is not used.
    structured_output_timeout: seconds that a structure may take, and each mask of it. structured_output_memory: MiB
    that its parser may take.
    disaggregation_slots: staging slots, through which KV goes to another worker or comes from one; 0 for none.
    disaggregation_slot_bytes: of each, on every rank.
    """

    model: str = BUILTIN_MODEL
    draft: str | None = None
    speculative_algorithm: Algorithm | None = None
    speculative_mtp_recurrence: MtpRecurrence = "auto"
    speculative_num_steps: int = 5
    speculative_eagle_topk: int = 4
    speculative_num_draft_tokens: int = 16
    page_size: int = 16
    max_running_requests: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.88
    chunked_prefill_size: int | None = None
    prefill_tokens_per_round: int | None = None
    schedule_policy: SchedulePolicy = "fcfs"
    disable_radix_cache: bool = False
    disable_logits_processors: bool = False
    attention_backend: Backend = "auto"
    graphs: Graphs = "auto"
    overlap: bool | None = None
    dtype: DType = "auto"
    device: DeviceName = "auto"
    load_format: LoadFormat = "auto"
    compress_weights: bool | None = None
    simulate_accept_length: int | None = None
    check_level: int = 1
    seed: int = 0
    tp_size: int = 1
    ep_size: int = 1
    disable_custom_all_reduce: bool = False
    step_timeout: float = 60.0
    structured_output_timeout: float = 5.0
    structured_output_memory: int = 256
    disaggregation_slots: int = 0
    disaggregation_slot_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        wrong = self._wrong_types()
        problems = wrong or [text for bad, text in self._rules() if bad]
        if not wrong:
            try:
                self._tree()  # also without a draft: what it would be must make sense
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        for each in fields(self):
            if isinstance(value := getattr(self, each.name), float):  # NumPy's is one, which no message can hold
                object.__setattr__(self, each.name, float(value))

    def _wrong_types(self) -> list[str]:
        """Options whose value is not of their default's or annotation's kind."""
        problems = []
        for each in fields(self):
            value, kinds = getattr(self, each.name), _KINDS.get(each.name, (str,))
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                names = " or ".join("nothing" if kind is NoneType else kind.__name__ for kind in kinds)
                problems.append(f"{flag(each.name)} must be {names}, got {shown(value)}")
        return problems

    def _rules(self) -> list[tuple[bool, str]]:
        page = self.page_size
        rules = [
            (
                page < 1 or page & (page - 1) != 0,
                f"--page-size must be a power of two, got {shown(page)}",
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
                self.speculative_algorithm == "NGRAM" and self.draft is not None,
                "--speculative-algorithm NGRAM looks drafts up in the request's own text: drop"
                " --speculative-draft-model-path",
            ),
            (self.check_level not in range(4), f"--check-level must be 0, 1, 2 or 3, got {shown(self.check_level)}"),
            (
                self.simulate_accept_length is not None
                and not 1
                <= self.simulate_accept_length
                <= (min(self.speculative_num_steps + 1, self.speculative_num_draft_tokens) if self.speculates else 1),
                "--simulate-accept-length must lie between 1 and num-steps + 1, and not exceed num-draft-tokens"
                " (1 without a draft),"
                f" got {shown(self.simulate_accept_length)}",
            ),
            (
                not 0 < self.mem_fraction_static < 1,
                f"--mem-fraction-static must lie between 0 and 1, got {shown(self.mem_fraction_static)}",
            ),
            (not 0 <= self.seed < 2**63, f"--seed must be in [0, 2^63), got {shown(self.seed)}"),
        ]
        together = self.tp_size > 1 and self.ep_size > 1
        rules.append((together, "--tp-size and --ep-size cannot both be more than 1 for now"))
        rules.append(
            (
                not 0 < self.step_timeout <= 86400,
                f"--step-timeout must lie between 0 and 86400 seconds, got {shown(self.step_timeout)}",
            )
        )
        rules.append(
            (
                not 0.01 <= self.structured_output_timeout <= 3600,
                "--structured-output-timeout must lie between 0.01 and 3600 seconds, got"
                f" {shown(self.structured_output_timeout)}",
            )
        )
        rules.append(
            (
                not 1 <= self.structured_output_memory <= 2**20,
                f"--structured-output-memory must lie between 1 and 2^20 MiB, got"
                f" {shown(self.structured_output_memory)}",
            )
        )
        rules.append(
            (
                not 0 <= self.disaggregation_slots <= 4096,
                f"--disaggregation-slots must lie between 0 and 4096, got {shown(self.disaggregation_slots)}",
            )
        )
        size = self.disaggregation_slot_bytes
        rules.append(
            (
                not ALIGNMENT <= size <= 2**40 or size % ALIGNMENT != 0,
                f"--disaggregation-slot-bytes must be a multiple of {ALIGNMENT} up to 2^40, got {shown(size)}",
            )
        )
        counts = {"tp_size": 64, "ep_size": 64, "max_running_requests": 65536, "page_size": 2**20}
        for name in (
            "max_running_requests",
            "chunked_prefill_size",
            "prefill_tokens_per_round",
            "context_length",
            "max_total_tokens",
            "page_size",
            "tp_size",
            "ep_size",
        ):
            value, most = getattr(self, name), counts.get(name, 2**40)
            least = 2 if name == "context_length" else 1  # a token of a prompt and one of its output
            bad = value is not None and not least <= value <= most
            rules.append((bad, f"{flag(name)} must lie between {least} and {most}, got {shown(value)}"))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            bad = value is not None and value not in choices
            rules.append((bad, f"{flag(name)} must be one of {', '.join(choices)}, got {shown(value)}"))
        return rules

    @property
    def shape(self) -> SpecShape:
        """The tree shape of a round; PLAIN without a draft."""
        return self._tree() if self.speculates else PLAIN

    @property
    def algorithm(self) -> str | None:
        """Under its one name; None to infer it, or for plain decoding."""
        asked = self.speculative_algorithm
        return {"NEXTN": "MTP", "NONE": None}.get(asked, asked) if asked is not None else None

    @property
    def speculates(self) -> bool:
        """Whether rounds draft."""
        return self.draft is not None or self.speculative_algorithm in _ALONE

    def _tree(self) -> SpecShape:
        return SpecShape(self.speculative_eagle_topk, self.speculative_num_steps, self.speculative_num_draft_tokens)

    @classmethod
    def of(cls, model: str | None, **options: object) -> "EngineConfig":
        """Build from what a caller gave. Without a model it is the embedded pair; a model brings no draft by itself.

        `draft` among the options, None included, is the caller's word; so is speculative_algorithm NONE. An unknown
        option is a ConfigError that lists the known.
        """
        plain = model is not None or options.get("speculative_algorithm") in ("NONE", *_ALONE)
        pair = {"model": BUILTIN_MODEL if model is None else model, "draft": None if plain else BUILTIN_DRAFT}
        given = {**pair, **options}
        known = {field.name for field in fields(cls)}
        unknown = [shown(name)[1:-1] for name in sorted(set(given) - known)]
        if unknown:
            raise ConfigError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**given)  # type: ignore[arg-type]  # values are checked by __post_init__


def flag(option: str) -> str:
    """The command-line spelling of an option."""
    return "--speculative-draft-model-path" if option == "draft" else "--" + option.replace("_", "-")


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
