"""A certificate of this machine's own, for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> Path:
    """A PEM file with a private key and, after it, its certificate for localhost."""
    key, cert, both = folder / "key.pem", folder / "cert.pem", folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    both.write_text(key.read_text() + cert.read_text())
    return both
