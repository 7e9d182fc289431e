"""Structured output: grammars, compiled off the engine's thread, and a matcher for each sequence."""
