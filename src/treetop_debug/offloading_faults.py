"""Faults of the tier of K/V on the host, put back by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treetop.cache.kv_cache_manager import KVCacheManager
from treetop.distributed.kv_events import GPU
from treetop.types.ids import is_draft
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead


def _without_drafts(real: Callable[..., bool]) -> Callable[..., bool]:
    """The target's pages alone go there and come back."""

    def grow(tier: Any, job: Any) -> bool:
        grown = real(tier, job)
        kept = [each for each in job.rest if not is_draft(each.group)]
        job.rest.clear()
        job.rest.extend(kept)
        return grown

    return grow


def _without_salt(real: Callable[..., Any]) -> Callable[..., Any]:
    """The host is asked for anybody's pages."""

    def opened(side: KVCacheManager, wanted: Any) -> Any:
        on_host = wanted.request_id is not None and not hasattr(opened, "last")
        if on_host:  # of a load the host is asked first
            opened.last = True  # type: ignore[attr-defined]
            return real(side, wanted._replace(salt=""))
        if wanted.request_id is not None:
            del opened.last  # type: ignore[attr-defined]
        return real(side, wanted)

    return opened


def _of_anybody(real: Callable[..., int]) -> Callable[..., int]:
    return lambda side, ids, salt="", drafts=True: real(side, ids, "", drafts)


def _at_once(*_: object) -> None:
    """Whoever reads waits for no copy."""


def _on_the_gpu_alone(real: Callable[..., None]) -> Callable[..., None]:
    def removed(watcher: Any, serial: int) -> None:
        if watcher._medium == GPU:
            real(watcher, serial)

    return removed


def _no_difference(sums: Tensor, kept: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=sums.device)


OFFLOADING_FAULTS = by_name(
    Fault(
        "host-page-without-draft",
        "a page goes to the host without its draft's, so that a hit costs the acceptance (sglang 31600)",
        (Patch("treetop.cache.host_tier:HostTier._grow", _without_drafts),),
        "but not their pages",
        1,
    ),
    Fault(
        "host-page-of-another-salt",
        "a page of another salt is loaded for a request",
        (
            Patch("treetop.cache.host_tier:open_lease", _without_salt),
            Patch("treetop.cache.kv_cache_manager:KVCacheManager.num_known", _of_anybody),
        ),
        "were copied for salt",
        1,
    ),
    Fault(
        "host-checksum-unchecked",
        "what comes from the host is taken as it is",
        (instead("treetop.engine.offloading.host_pages:differing", _no_difference),),
        "wrong tokens",
        None,
    ),
    Fault(
        "host-page-read-too-early",
        "a page is put together before its copy has ended",
        (instead("treetop.engine.offloading.host_pages:HostPageCopies._wait", _at_once),),
        "are damaged",
        None,
    ),
    Fault(
        "host-page-told-as-stored",
        "routers are not told that a page on the host is gone",
        (Patch("treetop.distributed.kv_events:MediumWatcher.removed", _on_the_gpu_alone),),
        "events of the host",
        None,
    ),
)
