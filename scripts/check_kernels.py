"""Compiles the launches of the kernels for a card that is not here, and refuses what is known to be slow or not to run.

    make check-kernels                                        in an environment of its own
    python scripts/check_kernels.py --only fp8 --show

Needs Triton 3.6.0, whose wheel brings the assembler; no GPU. For sm_90 it refuses products on tensor cores that are
waited for one by one while nothing else works, registers that loops spill, shared memory beyond the card's, and main
loops of more instructions than `check_kernels.json` allows. The same file lists what is known to fail, with the reason:
a new failure is an error, and so is a listed launch that passes. Other cards are compiled for by `--cards`, with lists
of their own: their loops are not counted. How to read a failure: docs/testing.md.

What was found is kept in `build/check_kernels/` by the hash of all that it depends on, so a second run is quick. Exit
code 1 for a failure, 2 for an option or an environment that cannot work.
"""

import argparse
import contextlib
import hashlib
import inspect
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kernel_launches import CARDS, Card, Case, cases

from treetop.kernels.triton_guard import TRITON_VERSION, interpreted
from treetop.types.errors import UserError

if TRITON_VERSION is not None:
    import triton
    from triton.backends.compiler import GPUTarget

VERSION = "3.6.0"
TABLE = Path(__file__).with_suffix(".json")
KEPT = Path(__file__).parent.parent / "build" / "check_kernels"
TUNED = "sm_90"
"""The card that the tables were measured on, whose loops are counted."""

# -------------------------------------------------------------------------------------------------- what was compiled


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a launch became.

    error: why it did not compile, else "".
    shared: bytes of shared memory of a program. registers: of a thread. spilled: bytes, stored and loaded.
    inner_spills, outer_spills: instructions that store or load a spilled register, of a thousand, at most: in a loop
        without another inside; in a loop around others, or in all.
    serialized: products on tensor cores are waited for one by one.
    loop: instructions of the main loop, 0 without one.
    multiplying: cycles for which tensor cores work on a warp group's products of a turn of the main loop.
    copied: bytes that a program's threads copy ahead in a turn of the main loop; bulk copies do not count.
    warps: of a program. programs: of the launch. reads_alone: what one copies no other reads.
    """

    error: str = ""
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    inner_spills: int = 0
    outer_spills: int = 0
    serialized: bool = False
    loop: int = 0
    multiplying: int = 0
    copied: int = 0
    warps: int = 4
    programs: int = 0
    reads_alone: bool = False

    def together(self, card: Card) -> int:
        """Programs on the busiest multiprocessor: as many as registers, shared memory and warps have room for."""
        of_registers = _REGISTERS // (-(-max(self.registers, 1) // 8) * 8 * 32 * self.warps)
        of_memory = (card.gpu.shared_bytes + _OF_SYSTEM) // (self.shared + _OF_SYSTEM)
        return min(of_registers, of_memory, _WARPS // self.warps, -(-self.programs // card.gpu.num_sms))

    def stands_still(self, card: Card) -> bool:
        """Whether a multiprocessor stands still while products are waited for one by one.

        A program that waits takes i + t cycles a turn of its main loop: i to issue the turn's instructions, one a cycle
        in each quarter of the multiprocessor, and t for its products. p programs together take p * max(i, t) at least
        for a turn of each, waiting or not, for they share what issues and what multiplies. So nothing is lost where
        that is not less than i + t: the others fill the time.

        Nor is anything lost where a turn's bytes come from memory and take longer than i + t, for all programs share
        what memory gives. Seen on an H200 (benchmarks/log.md): of 128 programs, one a multiprocessor, that attend to
        keys of their own those that wait for products of 128 keys take 150 us, and as many that wait for no product, of
        64 keys, with as many bytes on their way, 171. (Twice as many take 137 of 131,072 keys and lose below 16,384.)
        """
        in_quarters, together = self.warps / _QUARTERS, self.together(card)
        i, t = self.loop * in_quarters, self.multiplying * in_quarters
        copies = self.copied * min(self.programs, together * card.gpu.num_sms) / _MEMORY if self.reads_alone else 0.0
        return i + t > max(together * max(i, t), copies)


_REGISTERS, _OF_SYSTEM, _WARPS, _QUARTERS = 1 << 16, 1 << 10, 64, 4
"""Of a multiprocessor: registers; bytes of shared memory that are kept for each program; warps; schedulers, each of
which issues an instruction a cycle. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""
_MEMORY = 4.8e12 / 1.755e9
"""Bytes a cycle that an H200's memory gives at most: more than an H100's. Source: NVIDIA's papers."""


