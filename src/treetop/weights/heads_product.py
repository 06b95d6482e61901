"""Products with a matrix of each head's own: what absorbs the keys and values of compressed attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from treetop.exact.fixed_point import FixedPointMatrices
from treetop.kernels.exact import BatchInvariantCall, least_rows
from treetop.kernels.gemm.heads_rows import heads_rows
from treetop.kernels.table import Ops


class HeadsProduct:
    """x [rows, n, heads, in] times a matrix of each head's own, [heads, in, out]. A `Product`.

    Where bits may not depend on the batch, a row has the same in any company: by one call for any number of rows on a
    CPU, by a kernel that cuts no sum on a GPU.
    """

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self._weight, self.numbers = weight, weight.numel()
        self._exact: BatchInvariantCall | None = None
        self._multiplied: Callable[[Tensor], Tensor] = lambda x: torch.bmm(x, weight)
        products, gpu = ops.profile.products, ops.gpu_for(Ops.heads_rows)
        self._gpu = gpu if products == "probed" else None
        if products == "one call":
            whole = not ops.profile.integers.products
            least = least_rows(self._of_flat, weight.shape[0] * weight.shape[1]) if whole else None
            if least is None:
                self._multiplied = FixedPointMatrices(weight)
            self._exact = BatchInvariantCall(self._of_flat, least or 1)

    def read_bytes(self, rows: int) -> int:
        return self.numbers * self._weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, n, heads, out]."""
        if self._exact is not None:
            flat = self._exact(x.flatten(2))
            return flat.view(*x.shape[:3], -1)
        out: Tensor = self._of_rows(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return out

    def _of_rows(self, x: Tensor) -> Tensor:
        """x: [rows, heads, in]. Returns [rows, heads, out]."""
        if self._gpu is not None:
            return heads_rows(x, self._weight, self._gpu)
        return self._multiplied(x.transpose(0, 1)).transpose(0, 1)

    def _of_flat(self, x: Tensor) -> Tensor:
        """x: [..., heads * in]. Returns [..., heads * out]."""
        rows = x.reshape(-1, *self._weight.shape[:2])
        return self._of_rows(rows).reshape(*x.shape[:-1], -1)
