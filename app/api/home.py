"""Pages for people: ``GET /``, with what is served, health, an example, and a chat box, and ``GET /docs``."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

_HOME = Path(__file__).with_name("home.html").read_text(encoding="utf-8")
_DOCS = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")

_HEADERS = {
    # Nothing of another origin is loaded or called, and no other site may frame the page.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_response(page: str) -> Response:
    """A page of one file that loads nothing."""
    return Response(page, headers=_HEADERS, media_type="text/html")


def home_page() -> Response:
    """The page; it asks ``/health`` and ``/v1`` for everything that it shows."""
    return page_response(_HOME)


def docs_page() -> Response:
    """The page that shows ``/openapi.json``."""
    return page_response(_DOCS)
