"""Without the packages of the `serve` extra everything else works, and `treetop serve` says what to install."""

import subprocess
import sys

BLOCK = """
import sys
BLOCKED = ("fastapi", "starlette", "uvicorn", "zmq", "msgspec", "prometheus_client", "jinja2", "yaml")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_generating_needs_none_of_them():
    code = """
from treetop import LLM, AsyncLLM, SamplingParams
import treetop.cli, treetop.doctor.run, treetop.bench.compare, treetop.trace
print(len(LLM(max_running_requests=1, context_length=64).generate("def f(", SamplingParams(max_tokens=5))[0].token_ids))
try:
    LLM(max_running_requests=1, context_length=64).chat([{"role": "user"}], chat_template="{{ messages }}")
except Exception as error:
    print(error)
"""
    ended = run(code)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["5", "chat templates need jinja2; pip install treetop[serve]"]


def test_serve_without_them_is_one_line():
    ended = run("import treetop.cli; sys.exit(treetop.cli.main(['serve']))")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pip install treetop[serve]" in ended.stderr
    ended = run("import treetop.cli; sys.exit(treetop.cli.main(['serve', '--config', 'x.yaml']))")
    assert "pip install treetop[serve]" in ended.stderr
