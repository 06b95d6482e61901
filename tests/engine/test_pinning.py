"""Memory that a GPU copies to: as much as was asked for, pinned where it lies, and tried again where that failed."""

import ctypes
import gc
import mmap
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from treetop.engine.offloading.host_pages import _GroupPages
from treetop.engine.offloading.pinning import PinnedMemory


class Driver:
    """Pins no more than `limit` bytes together."""

    def __init__(self, limit):
        self.limit, self.pinned = limit, {}

    def pin(self, address, num_bytes):
        assert address % mmap.PAGESIZE == 0
        if sum(self.pinned.values()) + num_bytes > self.limit:
            return False
        self.pinned[address] = num_bytes
        return True

    def unpin(self, address):
        del self.pinned[address]


def test_memory_is_pinned_without_rounding_up():
    driver = Driver(10**9)
    memory = PinnedMemory(driver.pin, driver.unpin)
    made = [memory.make(size) for size in (70_000_000, 4096, 1)]
    assert [*driver.pinned.values()] == [70_000_000, 4096, 1]
    assert [*driver.pinned] == [each.data_ptr() for each in made]
    assert memory.num_loose_bytes == 0
    memory.release()
    memory.release()
    assert not driver.pinned


def test_a_pin_that_fails_is_tried_again_and_its_memory_is_used_meanwhile(caplog):
    """Told once; what is loose is never unpinned."""
    driver = Driver(5000)
    memory = PinnedMemory(driver.pin, driver.unpin)
    first, second, third = (memory.make(4000) for _ in range(3))
    second.fill_(7)
    third.fill_(8)
    assert [*driver.pinned] == [first.data_ptr()]
    assert memory.num_loose_bytes == 8000
    assert caplog.text.count("cannot be pinned") == 1
    driver.limit = 10**9
    memory.make(100)
    assert memory.num_loose_bytes == 0
    assert {each.data_ptr() for each in (first, second, third)} <= {*driver.pinned}
    assert (second.unique().tolist(), third.unique().tolist()) == ([7], [8])
    memory.release()
    assert not driver.pinned


def test_memory_is_mapped_as_long_as_it_is_pinned():
    """Also of what is dropped without `release`: the driver's copies would go to pages that are another's by then."""
    driver = Driver(10**9)

    unpinned = []

    def unpin(address):
        unpinned.append(ctypes.string_at(address, 4))  # a crash, were it not mapped
        driver.unpin(address)

    memory = PinnedMemory(driver.pin, unpin)
    memory.make(2**20)[:4] = torch.tensor([1, 2, 3, 4])
    assert memory.make(2**20).data_ptr() not in [*driver.pinned][:1]
    del memory
    gc.collect()
    assert unpinned == [bytes([1, 2, 3, 4]), bytes(4)]
    assert not driver.pinned


def test_a_slab_that_could_not_be_had_is_asked_for_again():
    """Of the last slab no more than its pages are taken."""
    fails = [OSError(12, "Cannot allocate memory")]

    class Memory(PinnedMemory):
        def make(self, num_bytes):
            if fails:
                raise fails.pop()
            return super().make(num_bytes)

    with ThreadPoolExecutor(1) as maker, patch("treetop.engine.offloading.host_pages.SLAB_BYTES", 4096):
        staging = torch.empty((2, 4, 1024), dtype=torch.uint8)
        pages = _GroupPages((), staging, torch.zeros(6, dtype=torch.int64), 6, Memory(None))
        with pytest.raises(OSError, match="Cannot allocate"):
            pages.host(1, 2, maker)
        assert pages.host(1, 2, maker).shape == (2, 1024)
        assert pages.host(5, 1, maker).shape == (1, 1024)
        assert [slab.result().shape[0] for slab in pages.slabs] == [4, 2]
