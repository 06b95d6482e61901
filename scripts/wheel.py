"""Build the wheel, install it into an environment of its own, and serve from there; then add the extra of faults.

    python scripts/wheel.py

The environment sees the packages of this Python's, so nothing is downloaded but what builds the wheel; what the wheel
and its serve extra ask for must be among them. It does not see this source tree. The plain wheel holds no fault and
says what to install for one; `treetop doctor` runs without it. With `treetop-debug` beside it a fault is put back, and
its guard ends the start. Prints a line for each of the two, and exits with 1 if something fails.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "port: 0\nmax-model-len: 128\nserved-model-name: [wheel]\nlog_interval: 0\nmax-running-requests: 2\n"
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
WAIT_S = 120
MATCHES = """
import importlib.metadata as metadata
assert metadata.requires("treetop-debug") == [f"treetop-llm=={metadata.version('treetop-llm')}"]
"""
"""Raises unless the extra asks for the very treetop that is there."""
FAULT, GUARD = "sgl-26972", "page_columns: need"
"""A fault whose guard looks at the start, and what it says."""
REQUIRED = """
import importlib.metadata as metadata, re
for each in metadata.requires("treetop-llm"):
    if "extra ==" not in each or "serve" in each.split(";")[1]:
        metadata.version(re.match(r"[\\w.-]+", each)[0])
"""
"""Raises unless all packages are there that the wheel and its serve extra ask for."""


def build(folder: Path, source: Path, name: str) -> Path:
    """The wheel of a distribution."""
    run(folder, sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(source))
    (wheel,) = folder.glob(f"{name}-*.whl")
    return wheel


def holds(wheel: Path) -> set[str]:
    """Names of the packages in a wheel."""
    with zipfile.ZipFile(wheel) as file:
        return {name.split("/")[0] for name in file.namelist() if not name.split("/")[0].endswith(".dist-info")}


def install(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel; its Python."""
    environment = folder / "environment"
    run(folder, sys.executable, "-m", "venv", str(environment))
    python = environment / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.check_output(asked, text=True, env=CLEAN).strip())
    # A line that is a path makes its packages visible, but runs none of its .pth files: no editable treetop.
    lent = [place for place in sys.path if place.endswith("-packages")]
    run(folder, str(python), "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
    (packages / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    run(folder, str(python), "-c", REQUIRED)
    return python


def serve(folder: Path, python: Path) -> str:
    """What a server from the wheel, told by a file of options, completes."""
    (folder / "serve.yaml").write_text(CONFIG, encoding="utf-8")
    command = [str(python.with_name("treetop")), "serve", "--config", "serve.yaml"]
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=CLEAN)
    assert server.stderr is not None
    try:
        said = ""
        while (found := re.search(r"serving wheel on (http://\S+) \(context 128, 2 requests", said)) is None:
            line = server.stderr.readline()
            if not line:
                raise SystemExit(f"the server has ended:\n{said}")
            said += line
        body = json.dumps({"model": "wheel", "prompt": "def area(r):", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(found[1] + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:
            text = json.load(answer)["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        code = server.wait(WAIT_S)
    finally:
        server.kill()
        server.wait()
    if code != 0 or not text:
        raise SystemExit(f"exit code {code}, completion {text!r}")
    return str(text)


def without_faults(folder: Path, python: Path) -> None:
    """Whoever asks for a fault is told what to install, and the doctor runs."""
    treetop = str(python.with_name("treetop"))
    said = failing(folder, {"TREETOP_FAULT": FAULT}, 2, treetop, "models")
    said += failing(folder, {}, 2, treetop, "doctor", "--faults")
    if said.count("pip install treetop-llm[debug]") != 2:
        raise SystemExit(f"without the extra:\n{said}")
    run(folder, treetop, "doctor", "--cases", "2", "--device", "cpu")


def with_faults(folder: Path, python: Path) -> str:
    """The second distribution, installed beside the first; the guard's words for a fault that it puts back."""
    source = folder / "treetop_debug"
    shutil.copytree(ROOT / "src" / "treetop_debug", source)  # a build leaves its traces where the source is
    wheel = build(folder, source, "treetop_debug")
    if holds(wheel) != {"treetop_debug"}:
        raise SystemExit(f"{wheel.name} holds {holds(wheel)}")
    run(folder, str(python), "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
    run(folder, str(python), "-c", MATCHES)
    command = (str(python.with_name("treetop")), "generate", "--device", "cpu", "--prompt", "x", "--max-tokens", "2")
    said = failing(folder, {"TREETOP_FAULT": FAULT}, 1, *command)
    if GUARD not in said:
        raise SystemExit(f"with the extra:\n{said}")
    return f"{wheel.name}, {wheel.stat().st_size / 2**10:.0f} KiB: {said.splitlines()[-1]}"


def failing(folder: Path, environment: dict[str, str], code: int, *command: str) -> str:
    """stderr of a command that must end with this exit code."""
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**CLEAN, **environment}, check=False
    )
    if ended.returncode != code:
        raise SystemExit(f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended.stderr


def run(folder: Path, *command: str) -> None:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=CLEAN, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{ended.stdout}{ended.stderr}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="treetop-wheel-") as name:
        folder = Path(name)
        wheel = build(folder, ROOT, "treetop_llm")
        if holds(wheel) != {"treetop"}:
            raise SystemExit(f"{wheel.name} holds {holds(wheel)}")
        python = install(folder, wheel)
        where = [str(python), "-c", "import treetop; print(treetop.__file__)"]
        origin = subprocess.check_output(where, cwd=folder, text=True, env=CLEAN).strip()
        if not origin.startswith(str(folder)):
            raise SystemExit(f"treetop is taken from {origin}, not from the wheel")
        print(f"{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB, serves: {serve(folder, python)!r}")
        without_faults(folder, python)
        print(with_faults(folder, python))


if __name__ == "__main__":
    main()