def read_log(log: str) -> dict[str, Any]:
    """What `ptxas -v` says: registers, spilled bytes, and whether wgmma is serialized (C7510 and its like)."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "serialized": re.search(r"wgmma\S* instructions are serialized", log) is not None,
    }


_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;")
_LABEL = re.compile(r"\s*(\.L_?\w+):")
_BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_?\w+)\)")
_PRODUCT = re.compile(r"\b(?:[HQI]G?MMA|UTC\w*MMA)\b")
_BY_WARP_GROUP = re.compile(r"\b[HQI]GMMA\.64x(\d+)x\d+")
_COPY = re.compile(r"\bLDGSTS(?:\.[A-Z]\w*)*(?:\.(\d+))?")
_AHEAD = re.compile(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b")


_SPILL = re.compile(r"\b(?:STL|LDL)\b")


@dataclass(frozen=True, slots=True)
class Code:
    """What `nvdisasm -c` prints of a kernel. code: its instructions. loops: the first and the last of each loop."""

    code: Sequence[str]
    loops: Sequence[tuple[int, int]]

    @classmethod
    def read(cls, listing: str) -> "Code":
        code: list[str] = []
        labels: dict[str, int] = {}
        loops = []
        for line in listing.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(code)
            elif instruction := _INSTRUCTION.match(line):
                back = _BRANCH.search(instruction[1])
                if back and back[1] in labels:
                    loops.append((labels[back[1]], len(code)))
                code.append(instruction[1])
        return cls(code, loops)

    def is_inner(self, loop: tuple[int, int]) -> bool:
        """Whether it has no other inside."""
        first, last = loop
        return not any(first <= a and b <= last for a, b in self.loops if (a, b) != loop)

    def count(self, pattern: re.Pattern[str], part: tuple[int, int]) -> int:
        """Instructions of a part with the pattern."""
        return sum(map(bool, map(pattern.search, self.code[part[0] : part[1] + 1])))

    def main_loop(self) -> tuple[int, int]:
        """`Compiled.loop` and `multiplying`, 0 without such a loop.

        It is, of the loops without another inside and with a product on tensor cores, the one that copies most ahead;
        of several the longest. A product of a warp group, 64 lines by n columns by 32 bytes, takes tensor cores n / 2
        cycles (NVIDIA's H100 paper: 4,096 operations in 16 bits a cycle and multiprocessor).
        """
        loop = self._main()
        products = map(_BY_WARP_GROUP.search, loop)
        return len(loop), sum(int(product[1]) // 2 for product in products if product)

    def copied(self) -> int:
        """Bytes that a thread copies ahead in a turn of the main loop."""
        copies = map(_COPY.search, self._main())
        return sum(int(copy[1] or 32) // 8 for copy in copies if copy)

    def _main(self) -> Sequence[str]:
        loops = [loop for loop in self.loops if self.is_inner(loop) and self.count(_PRODUCT, loop)]
        found = [(self.count(_AHEAD, (first, last)), last + 1 - first, first) for first, last in loops]
        _, length, first = max(found, default=(0, 0, 0))
        return self.code[first : first + length]

    def spills(self) -> tuple[int, int]:
        """`Compiled.inner_spills` and `outer_spills`."""
        inner = [loop for loop in self.loops if self.is_inner(loop)]
        outer = [loop for loop in self.loops if not self.is_inner(loop)]
        return self._most_spills(inner), self._most_spills([*outer, (0, len(self.code) - 1)])

    def _most_spills(self, parts: Sequence[tuple[int, int]]) -> int:
        shares = (-(-1000 * self.count(_SPILL, (first, last)) // max(last + 1 - first, 1)) for first, last in parts)
        return max(shares, default=0)


# -------------------------------------------------------------------------------------------------------- the verdict


INNER_SPILLS, OUTER_SPILLS = 10, 50
"""Of a thousand instructions, those that may store or load a spilled register: in a loop without another inside, and in
what surrounds such loops.

What the assembler puts aside before a loop and takes up after it costs a program some dozens of cycles once, of ten
thousand and more, for it lies in the first cache. A loop over keys or over columns pays at every turn: one instruction
in a hundred is less than two measurements differ by. Loops inside run several times for each turn of the one around.
"""


def faults_of(made: Compiled, card: Card, budget: int | None) -> list[str]:
    """What is wrong with it: of "compile", "shared memory", "spills", "serialized", "loop" and "no budget"."""
    if made.error:
        return ["compile"]
    tuned = card.name == TUNED
    wrong = {
        "shared memory": made.shared > card.gpu.shared_bytes,
        "spills": made.inner_spills > INNER_SPILLS or made.outer_spills > OUTER_SPILLS,
        "serialized": made.serialized and made.stands_still(card),
        "no budget": tuned and made.loop > 0 and budget is None,
        "loop": tuned and budget is not None and made.loop > budget,
    }
    return [what for what, so in wrong.items() if so]


@dataclass(frozen=True, slots=True)
class Table:
    """`check_kernels.json`. budgets: launch -> instructions of its main loop on sm_90, at most.

    known: (card, launch, what) -> the reason why it still fails.
    """

    budgets: Mapping[str, int]
    known: Mapping[tuple[str, str, str], str]

    @classmethod
    def read(cls, path: Path) -> "Table":
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {
            (card, launch, group["what"]): group["why"]
            for group in data["known"]
            for card, launches in group["launches"].items()
            for launch in launches
        }
        return cls(data["budgets"], known)


def verdict(found: Mapping[tuple[str, str], Compiled], table: Table, whole: bool) -> list[str]:
    """A line for each new failure and for each known one that is none. found: by card and launch.

    whole: all launches of these cards are there, so what is listed and not among them is gone.
    """
    lines = []
    for (card, launch), made in found.items():
        budget = table.budgets.get(launch)
        faults = faults_of(made, CARDS[card], budget)
        for what in faults:
            if (card, launch, what) not in table.known:
                lines.append(f"{card}: {launch}: {what}: {told(made, what, CARDS[card], budget)}")
        lines += [
            f"{card}: {launch}: {what}: it passes now; take it off the list in {TABLE.name}"
            for known_card, known_launch, what in table.known
            if (known_card, known_launch) == (card, launch) and what not in faults
        ]
    if whole:
        cards = {card for card, _ in found}
        gone = {(card, launch) for card, launch, _ in table.known if card in cards} - set(found)
        if TUNED in cards:
            gone |= {(TUNED, launch) for launch in table.budgets} - set(found)
        lines += [
            f"{card}: {launch}: no launch is called so; take it out of {TABLE.name}" for card, launch in sorted(gone)
        ]
    return lines


def told(made: Compiled, what: str, card: Card, budget: int | None) -> str:
    """A fault with its numbers."""
    return {
        "compile": made.error,
        "shared memory": f"{made.shared} bytes, the card has {card.gpu.shared_bytes}",
        "spills": f"{made.spilled} bytes, {made.registers} registers; of a thousand instructions of a loop "
        f"{made.inner_spills}, around loops {made.outer_spills}",
        "serialized": f"wgmma waited for one by one, {made.together(card)} programs on a multiprocessor",
        "no budget": f"its main loop has {made.loop} instructions; write that to {TABLE.name}",
        "loop": f"its main loop has {made.loop} instructions, the budget is {budget}",
    }[what]


# --------------------------------------------------------------------------------------------------------- compiling


@dataclass(frozen=True, slots=True)
class Asked:
    """A kernel that a launch asks for: Triton's source, target and options. programs: of the launch; alone: none of
    them reads what another one reads.
    """

    source: Any
    target: Any
    options: Any
    programs: int
    alone: bool = False

    @property
    def kernel(self) -> str:
        return str(self.source.name).strip("_").removesuffix("_kernel").replace("_", " ")

    @property
    def key(self) -> str:
        """A hash of all that `compile_one` makes of it depends on."""
        parts = (self.source.hash(), self.target, self.options.hash(), TRITON_VERSION, *_MADE_BY)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class AbsentGpu:
    """Triton's driver for a GPU that is not here: it can be compiled for. A device is numbered by its capability."""

    def __init__(self, capability: int) -> None:
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)


