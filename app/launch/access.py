"""Checks, before the server starts, who will be able to use it."""

from __future__ import annotations

import ipaddress
import os
import ssl
from pathlib import Path
from typing import Any

from app.api.audit_log import audit_to
from app.api.keys import KeyFile
from app.config import AppConfig
from app.launch import haproxy, serving
from engine.errors import ConfigError


def check_access(options: AppConfig) -> dict[str, Any]:
    """Read the API keys, and refuse a public address without any unless ``open_access`` is set.

    Returns options that replicas need in another form: paths, which for them are relative to another folder.

    Raises:
        ConfigError: the key file, the audit log, or the certificate is wrong, or everybody on the network could
            use the server.
    """
    path = options.ingress.api_keys_file
    check_tls(options.launch.tls_file)
    try:
        audit_to(options.ingress.audit_log, "launcher")
    finally:
        audit_to(None, "launcher")
    keys = KeyFile(path)
    host = options.launch.host
    if not keys.required and not _only_this_machine(host) and not options.launch.open_access:
        raise ConfigError(
            f"host={host} accepts connections from other machines, but there are no API keys; set "
            "api_keys_file, or open_access=true if something in front authenticates clients"
        )
    files = {"api_keys_file": path, "audit_log": options.ingress.audit_log}
    return {name: str(Path(file).resolve()) for name, file in files.items() if file is not None}


def check_tls(file: str | None) -> None:
    """Check that a server can use the certificate and the key in ``file``, if there is one.

    Raises:
        ConfigError: it cannot, or HAProxy, which does it, does not run here.
    """
    if file is None:
        return
    if not serving.haproxy_expected() or haproxy.BINARY in os.environ:
        raise ConfigError(f"tls_file needs Quire's own HAProxy: run on Linux, and leave {haproxy.BINARY} unset")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(file, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_file={file} must be a PEM file with a certificate and its private key without a passphrase: "
            f"{error}"
        ) from error
    if "'" in file or "\n" in file:
        raise ConfigError(f"tls_file={file!r} must not contain quotes or line breaks")


def _only_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
