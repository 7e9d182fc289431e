"""What a deployment's replicas are made of; Serve restarts them when it changes."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from ray.serve._private.config import DeploymentConfig
from ray.serve.deployment import Deployment

from app import option_groups
from app.config import AppConfig

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "engine", "kernels")


class VersionedConfig(DeploymentConfig):  # type: ignore[misc]
    """A deployment's configuration whose ``version`` nobody changes.

    ``serve deploy`` gives all deployments of an application one version, a hash of its ``args``, so that every
    option would restart every replica.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version":
            super().__setattr__(name, value)


def with_version(deployment: Deployment, version: str) -> Deployment:
    """``deployment`` with a version of its own."""
    values = {**dict(deployment._deployment_config), "version": version}
    deployment._deployment_config = VersionedConfig.model_construct(**values)
    return deployment


def version_of(options: AppConfig, deployment: option_groups.Deployment, replica_class: type) -> str:
    """Differs where replicas must be replaced: by the options that concern them, or by their code."""
    made_of = {
        "options": options.fixed(deployment),
        "class": f"{replica_class.__module__}.{replica_class.__qualname__}",
        "code": _code(),
        # Of replicas that start with a fixed number, Serve never sends the policy a report.
        "reports": deployment == "engine" and options.scaling.scales,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


@cache
def _code() -> str:
    """A digest of the installed code, which ingresses and engines must share."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
