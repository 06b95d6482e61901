"""Certificates that tests make for themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


class Authority:
    """A certificate authority of a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.file = self._made(name, "-addext", "basicConstraints=critical,CA:TRUE")[0]

    def certificate(self, name: str, *more: str) -> tuple[str, str]:
        """Files of a certificate and of its key."""
        issuer = ("-CA", self.file, "-CAkey", str(self._folder / f"{self._name}.key"))
        return self._made(name, "-addext", "subjectAltName=IP:127.0.0.1", *issuer, *more)

    def _made(self, name: str, *options: str) -> tuple[str, str]:
        files = tuple(str(self._folder / f"{name}.{kind}") for kind in ("pem", "key"))
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
        secret = () if "-passout" in options else ("-nodes",)
        command = ["openssl", "req", "-x509", *key, *secret, "-days", "2", "-subj", f"/CN={name}", *options]
        subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
        return files[0], files[1]
