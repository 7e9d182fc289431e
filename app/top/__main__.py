"""``python -m app.top [URL]``: a server's live page in a terminal."""

from __future__ import annotations

import argparse
import os
import sys

from app.config import CLIENT_KEY
from app.top.server import Server

URL = "QUIRE_URL"
DEFAULT_URL = "http://127.0.0.1:8000"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 once the user quits, 1 if there is no terminal to draw on or the URL is none."""
    parser = argparse.ArgumentParser(
        prog="python -m app.top",
        description="Show a server's fleet live: KV blocks, latency, queues, and the target with its reason.",
        epilog=f"Other users of this machine can see --key; they cannot see {CLIENT_KEY} in the environment.",
    )
    parser.add_argument(
        "url", nargs="?", default=os.environ.get(URL, DEFAULT_URL), help=f"default: {URL}, or {DEFAULT_URL}"
    )
    parser.add_argument(
        "--key", default=os.environ.get(CLIENT_KEY, ""), help=f"the API key; default: {CLIENT_KEY}"
    )
    parsed = parser.parse_args(arguments)
    try:
        server = Server(parsed.url, parsed.key)
    except ValueError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    if not sys.stdout.isatty():
        print("quire: app.top draws on a terminal; for programs there is GET /metrics", file=sys.stderr)
        return 1
    from app.top.screen import Top

    Top(server).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
