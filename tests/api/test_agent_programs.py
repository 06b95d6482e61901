"""Programs that people let write code, as they are shipped: each does a task of three calls against this server.

`make clients` installs them from npm. They need no login and reach no other host; each test skips without its program.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.scripted import scripted
from support.tool_streams import hermes

PROGRAMS = Path(os.environ.get("TREETOP_AGENTS", Path(__file__).parents[2] / ".clients-venv")) / "node_modules" / ".bin"
COMMANDS = "printf 'one\\n' > note.txt", "printf 'two\\n' >> note.txt", "cat note.txt | tr a-z A-Z > upper.txt"
ANSWER = "The note is written."
CODEX = """
model = "scripted"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "HERE_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def program(name: str) -> str:
    found = PROGRAMS / name
    if not found.exists():
        pytest.skip(f"{name} is not installed (make clients)")
    return str(found)


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Its output, in an empty home; it must end well."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "TERM", "LANG") if name in os.environ}
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env={**kept, "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replies(tool: str, argument: str):
    """A thought and a command, until three have been run."""

    def reply(prompt: str) -> str:
        done = prompt.count("<tool>")
        said = {argument: COMMANDS[done], "description": "It writes."} if done < len(COMMANDS) else {}
        return f"<think>\nStep {done}.\n</think>\n\n" + (hermes(tool, said) if said else ANSWER)

    return reply


def is_done(folder: Path) -> bool:
    return (folder / "work" / "upper.txt").read_text() == "ONE\nTWO\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    assert shutil.which("git")
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path / "work", check=True)
    return tmp_path


def test_codex_does_a_task_of_three_calls(folder):
    """By /v1/responses: namespaces, its own web search and metadata among what it sends."""
    (folder / "home" / ".codex").mkdir(parents=True)
    with scripted(replies("exec_command", "cmd"), context=2**18) as (url, core):
        (folder / "home" / ".codex" / "config.toml").write_text(CODEX.format(url=url))
        command = [program("codex"), "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "Write it."]
        assert ANSWER in run(command, folder, HERE_KEY="none", CODEX_HOME=str(folder / "home" / ".codex"))
    assert is_done(folder)
    assert len(core.prompts) == len(COMMANDS) + 1


def test_claude_code_does_a_task_of_three_calls(folder):
    """By /v1/messages: a system's message in the middle, adaptive thinking and edits of the context among it."""
    with scripted(replies("Bash", "command"), context=2**18) as (url, core):
        command = [program("claude"), "-p", "Write it.", "--model", "scripted", "--allowedTools", "Bash"]
        own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        assert ANSWER in run(command, folder, **own)
    assert is_done(folder)
    assert len([prompt for prompt in core.prompts if "Write it." in prompt]) >= len(COMMANDS) + 1
