"""Pages in files: whole or not there, bounded, told from any other; whatever happens while they are written."""

import errno
import inspect
import os
import signal
import subprocess
import sys

import pytest

from treetop.cache.disk_store import RETRY_S, DiskStore, _write
from treetop.types.errors import ConfigError

SIZE = 1000


def key(number):
    return number.to_bytes(16)


def page(number):
    return [memoryview(bytes([number % 251]) * (SIZE // 2)), memoryview(bytes([number % 13]) * (SIZE // 2))]


def room():
    return [memoryview(bytearray(SIZE // 2)), memoryview(bytearray(SIZE // 2))]


def reads(store, number):
    into = room()
    whole = store.read(key(number), into)
    assert not whole or [bytes(each) for each in into] == [bytes(each) for each in page(number)]
    return whole


@pytest.fixture
def opened(tmp_path):
    """Makes stores in one folder, each after the one before is closed."""
    made = []

    def make(max_bytes=10**6, made_for="these weights", **more):
        if made:
            made.pop().close()
        made.append(DiskStore(tmp_path / "kv", max_bytes, made_for, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_pages_outlive_a_restart_and_not_another_model(opened):
    store = opened()
    assert all(store.write(key(n), page(n)) for n in range(5))
    store = opened()
    assert [reads(store, n) for n in range(6)] == [True] * 5 + [False]
    assert store.num_damaged == 0
    assert len(opened(made_for="other weights")) == 0
    assert len(opened()) == 0
    assert not [each for each in opened().folder.iterdir() if each.suffix == ".page"]


def test_no_other_user_may_read_what_is_kept(opened):
    """Also in a folder that was open to all, as one of an earlier version was."""
    store = opened()
    store.write(key(1), page(1))
    assert store.folder.stat().st_mode & 0o777 == 0o700
    store.folder.chmod(0o755)
    store = opened()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (store.folder, *store.folder.iterdir())}
    names = {"engine-0": 0o700, "lock": 0o600, "made-for": 0o600, f"{key(1).hex()}.page": 0o600}
    assert modes == names


@pytest.mark.parametrize("note", [b"\xff\xfe\x80", b"", b"these weight"], ids=["no text", "empty", "cut"])
def test_a_damaged_note_of_what_pages_are_of_begins_with_none(opened, note):
    store = opened()
    store.write(key(1), page(1))
    (store.folder / "made-for").write_bytes(note)
    assert len(opened()) == 0
    store = opened()
    assert store.write(key(1), page(1))
    assert reads(opened(), 1)


def test_the_least_recently_used_goes_first_and_bytes_are_bounded(opened):
    store = opened(max_bytes=4 * (SIZE + 100))
    for n in range(4):
        assert store.write(key(n), page(n))
    store.used([key(0)])
    assert store.write(key(4), page(4))
    assert [store.holds(key(n)) for n in range(5)] == [True, False, True, True, True]
    files = [each for each in store.folder.iterdir() if each.suffix == ".page"]
    assert sum(each.stat().st_size for each in files) == store.num_bytes <= 4 * (SIZE + 100)
    assert not store.write(key(9), [memoryview(bytes(10**5))]), "more than all of it"
    for n, path in enumerate(sorted(files)):  # of those that were left, the last used
        os.utime(path, (n, n))
    store = opened(max_bytes=2 * (SIZE + 100))
    assert len(store) == 2
    assert store.holds(key(4))


def test_a_page_that_is_used_stays_before_those_behind_it(opened):
    """Pages of one prompt are of no use without the first."""
    store = opened(max_bytes=3 * (SIZE + 100))
    for n in range(3):
        store.write(key(n), page(n))
    store.used([key(n) for n in range(3)])
    store.write(key(3), page(3))
    assert [store.holds(key(n)) for n in range(4)] == [True, True, False, True]


def test_so_it_does_after_a_restart(opened):
    """However close together they were written, and whatever their keys are."""
    store = opened()
    for n in (2, 0, 3, 1):
        store.write(key(n), page(n))
    store.stamp([key(n) for n in (2, 0, 3, 1)])
    assert all(reads(store, n) for n in (2, 0, 3, 1))
    store = opened(max_bytes=2 * (SIZE + 100))
    assert [store.holds(key(n)) for n in (2, 0, 3, 1)] == [True, True, False, False]


@pytest.mark.parametrize(
    "what", ["a bit", "a bit of the head", "cut", "cut in the head", "longer", "another's", "empty"]
)
def test_a_damaged_file_is_no_page_and_goes(opened, what):
    store = opened()
    store.write(key(1), page(1))
    store.write(key(2), page(2))
    path, other = (store.folder / f"{key(n).hex()}.page" for n in (1, 2))
    content = bytearray(path.read_bytes())
    changed = {
        "cut": content[:-1],
        "cut in the head": content[:10],
        "longer": content + b"x",
        "another's": other.read_bytes(),
        "empty": b"",
    }
    if what.startswith("a bit"):
        content[20 if "head" in what else -3] ^= 4
        changed[what] = content
    path.write_bytes(changed[what])
    assert not reads(store, 1)
    assert (store.num_damaged, store.holds(key(1)), path.exists()) == (1, False, False)
    assert reads(store, 2)
    assert store.write(key(1), page(1))
    assert reads(store, 1)


def test_a_full_disk_leaves_nothing_and_is_tried_again_later(opened, caplog):
    now, full = [0.0], [True]

    def write(path, parts):
        _write(path, [b"half of it"] if full[0] else parts)
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = opened(write=write, clock=lambda: now[0])
    assert not store.write(key(1), page(1))
    assert not [each for each in store.folder.iterdir() if each.suffix in (".page", ".part")]
    full[0] = False
    assert not store.write(key(1), page(1))
    assert caplog.text.count("No space left") == 1
    now[0] = RETRY_S
    assert store.write(key(1), page(1))
    assert store.num_bytes == sum(each.stat().st_size for each in store.folder.glob("*.page"))


KILLED = """
SIZE = 1000
import sys, time
from pathlib import Path
from treetop.cache import disk_store
def slowly(path, parts):
    with path.open("wb", buffering=0) as file:
        for part in parts:
            for at in range(0, len(part), 100):
                file.write(part[at : at + 100])
                if path.name.startswith(key(7).hex()) and len(part) > 100:
                    print("now", flush=True)
                    time.sleep(600)
store = disk_store.DiskStore(Path(sys.argv[1]), 10**6, "these weights", write=slowly)
for n in range(9):
    store.write(key(n), page(n))
"""  # with `key` and `page` of above


def test_a_kill_while_a_page_is_written_leaves_the_others_and_no_wrong_one(tmp_path):
    """And frees the folder for the next engine; a living one keeps its own."""
    command = [sys.executable, "-c", inspect.getsource(key) + inspect.getsource(page) + KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "now\n"
        beside = DiskStore(tmp_path, 10**6, "these weights")
        assert beside.folder.name == "engine-1"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert [*(tmp_path / "engine-0").glob("*.part")]
    store = DiskStore(tmp_path, 10**6, "these weights")
    assert store.folder.name == "engine-0"
    assert [reads(store, n) for n in range(9)] == [True] * 7 + [False] * 2
    assert store.num_damaged == 0
    assert not [*store.folder.glob("*.part")]
    beside.close()
    store.close()


def test_a_folder_that_cannot_be_had_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-offloading-folder .*file"):
        DiskStore(tmp_path / "file", 10, "")
