"""``python -m app [option=value ...]``: serve on this machine until interrupted; ``make serve`` runs this."""

from __future__ import annotations

import argparse
import contextlib
import sys


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after an interrupt, 1 with one line on standard error when it cannot start."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return 0


def _main(arguments: list[str] | None) -> int:
    # Imported here, so that an interrupt during the imports ends quietly, too.
    from app.config import OPTIONS, did_you_mean
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
            name, written = _as_option(switches[0])
            hint = f"write {written}" if not name or name in OPTIONS else did_you_mean([name], OPTIONS)
            raise ConfigError(f"unknown switch {switches[0]!r}; {hint}")
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


def _as_option(switch: str) -> tuple[str, str]:
    """The option that ``--max-replicas=4`` names, and how to write it."""
    name, equals, value = switch.lstrip("-").partition("=")
    name = name.replace("-", "_")
    return name, f"{name}={value if equals else '...'}" if name else "option=value"


def say(line: str) -> None:
    """Print a line at once. One that cannot be written is lost: the server outlives a full disk or its pipe."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
