"""What a chat template may raise."""

from __future__ import annotations

from jinja2.exceptions import TemplateError

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    # Too deep a recursion or nesting, too long a text:
    RuntimeError,
    SyntaxError,
    MemoryError,
)
"""It is broken, or was not written for these messages or variables."""
