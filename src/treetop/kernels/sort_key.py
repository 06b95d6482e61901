"""One integer a value and its place, so that the largest key is the first of the largest values.

A float32 orders like its bits once negative numbers have their magnitude bits flipped; NaN is put above everything, as
`torch.sort` has it, and the two zeros are made one. The lower half of the key is the index counted down. Keys are
distinct, so a selection by them is stable whatever the order of comparing, and -inf is a value like any other.
"""

from treetop.kernels.triton_guard import Arg, jit, tl


@jit
def ordered_of(value: Arg) -> Arg:
    """A float32 as an int32 that orders like it; none is the smallest int32."""
    bits = tl.where(value == 0.0, 0, value.to(tl.int32, bitcast=True))
    bits = tl.where(value != value, 0x7FC00000, bits)  # noqa: PLR0124 (NaN)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def key_of(value: Arg, index: Arg) -> Arg:
    """value: [n] float32. index: [n] int32 >= 0. Returns [n] int64, all above `-0x7FFFFFFFFFFFFFFF`."""
    return (ordered_of(value).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def index_of(key: Arg) -> Arg:
    """The index in a key, int32."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@jit
def value_of(key: Arg) -> Arg:
    """The value in a key, float32."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
