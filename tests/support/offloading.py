"""Engines on a CPU with the tier of K/V on the host, which users get on a GPU alone."""

from contextlib import contextmanager
from unittest.mock import patch

from support.engines import build

GIB = 2**30


@contextmanager
def on_a_cpu(least_tokens=16):
    """What is made inside may have a tier on a CPU. least_tokens: that a load brings at least."""
    with (
        patch("treetop.engine.startup.host_layout.refuse_cpu", lambda size, device: None),
        patch("treetop.cache.host_tier.LEAST_TOKENS", least_tokens),
        patch("treetop.engine.startup.host_layout.COPIED_BYTES", 2**14),
    ):
        yield


def with_tier(pair, shape=(3, 3, 8), mib=4, **options):
    return build(pair, shape, kv_offloading_size=mib / 1024, **options)
