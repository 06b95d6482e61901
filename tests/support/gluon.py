"""A kernel in Gluon, small enough to be compiled in a moment."""

from treetop.kernels.gluon_guard import gl, gluon_jit
from treetop.kernels.triton_guard import Arg


@gluon_jit
def store_one(out: Arg):
    gl.store(out + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])), 1)
