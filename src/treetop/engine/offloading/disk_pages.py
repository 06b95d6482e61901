"""Pages on the host as the tier on disk reads and writes them, and what decides whose pages they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from treetop.cache.disk_store import DiskStore, Views
from treetop.cache.disk_tier import DiskTier, Landed, Pages
from treetop.checkpoints.fingerprint import read_files
from treetop.engine.engine import Engine
from treetop.engine.kv_names import draft_name, target_name
from treetop.engine.memory import GIB
from treetop.engine.offloading.host_pages import HostPageCopies, Mark, page_sum
from treetop.types.errors import InvariantError
from treetop.types.ids import GroupName
from treetop.version import __version__

_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "attention_backend",
    "exactness",
    "exact_sums",
    "quantize_activations",
    "dequantize_weights",
    "compress_weights",
    "ep_size",
)
"""Of a configuration: what K/V of the same tokens may depend on."""


def open_disk(engine: Engine) -> DiskTier | None:
    """The tier on disk of an engine; None without `--kv-offloading-folder`. Raises ConfigError."""
    config, copies, layout = engine.config, engine.host_pages, engine.layout.host
    if config.kv_offloading_folder is None or copies is None or layout is None:
        return None
    assert config.kv_offloading_disk_size is not None
    made_for = _made_for(engine)
    store = DiskStore(Path(config.kv_offloading_folder), int(config.kv_offloading_disk_size * GIB), made_for)
    tier = DiskTier(store, DiskPages(copies), layout, made_for)
    copies.before_release(tier.close)
    return tier


def _made_for(engine: Engine) -> str:
    """All that a page of K/V depends on beside its tokens: the bytes of any other engine are other numbers."""
    layout, device = engine.layout, engine.runner.buffers.rows.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    options = [f"{each}={getattr(engine.config, each)}" for each in _OPTIONS]
    folders = (engine.model_path, engine.draft_path)
    files = [_written(each) for each in folders if each is not None]
    parts = (__version__, torch.__version__, name, target_name(engine), draft_name(engine), *files, *options)
    return "\n".join((*parts, *(repr(group) for group in layout.groups)))


def _written(folder: Path) -> str:
    """When a checkpoint's files were: what a fingerprint reads of them may be the same where little has changed."""
    return repr([(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in read_files(folder)])


class _Landed:
    """sums: [columns] int64 of each group, pinned, once `ready`."""

    def __init__(self, copies: HostPageCopies, mark: Mark, sums: Mapping[GroupName, Tensor]) -> None:
        self._copies, self._mark, self.sums = copies, mark, sums

    def ready(self) -> bool:
        return self._copies.has_passed(self._mark)


class DiskPages:
    """`HostMemory` of an engine's pages. `landed` and `arrived` are the steps' thread's alone."""

    def __init__(self, copies: HostPageCopies) -> None:
        self._copies = copies

    def landed(self, pages: Pages) -> Landed:
        sums = {group: self._copies.kept_sums(group, columns) for group, columns in pages.items()}
        return _Landed(self._copies, self._copies.all_so_far(), sums)

    def views(self, pages: Pages) -> Sequence[Views]:
        listed = [[self._memory(group, page) for page in columns] for group, columns in pages.items()]
        return [[memoryview(each.numpy()) for each in column] for column in zip(*listed, strict=True)]

    def intact(self, landed: Landed, pages: Pages) -> Sequence[bool]:
        assert isinstance(landed, _Landed)
        found = self.sums(pages)
        same = [[a == b for a, b in zip(found[group], landed.sums[group].tolist(), strict=True)] for group in pages]
        return [all(column) for column in zip(*same, strict=True)]

    def sums(self, pages: Pages) -> Mapping[GroupName, Sequence[int]]:
        return {group: [page_sum(self._memory(group, page)) for page in columns] for group, columns in pages.items()}

    def arrived(self, pages: Pages, sums: Mapping[GroupName, Sequence[int]]) -> None:
        for group, columns in pages.items():
            self._copies.keep_sums(group, columns, sums[group])

    def _memory(self, group: GroupName, page: int) -> Tensor:
        """[page_bytes] uint8."""
        memory = self._copies.memory_of(group, page)
        if not memory.is_contiguous():
            raise InvariantError(f"page {page} of group {group} on the host is not one run of bytes")
        return memory
