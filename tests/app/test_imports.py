"""Processes without an engine load no torch: it takes seconds and hundreds of megabytes."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_ENGINES = """
import importlib, sys

def check(step):
    found = [name for name in ("torch", "transformers", "triton") if name in sys.modules]
    if found:
        sys.exit(f"{step} loads {found}")

# Ingresses, what Serve's controller builds and decides with, and `python -m app`.
for name in ("app.ingress", "app.application", "app.replica", "app.autoscaling.policy", "app.launch.launcher"):
    importlib.import_module(name)
    check(name)

from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.launch.model_store import resolve

from app import config
from app.launch.preflight import check_memory

folder = resolve("smollm2-135m-instruct")
PromptTokenizer(TokenizerParts.read(folder))
check("the tokenizer")

fit = check_memory(config.load({"device": "cpu"}, {}), folder, 8 << 30)
check("planning of memory")
"""


def test_only_engines_load_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ENGINES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
