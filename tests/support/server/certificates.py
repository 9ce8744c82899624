"""Certificates of a private authority."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.integration.tools import need


def create(folder: Path) -> None:
    """Make `ca.pem`, a private authority, and the signed `server.pem` with `server.key`."""
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    _openssl(folder, "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=our authority")
    _openssl(folder, "req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
    sign(folder, folder / "server.pem", 2)


def sign(folder: Path, certificate: Path, days: int) -> None:
    """Sign a further certificate of the same key, for some days from now on."""
    authority = ["-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
    _openssl(folder, "x509", "-req", *authority, "-out", certificate, "-days", str(days), "-extfile", "names")


def _openssl(folder: Path, *arguments: str | Path) -> None:
    subprocess.run([need("openssl", "openssl"), *arguments], cwd=folder, check=True, capture_output=True)
