"""The mixer of a layer, by its spec: the one place that makes it, and the one that lists its tensors."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param
from treetop.kernels.table import Ops
from treetop.models.config import AbsentSpec, BothSpec, LinearSpec, Mixer
from treetop.models.latent_attention import LatentAttention, latent_params
from treetop.models.layers import Rotary, SelfAttention, self_attention_params
from treetop.models.linear_attention import LinearAttention, linear_params
from treetop.models.mixers.both import BothMixer, both_params
from treetop.models.mixers.kimi_delta import KimiDelta, kimi_params
from treetop.models.mixers.lightning import Lightning, lightning_params
from treetop.models.mixers.mamba2 import Mamba2, mamba_params
from treetop.models.mixers.recurrences import ConvSpec, KimiSpec, LightningSpec, MambaSpec
from treetop.models.mixers.short_convolution import ShortConvolution, conv_params
from treetop.models.target import LastTokens
from treetop.types.parallel import Summed, taken
from treetop.weights.format import Product
from treetop.weights.held import Weights


class Attention(Protocol):
    """products: what it takes with weights, see `Target`."""

    @property
    def products(self) -> Sequence[Product]: ...

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], whose sum it is."""


def attention(spec: Mixer, weights: Weights, name: str, layer: int, eps: float, ops: Ops) -> Attention:
    """name: of its parameters. layer: its index among the model's. eps: of the norms of heads."""
    if isinstance(spec, LinearSpec):
        return LinearAttention(spec, weights, name, layer, eps, ops)
    if isinstance(spec, ConvSpec):
        return ShortConvolution(weights, name, layer, ops)
    if isinstance(spec, KimiSpec):
        return KimiDelta(spec, weights, name, layer, eps, ops)
    if isinstance(spec, LightningSpec):
        return Lightning(spec, weights, name, layer, ops)
    if isinstance(spec, MambaSpec):
        return Mamba2(spec, weights, name, layer, ops)
    if isinstance(spec, BothSpec):
        return BothMixer(spec, weights, name, layer, eps, ops)
    assert not isinstance(spec, AbsentSpec)
    if spec.latent is not None:
        return LatentAttention(spec, spec.latent, weights, name, layer, ops)
    return SelfAttention(spec, weights, name, layer, eps, ops)


def mixed(mixer: Attention, x: Tensor, rotary: Rotary, attend: Attend, last: LastTokens | None) -> Summed:
    """What a mixer gives of x [rows, n, in]: [parts, rows, n, hidden], or [parts, lines, 1, hidden] of `last`."""
    if last is None:
        return mixer(x, rotary, attend)
    if isinstance(mixer, SelfAttention):
        return mixer(x, rotary, attend, last)
    return last.of_parts(taken(mixer(x, rotary, attend)))


def attention_params(
    spec: Mixer, name: str, stored: str, width: int, hidden: int, unit_offset: bool = False
) -> list[Param]:
    """Of attention whose input is `width` wide. stored: the prefix of its tensors. Ranks have whole heads.

    Heads of queries and keys are read in the order that the rotation wants. unit_offset: of norms, see `ModelConfig`.
    """
    if isinstance(spec, AbsentSpec):
        return []
    if isinstance(spec, LinearSpec):
        return linear_params(spec, name, stored, hidden)
    if isinstance(spec, ConvSpec):
        return conv_params(spec, name, stored, hidden)
    if isinstance(spec, KimiSpec):
        return kimi_params(spec, name, stored, hidden)
    if isinstance(spec, LightningSpec):
        return lightning_params(spec, name, stored, hidden)
    if isinstance(spec, MambaSpec):
        return mamba_params(spec, name, stored, hidden)
    if isinstance(spec, BothSpec):
        return both_params(spec, name, stored, width, hidden)
    if spec.latent is not None:
        return latent_params(spec, spec.latent, name, stored, width, hidden)
    return self_attention_params(spec, name, stored, width, hidden, unit_offset)
