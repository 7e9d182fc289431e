"""Tools that a model may call: their declaration, their calls in its text, and its reasoning before them."""
