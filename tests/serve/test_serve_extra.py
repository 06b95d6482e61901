"""Without the packages of the extras everything else works, and what needs them says what to install."""

import subprocess
import sys

BLOCK = """
import sys
BLOCKED = ("fastapi", "starlette", "uvicorn", "zmq", "msgspec", "prometheus_client", "jinja2", "yaml", "ray")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=300, check=False
    )


def test_generating_needs_none_of_them():
    """Nor PyTorch's compiler, which takes two seconds to load."""
    code = """
from treetop import LLM, AsyncLLM, SamplingParams
import treetop.cli, treetop.doctor.run, treetop.bench.compare, treetop.tools.trace
print(len(LLM(max_running_requests=1, context_length=64).generate("def f(", SamplingParams(max_tokens=5))[0].token_ids))
print([name for name in ("sympy", "torch._dynamo") if name in sys.modules])
try:
    LLM(max_running_requests=1, context_length=64).chat([{"role": "user"}], chat_template="{{ messages }}")
except Exception as error:
    print(error)
"""
    ended = run(code)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == ["5", "[]", "chat templates need jinja2; pip install treetop-llm[serve]"]


def test_serve_without_them_is_one_line():
    ended = run("import treetop.cli; sys.exit(treetop.cli.main(['serve']))")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pip install treetop-llm[serve]" in ended.stderr
    ended = run("import treetop.cli; sys.exit(treetop.cli.main(['serve', '--config', 'x.yaml']))")
    assert "pip install treetop-llm[serve]" in ended.stderr


def test_replicas_without_ray_say_what_to_install():
    code = """
from treetop.cli.replicas import app
try:
    app({"replicas": 2})
except Exception as error:
    print(type(error).__name__, error)
"""
    assert run(code).stdout == "ConfigError replicas need ray; pip install treetop-llm[ray]\n"