def asked_by(launch: Callable[[], object], capability: int) -> list[Asked]:
    """The kernels that a launch asks for on a card of so much compute capability, in order; nothing is launched."""
    found, programs, alone = list[Asked](), 0, False
    launch_one = triton.JITFunction.run

    def run(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        nonlocal programs, alone
        programs = prod(grid)
        splits = dict(zip(kernel.arg_names, args, strict=False)).get("splits")
        attends = kernel.fn.__name__ == "_attention_kernel"
        alone = attends and grid[1] == splits and grid[2] == 1  # all queries of the only row are one block
        return launch_one(kernel, *args, grid=grid, warmup=warmup, **options)

    def ask(  # in the place of what compiles
        kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        found.append(Asked(source, GPUTarget("cuda", capability, 32), options, programs, alone))

    absent = patch.object(triton.runtime.driver, "_active", AbsentGpu(capability))
    with patch.object(triton.JITFunction, "run", run), patch.object(triton.JITFunction, "_do_compile", ask), absent:
        launch()
    return found


UNTUNED = ("merge", "plan", "place")
"""Kernels that launches bring along, whose warps no table says."""


def named(card: Card, some: Iterable[Case]) -> list[tuple[str, Asked]]:
    """The kernels of a card's launches, each once, under the name of the first launch that asks for it.

    Its programs are those of the launch that has the fewest.
    """
    found: dict[str, tuple[str, Asked]] = {}
    for name, launch in some:
        asked = [each for each in asked_by(launch, card.capability) if each.kernel not in UNTUNED]
        for number, each in enumerate(asked):
            before = sum(other.kernel == each.kernel for other in asked[:number])
            part = f"{each.kernel} {before + 1}" if before else each.kernel
            first, least = found.get(each.key, (name if len(asked) == 1 else f"{name}: {part}", each))
            found[each.key] = first, min(least, each, key=lambda one: one.programs)
    return [*found.values()]


def compile_one(asked: Asked) -> Compiled:
    """Compile, assemble and disassemble."""
    log = io.StringIO()
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        try:
            with contextlib.redirect_stdout(log):
                made = triton.compile(asked.source, target=asked.target, options=asked.options.__dict__)
        except Exception as error:  # of any pass of Triton's, and of the assembler
            return Compiled(error=f"{type(error).__name__}: {str(error).strip()[:200]}")
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        command = [disassembler(), "-c", str(binary)]
        code = Code.read(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    inner, outer = code.spills()
    tuned = asked.target.arch == CARDS[TUNED].capability
    loop, multiplying = code.main_loop() if tuned else (0, 0)
    threads = int(re.findall(r"\.reqntid (\d+)", made.asm["ptx"])[0])
    return Compiled(
        shared=made.metadata.shared,
        loop=loop,
        multiplying=multiplying,
        copied=code.copied() * threads if tuned else 0,
        warps=threads // 32,
        inner_spills=inner,
        outer_spills=outer,
        **read_log(log.getvalue()),
    )


@cache
def disassembler() -> str:
    """The path of Triton's `nvdisasm`."""
    return str(triton.knobs.nvidia.nvdisasm.path)


_MAKERS: tuple[Any, ...] = (Compiled, read_log, Code, compile_one)
_MADE_BY = "".join(map(inspect.getsource, _MAKERS)), (_INSTRUCTION, _LABEL, _BRANCH, _PRODUCT, _AHEAD, _COPY, _SPILL)


def compile_all(wanted: Sequence[Asked], jobs: int) -> Iterator[Compiled]:
    """In the order of `wanted`; what is kept is not compiled again."""
    KEPT.mkdir(parents=True, exist_ok=True)
    _wanted[:] = wanted
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_compile_or_read, range(len(wanted)))


_wanted: list[Asked] = []
"""Of `compile_all`: a forked process finds them here, for they cannot be sent."""


def _compile_or_read(number: int) -> Compiled:
    file = KEPT / f"{_wanted[number].key}.json"
    if file.is_file():
        return Compiled(**json.loads(file.read_text(encoding="utf-8")))
    made = compile_one(_wanted[number])
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(made)), encoding="utf-8")
    part.replace(file)
    return made


