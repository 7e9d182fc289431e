"""Output held to a form: grammars compiled beside the engine, and a matcher for each sequence."""
