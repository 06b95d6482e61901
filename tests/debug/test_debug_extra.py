"""The extra of faults is a distribution of its own: who lacks it is told what to install, before anything runs."""

import subprocess
import sys
import tomllib
from pathlib import Path

import treetop_debug
from treetop.version import DISTRIBUTION, __version__

BLOCKED = """
import os, sys
import treetop.cli
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "treetop_debug":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocker())
print(treetop.cli.main(["doctor", "--faults", "--device", "cpu"]))
os.environ["TREETOP_FAULT"] = "limit-before-stop"
print(treetop.cli.main(["models"]))
"""


def test_what_needs_a_fault_names_the_extra():
    ended = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True)
    assert ended.stdout == "2\n2\n"
    assert ended.stderr.splitlines() == [
        "treetop: --faults needs treetop_debug; pip install treetop-llm[debug]",
        "treetop: TREETOP_FAULT needs treetop_debug; pip install treetop-llm[debug]",
    ]


def test_it_asks_for_the_treetop_that_it_was_made_with():
    """It replaces private parts, which another version may not have."""
    with (Path(treetop_debug.__file__).parent / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"{DISTRIBUTION}=={__version__}"]
