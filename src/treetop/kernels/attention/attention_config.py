"""How the attention kernels are cut for a call: a committed table by shape class, and a formula for what it lacks.

`attention_config.json` holds what `python benchmarks/attention.py --tune` measured, for one kind of GPU: shape class ->
launch, with its time and the formula's. A number of keys that was not measured takes the launch of the nearest that
was. A class of which no number of keys was measured, and another kind of GPU, use the formula.
"""

from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from treetop.kernels.triton_guard import GpuTraits, power_of_two
from treetop.kernels.tuning import TunedTable, nearest, read_table

TABLE = Path(__file__).with_name("attention_config.json")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a call is cut: queries (times grouped heads) and keys a block, splits of the keys, warps, pipeline stages.

    overlap: kernels start while the one before them ends, and wait for it themselves (programmatic dependent launch).
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class CallShape:
    """A call of attention, as a launch sees it.

    n: queries a row.
    max_kv_len: no row has more keys in the pages, or of a decode phase with a window no query sees more.
    chosen: to how many of these a query attends that an indexer chooses them for; 0 is all.
    """

    rows: int
    n: int
    kv_heads: int
    group: int
    head_dim: int
    element_bytes: int
    max_kv_len: int
    causal: bool = False
    chosen: int = 0

    @property
    def heads(self) -> str:
        """K/V heads, query heads a K/V head, their width, the bytes of a number; and how many keys are chosen."""
        chosen = f"c{self.chosen}" if self.chosen else ""
        return f"h{self.kv_heads}x{self.group}x{self.head_dim}e{self.element_bytes}{chosen}"

    @property
    def shape_class(self) -> str:
        """The name of the class: rows, queries and keys are rounded up to powers of two."""
        kind = "causal" if self.causal else "tail"
        rows, n, keys = power_of_two(self.rows), power_of_two(self.n), power_of_two(max(self.max_kv_len, 64))
        return f"{kind} {self.heads} rows{rows} n{n} keys{keys}"


@cache
def load_table() -> TunedTable[Launch]:
    """The committed table, by `CallShape.shape_class`."""
    return read_table(TABLE, lambda entry: Launch(**{name: entry[name] for name in _TUNED}))


@cache
def _measured(shape_class: str) -> Launch | None:
    """The launch of the class that differs from this one in nothing but its keys, and in those least.

    The bound of a captured call is the context limit, and what is fastest depends on that only weakly.
    """
    entries = load_table().entries
    name = nearest(shape_class, entries, ("keys",))
    return None if name is None else entries[name]