# ------------------------------------------------------------------------------------------------------- the command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises UserError for cards and numbers that cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--cards", default=TUNED, help=f"of {', '.join(CARDS)}, separated by commas")
    parser.add_argument("--only", default="", metavar="TEXT", help="launches whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--show", action="store_true", help="print what every kernel became")
    parser.add_argument("--write-budgets", action="store_true", help="write loops without a budget, lower the others")
    args = parser.parse_args(arguments)
    args.cards = args.cards.split(",")
    if unknown := [name for name in args.cards if name not in CARDS]:
        raise UserError(f"--cards {','.join(unknown)}: choose from {', '.join(CARDS)}")
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}")
    if TRITON_VERSION != VERSION or interpreted():
        have = "its interpreter" if interpreted() else TRITON_VERSION or "none"
        raise UserError(f"Triton {VERSION} is needed, as GPU machines have it, and there is {have}: make check-kernels")
    return args


def run(args: argparse.Namespace) -> int:
    """Compile and judge. Returns the exit code."""
    table, whole = Table.read(TABLE), not args.only
    found: dict[tuple[str, str], Compiled] = {}
    for card in (CARDS[name] for name in args.cards):
        began = time.monotonic()
        launches = [(name, asked) for name, asked in named(card, cases(card)) if args.only in name]
        if not launches:
            raise UserError(f"--only {args.only}: no launch of {card.name} has this in its name")
        compiled = compile_all([asked for _, asked in launches], args.jobs)
        of_card = {
            (card.name, name): replace(made, programs=asked.programs, reads_alone=asked.alone)
            for (name, asked), made in zip(launches, compiled, strict=True)
        }
        assert len(of_card) == len(launches), "two kernels have one name"
        found |= of_card
        print(f"{card.name}: {len(of_card)} kernels, {time.monotonic() - began:.0f} s", flush=True)
        for (_, name), made in of_card.items() if args.show else ():
            print(f"  {name}: {made}")
    if args.write_budgets:
        TABLE.write_text(with_budgets(TABLE.read_text(encoding="utf-8"), found, whole), encoding="utf-8")
        table = Table.read(TABLE)
    lines = verdict(found, table, whole)
    print(*lines, sep="\n", end="\n" if lines else "")
    known = sum((card, launch) in found for card, launch, _ in table.known)
    print(
        f"{len(found)} kernels, {known} known failures, {len(lines)} to look at (docs/testing.md#kernels-without-a-gpu)"
    )
    return 1 if lines else 0


def with_budgets(text: str, found: Mapping[tuple[str, str], Compiled], whole: bool) -> str:
    """The table with a budget for each loop of `TUNED`: what it has where there was none or it had more."""
    data = json.loads(text)
    loops = {launch: made.loop for (card, launch), made in found.items() if card == TUNED and made.loop}
    old = data["budgets"]
    kept = {} if whole and loops else old
    data["budgets"] = kept | {launch: min(loop, old.get(launch, loop)) for launch, loop in loops.items()}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    try:
        return run(parse())
    except UserError as error:
        print(f"check_kernels: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
