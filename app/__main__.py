"""``python -m app [option=value ...]``: serve on this machine until interrupted; ``make serve`` runs this."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after an interrupt, 1 with one line on standard error when it cannot start."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return 0


def _main(arguments: list[str] | None) -> int:
    # Imported here, so that an interrupt during the imports ends quietly, too.
    from app.config import OPTIONS
    from app.launch.launcher import serve_here
    from engine.errors import ConfigError

    parser = argparse.ArgumentParser(
        prog="python -m app",
        description="Serve a language model on this machine.",
        epilog=f"options: {', '.join(sorted(OPTIONS))}",
        allow_abbrev=False,
    )
    parser.add_argument("options", nargs="*", metavar="option=value")
    parser.add_argument("--host", help="the same as host=HOST")
    parser.add_argument("--port", help="the same as port=PORT")
    parsed, switches = parser.parse_known_intermixed_args(arguments)
    try:
        if switches:
            raise ConfigError(f"unknown switch {switches[0]!r}; {_as_option(switches[0])}")
        pairs = [option.partition("=") for option in parsed.options]
        wrong = [name for name, equals, _ in pairs if not equals]
        if wrong:
            raise ConfigError(f"{wrong[0]!r} is not of the form option=value, such as port=8001")
        if any(not name for name, _, _ in pairs):
            raise ConfigError("an option's name is missing before '='; write it like port=8001")
        launch = {"host": parsed.host, "port": parsed.port}
        given = {name: value for name, value in launch.items() if value is not None}
        serve_here({**given, **{name: value for name, _, value in pairs}}, say)
    except ConfigError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    return 0


def _as_option(switch: str) -> str:
    """How to write what ``--max-replicas=4`` means."""
    name, equals, value = switch.lstrip("-").partition("=")
    return f"write {name.replace('-', '_')}={value if equals else '...'}" if name else "write option=value"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