@lru_cache(maxsize=4096)
def choose_launch(call: CallShape, gpu: GpuTraits) -> Launch:
    """The launch of a call, from its shape alone: the table's, with no more splits than blocks, or the formula's."""
    found = _measured(call.shape_class) if load_table().holds_for(gpu) else None
    if found is None:
        return launch_by_formula(call, gpu)
    splits = max(1, min(found.splits, -(-call.max_kv_len // found.block_n)))
    return replace(found, splits=splits, overlap=gpu.can_overlap)


def for_codes(launch: Launch, call: CallShape, gpu: GpuTraits) -> Launch:
    """The launch of a call whose K/V are codes of a byte, of the one for 16 bits.

    Of decoding halves of what is on its way take the room of a third stage; and with half the bytes few rows need more
    programs to keep memory busy: on an H100, 32 rows of 8k take 281 us instead of 410, 8 of 32k 276 instead of 291.
    Launches of trees have not been timed. What codes widen to takes registers: where these lack, a program has half the
    queries, and of the widest heads one block of keys at a time (an H200, 8k keys: a prefill 0.95 of what it took, a
    tree 1.03). And no product is tensor memory's, with which Triton 3.6 does not compile what loads ahead and is
    widened by assembly: it fails in its own passes.
    """
    roomy, wide, block_m = gpu.shared_bytes >= 128 << 10, call.head_dim > 256, launch.block_m
    if gpu.has_tensor_memory:
        block_m = min(block_m, 32)
    if wide or call.element_bytes > 2 or (call.head_dim > 128 and not roomy):
        block_m = max(16, block_m // 2)
    alone = wide and (block_m < launch.block_m or not roomy)
    launch = replace(launch, block_m=block_m, num_stages=1 if alone else launch.num_stages)
    if call.causal or call.element_bytes > 2:
        return launch
    splits = launch.splits
    if call.n * call.group <= launch.block_m:
        splits = max(1, min(2 * splits, -(-call.max_kv_len // launch.block_n), 64))
    return replace(launch, num_stages=min(launch.num_stages, 2), splits=splits)


def for_coded_planes(launch: Launch, gpu: GpuTraits) -> Launch:
    """The launch of a call whose compressed planes are codes of a byte, of the one for 16 bits.

    Queries and widened planes lie in shared memory beside the codes: up to 122 KiB, as compiled for compute
    capabilities 8.9 and 12.0, which have 99. There 16 queries, and one block of keys at a time, take 86; and where
    32 would spill a kilobyte of registers, on 10.0.
    """
    roomy = gpu.shared_bytes >= 128 << 10 and not gpu.has_tensor_memory
    return launch if roomy else replace(launch, block_m=16, num_stages=1)


_TUNED = ("block_m", "block_n", "splits", "num_warps", "num_stages")


def entry_of(launch: Launch) -> dict[str, int]:
    """What the table keeps of a launch."""
    fields = asdict(launch)
    return {name: fields[name] for name in _TUNED}


_CHOSEN = 4096
"""Keys of a row up to which 33 to 64 heads take 32 at a time, and more parts. Where each key was chosen, registers do
not suffice to look up more at once; and attention to all of so few has to be cut alike."""


def launch_by_formula(call: CallShape, gpu: GpuTraits) -> Launch:
    """Enough programs to fill the GPU, cut no finer than parts are worth; measured by benchmarks/attention.py."""
    width = call.n * call.group
    lanes = max(16, power_of_two(width))
    fitting = 2  # programs on a multiprocessor
    worth = 0  # parts that are worth their merge in any case
    # Planes are keys and values. In tensor memory's way of products they lie in shared memory twice: up to 345 KiB.
    by_groups = gpu.by_warp_groups and not gpu.has_tensor_memory
    if call.head_dim > 512 and call.element_bytes == 2 and by_groups:
        block_m, block_n, warps, stages = max(16, lanes // 2), 64, 4, 2
        if lanes >= 64:  # by warp groups, each plane once
            block_m, warps, fitting = 64, 8, 1
        if lanes == 64 and call.max_kv_len <= _CHOSEN:
            block_n, stages, worth = 32, 3, 16
    elif call.head_dim > 256:  # Gemma 4's and compressed attention's: what fits in shared memory and registers
        block_m, block_n, warps, stages = (16, 16, 8, 1) if call.element_bytes > 2 else (min(lanes, 32), 32, 8, 2)
    elif call.element_bytes > 2:  # float32 without tensor cores: what fits in registers
        block_m, block_n, warps, stages = min(lanes, 32), 16, 8, 2
    elif call.head_dim > 128:
        block_m, block_n, warps, stages = min(lanes, 64), 32, 4, 2
    else:
        block_m, block_n, warps, stages = min(lanes, 64), 64, 4, 3
    if block_m == 64 and not gpu.by_warp_groups:  # what fits in registers where operands lie there too
        warps = 8
    programs = call.rows * call.kv_heads * -(-width // block_m)
    splits = fitting * gpu.num_sms // programs
    # Parts cost what they write and merge: few of short ranges, more of long ones, or where SMs would stand idle.
    blocks = -(-call.max_kv_len // block_n)
    few = max(worth, 512 // block_m, blocks // 8, gpu.num_sms // (2 * programs))
    splits = max(1, min(splits, few, blocks, 64))
    return Launch(block_m, block_n, splits, warps, stages, gpu.can_overlap)
