"""``GET /``: a page for people, with what is served, health, an example, and a chat box."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_PAGE = Path(__file__).with_name("home.html").read_text(encoding="utf-8")

_HEADERS = {
    # Nothing of another origin is loaded or called, and no other site may frame the page.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def home_page() -> Response:
    """The page; it asks ``/health`` and ``/v1`` for everything that it shows."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")
