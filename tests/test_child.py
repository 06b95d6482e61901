"""Processes of ours end with their parent, whatever they are in the middle of."""

import subprocess
import sys
from pathlib import Path

MEETS_LATE = """
import msgspec
from pathlib import Path
from torch._C._distributed_c10d import FileStore
from treetop.distributed.process import begin

class Options(msgspec.Struct):
    folder: str

options, _ = begin(Options, lambda said: said.folder)
print("begun", flush=True)
while Path(options.folder).exists():
    pass
FileStore(options.folder + "/meeting", 2)
"""


def test_a_process_ends_with_its_parent_also_while_it_holds_the_interpreters_lock(tmp_path: Path):
    """FileStore looks for a folder that is gone for five minutes, and no thread of its process runs meanwhile."""
    folder = tmp_path / "group"
    folder.mkdir()
    child = subprocess.Popen([sys.executable, "-c", MEETS_LATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdin.write(b'{"folder": "%s"}\n' % str(folder).encode())
        child.stdin.flush()
        assert child.stdout.readline() == b"begun\n"
        child.stdin.close()
        child.wait(10)
        assert not folder.exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
