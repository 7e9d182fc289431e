"""Imported once, before the processes that run the tests are forked: what takes seconds to import."""

import gc

import fastapi
import httpx
import hypothesis
import pytest
import ray.serve
import torch
import transformers

__all__ = ["fastapi", "httpx", "hypothesis", "pytest", "ray", "torch", "transformers"]

gc.collect()
gc.freeze()  # no process walks over these objects again, which would copy their memory, too
