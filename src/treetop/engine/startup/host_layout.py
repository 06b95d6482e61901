"""How many pages the tier on the host has: as many times the device's as its bytes are the device's."""

from dataclasses import replace

import torch

from treetop.engine.memory import GIB, gib, memory_of, pool_bytes
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.layout import Layout

COPIED_BYTES = 2**26
"""That one step copies to the host or back: more than a millisecond of a PCIe link, little beside a round."""


def check_host_tier(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError or CapacityError where `--kv-offloading-size` cannot be honoured."""
    if config.kv_offloading_size is None:
        return
    refuse_cpu(config.kv_offloading_size, device)
    check_host_memory(config)


def check_host_memory(config: EngineConfig, num_replicas: int = 1) -> None:
    """Raise CapacityError where the tiers of so many engines do not fit this machine. None of them has taken any."""
    if config.kv_offloading_size is None:
        return
    memory, engines = memory_of(torch.device("cpu")), config.ep_size * num_replicas
    need = int(config.kv_offloading_size * GIB) * engines
    if need > memory.free:
        each = f" = {engines} engines x {config.kv_offloading_size:g} GiB" if engines > 1 else ""
        raise CapacityError(
            f"--kv-offloading-size {config.kv_offloading_size:g}: need {gib(need)} of host memory{each}, have"
            f" {gib(memory.free)} free of {gib(memory.total)}, limits of a control group counted; lower it"
        )


def refuse_cpu(size: float, device: torch.device) -> None:
    """On a CPU pools lie in the memory that the tier would take."""
    if device.type == "cpu":
        raise ConfigError(
            f"--kv-offloading-size {size:g}: K/V lie in host memory on a CPU; leave it out, and raise"
            " --max-total-tokens or --mem-fraction-static"
        )


def with_copied(config: EngineConfig, layout: Layout, element_size: int) -> Layout:
    """The layout with what one step copies, before its pools are sized."""
    if config.kv_offloading_size is None:
        return layout
    return replace(layout, copied_pages=_copied_pages(layout, element_size))


def with_host(config: EngineConfig, layout: Layout, element_size: int) -> Layout:
    """The layout with pages on the host. element_size: of a number of the engine's dtype.

    Raises CapacityError for memory that holds no page of a group.
    """
    if config.kv_offloading_size is None:
        return layout
    if config.kv_offloading_folder is not None and (layout.state_groups or any(g.window for g in layout.groups)):
        raise ConfigError(
            "--kv-offloading-folder: this model has windows or recurrent layers, of which the disk keeps nothing; leave"
            " it out"
        )
    have = int(config.kv_offloading_size * GIB) // config.tp_size
    layout = replace(with_copied(config, layout, element_size), host=None)
    times = have / host_bytes(layout, element_size)
    host = _scaled(layout, times)
    while host_bytes(host, element_size) > have and times > 0:  # null pages, and what was rounded up
        times -= (host_bytes(host, element_size) - have) / host_bytes(layout, element_size) + 1e-6
        host = _scaled(layout, max(times, 0.0))
    lacks = min(host.num_pages.values()) < 2 or (layout.checkpoints and not host.checkpoints)
    if lacks or host_bytes(host, element_size) > have:
        least = sum(2 * size for size in layout.page_bytes(element_size).values()) * config.tp_size
        raise CapacityError(
            f"--kv-offloading-size {config.kv_offloading_size:g}: it holds no page of every group; need more than"
            f" {gib(least)}"
        )
    return replace(layout, host=host)


def host_bytes(layout: Layout, element_size: int) -> int:
    """Bytes of all pages and checkpoints of a layout."""
    states = sum(group.row_bytes(element_size) for group in layout.state_groups)
    return pool_bytes(layout, element_size) + layout.checkpoints * states


def staging_bytes(config: EngineConfig, layout: Layout, element_size: int) -> int:
    """Bytes of the device that copies pass through, of two plans in turn."""
    if config.kv_offloading_size is None:
        return 0
    layout = with_copied(config, layout, element_size)
    return 2 * sum(layout.copied(name) * size for name, size in layout.page_bytes(element_size).items())


def _copied_pages(layout: Layout, element_size: int) -> int:
    page = sum(layout.page_size * group.bytes_per_token(element_size) for group in layout.groups)
    return max(COPIED_BYTES // page, 1)


def _scaled(layout: Layout, times: float) -> Layout:
    tokens, rows, checkpoints = (int(n * times) for n in (layout.pool_tokens, layout.max_requests, layout.checkpoints))
    return replace(layout, pool_tokens=tokens, max_requests=max(rows, 1), checkpoints=checkpoints)
