"""A probe of bits: operations of rows, each with most rows and with some of them, in other places of the batch.

What a probe compares are bits, on numbers of widely different size, so that another order of a sum shows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.types.cache_files import cache_file, keep

_LARGEST = 1e3
"""Of a case's numbers."""
_ROWS = 24
"""That are tried with each count, at least: one row's few large terms may hide the order in which it is summed."""


@dataclass(frozen=True, slots=True)
class RowCase:
    """An operation of rows x [rows, width] and their numbers [rows], which say where a row stands and how it samples.

    Returns tensors [rows, ...]. most: rows that are tried at most. last_are_zero: how many of them must be 0.
    """

    name: str
    width: int
    call: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    most: int = 1 << 40
    last_are_zero: int = 0


def of_rows(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The call of a case whose operation has one result and knows no numbers."""
    return lambda x, _: (operation(x),)


@dataclass(frozen=True, slots=True)
class BitProbe:
    """Cases, and the row counts at which they are tried.

    cases: made as they are needed, by the generator given, which is seeded with `seed`. counts: of rows, ascending.
    most: rows among which a row's bits are compared.
    """

    cases: Callable[[torch.Generator], Iterable[RowCase]]
    counts: tuple[int, ...]
    most: int
    seed: int
    dtype: torch.dtype
    device: torch.device

    def run(self) -> Iterator[tuple[str, list[int]]]:
        """Each case, and the row counts at which the bits of a row are not those among most rows."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for case in self.cases(generator):
            rows = min(self.most, case.most)
            x = adversarial((rows, case.width), generator).clamp_(-_LARGEST, _LARGEST).to(self.dtype)
            number = torch.arange(rows, device=self.device)
            want = case.call(x, number)
            counts = (*(count for count in self.counts if count < rows), rows)
            yield case.name, list(differing(case.call, (x, number), counts, generator, want))
            if case.last_are_zero:
                same = not any(bool(each.any()) for each in want[len(want) - case.last_are_zero :])
                yield f"{case.name}, prefilled as in a round", [] if same else [rows]

    def problem(self) -> str | None:
        """The first case whose bits depend on the batch, and at how many rows; None if there is none."""
        return next((f"{name} of {counts[0]} rows" for name, counts in self.run() if counts), None)

    def kept_problem(self, name: str, identity: str) -> str | None:
        """The same, but that an earlier run is believed if it found nothing.

        name: of the folder where that is kept. identity: a hash of all that bits depend on.
        """
        file = cache_file(name, identity)
        if file.is_file():
            return None
        problem = self.problem()
        if problem is None:
            keep(file, "{}")
        return problem


def differing(
    call: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: tuple[Tensor, ...],
    counts: Iterable[int],
    generator: torch.Generator,
    want: Tensor | tuple[Tensor, ...] | None = None,
) -> Iterator[int]:
    """The row counts at which some row has other bits than among all rows.

    call: of tensors [rows, ...], one or several results [rows, ...]. inputs: of all rows. generator: where they lie; it
    chooses rows and their places. want: results of all rows; None is what `call` gives.
    """
    wanted = _several(call(*inputs) if want is None else want)

    def differs(count: int) -> bool:
        at = torch.randperm(len(inputs[0]), generator=generator, device=generator.device)[:count]
        got = _several(call(*(each[at] for each in inputs)))
        return not all(same_bits(one, other[at]) for one, other in zip(got, wanted, strict=True))

    for count in counts:
        if any(differs(count) for _ in range(-(-_ROWS // count))):
            yield count


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors of one shape and dtype are equal bit for bit, but that any NaN is one.

    A product past the dtype's range times a gate's 0 is such.
    """
    if not one.is_floating_point():
        return torch.equal(one, other)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    differs = one.contiguous().view(word) != other.contiguous().view(word)
    return not bool(differs.any()) or not bool((differs & ~(one.isnan() & other.isnan())).any())


def adversarial(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Float32 numbers of widely different size; in some rows zeros, equal numbers and pairs that cancel.

    They lie where the generator does.
    """
    device = generator.device
    size = torch.exp2(torch.randint(-12, 13, shape, generator=generator, device=device).float())
    x = torch.randn(shape, generator=generator, device=device) * size
    rows = x.flatten(0, -2)
    rows[5::16] = 0.0
    rows[6::16] = rows[6::16, :1]
    half = shape[-1] // 2
    rows[7::16, half : 2 * half] = -rows[7::16, :half]
    return x
