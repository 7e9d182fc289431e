"""Processes without an engine load no torch: it takes seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "safetensors")


@pytest.mark.parametrize(
    "code",
    [
        "import app.ingress",
        "import app.application, app.replica",  # Serve's controller has the application built
        "import app.launch.launcher",
        "import app.ingress, app.autoscaling.policy, app.routing.router, app.scaling_deployment",
    ],
)
def test_only_engines_load_torch(code: str) -> None:
    look = f"{code}; import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_an_ingresss_tokenizer_loads_no_torch() -> None:
    code = (
        "import sys; from app.api.prompt_tokenizer import PromptTokenizer; "
        "from app.api.tokenizer_parts import TokenizerParts; from app.launch.model_store import resolve; "
        "PromptTokenizer(TokenizerParts.read(resolve('smollm2-135m-instruct'))); "
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
