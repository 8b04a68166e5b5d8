"""Command line of the book; `make` calls it. `python -m lib.book --help` lists the commands."""

import argparse
import json
import sys

from lib.book import readme, records, runner, stage
from lib.book.toc import PROFILES, ROOT


def _claims(profile: str) -> None:
    rows = records.gather(profile)
    path = ROOT / "_build" / "claims.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(readme.scoreboard_text(rows))
    print(f"written to {path.relative_to(ROOT)}")


def _parameter(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lib.book", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run the chapters whose inputs changed"),
        ("build", "build the pages from the executed notebooks"),
        ("claims", "write _build/claims.json and print the table of claims"),
        ("accept", "make the executed notebooks the new references, and refresh the README"),
        ("readme", "refresh the README's table of claims from the references"),
    ):
        command = commands.add_parser(name, help=text)
        if name in ("run", "build", "claims"):
            command.add_argument("--profile", default="quick", choices=PROFILES)
        if name in ("run", "build"):
            command.add_argument("--only", default="", help="slugs separated by commas")
        if name == "run":
            command.add_argument("--jobs", type=int, default=2)
            command.add_argument("-p", "--parameter", type=_parameter, action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(argv)
    try:
        if args.command == "run":
            return runner.run(args.profile, args.only, args.jobs, dict(args.parameter))
        if args.command == "build":
            return stage.build(args.profile, args.only)
        if args.command == "claims":
            _claims(args.profile)
        elif args.command == "accept":
            changed = runner.accept()
            print("new references: " + (", ".join(changed) or "none"))
            readme.refresh()
        else:
            readme.refresh()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
