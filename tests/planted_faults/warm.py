"""Imported once, before the processes that run the tests are forked: what takes seconds to import."""

import gc

import anthropic
import fastapi
import httpcore
import httpx
import hypothesis
import llguidance
import openai
import pytest
import ray.serve
import textual.app
import torch
import transformers.models.llama.modeling_llama
import uvicorn.protocols.http.httptools_impl

__all__ = [
    "anthropic",
    "fastapi",
    "httpcore",
    "httpx",
    "hypothesis",
    "llguidance",
    "openai",
    "pytest",
    "ray",
    "textual",
    "torch",
    "transformers",
    "uvicorn",
]

gc.collect()
gc.freeze()  # no process walks over these objects again, which would copy their memory, too
