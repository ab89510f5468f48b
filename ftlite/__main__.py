# SPDX-License-Identifier: BSD-3-Clause
"""The command line: ``python -m ftlite demo``, ``python -m ftlite bench http``, ...

A command is a module that offers ``add_arguments(parser)`` and ``run(arguments) -> exit status``. It is
imported when it is asked for, so help is there at once and needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._errors import FtliteError

FAILED = 1
BAD_USAGE = 2  # what argparse ends with, too
INTERRUPTED = 128 + 2  # as a shell says it of a command that SIGINT ended


class Command(NamedTuple):
    """One command: the words that name it, its module, and a line about it."""

    words: tuple[str, ...]
    module: str
    about: str


COMMANDS = (
    Command(("demo",), ".demo", "watch a late replica heal from a training one, bit for bit"),
    Command(("bench", "http"), ".bench.http", "measure HTTPTransport between two processes of this machine"),
    Command(("bench", "pg"), ".bench.pg", "measure process groups in a child process against those in this one"),
    Command(
        ("bench", "pg-transport"), ".bench.pg_transport", "measure PGTransport between two processes of this machine"
    ),
    Command(("bench", "all"), ".bench.all", "measure all of them and this machine's limits, as a table or a page"),
)

# As it was started, so that a copy inside another package tells its own command.
PROGRAM = f"python -m {__package__}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (by default the process's arguments) names; return the exit status.

    What a user can do something about becomes one line on stderr.
    """
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can be told apart
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # the flush at the interpreter's end must not complain about it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except FtliteError as error:
        return _complain(f"{type(error).__name__}: {error}", FAILED)
    except ValueError as error:
        return _complain(str(error), BAD_USAGE)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _complain("this command needs torch (python -m pip install torch)", FAILED)


def _dispatch(arguments: Sequence[str]) -> int:
    for command in COMMANDS:
        if tuple(arguments[: len(command.words)]) == command.words:
            return _run(command, arguments[len(command.words) :])
    parser = _help_parser()
    if not arguments:
        parser.print_help()
        return 0
    parser.parse_known_args(arguments)  # ends the program after --help and --version
    all_names = [" ".join(command.words) for command in COMMANDS]
    # the first word of a longer command, such as "bench"
    names = [name for name in all_names if name.startswith(f"{arguments[0]} ")] or all_names
    return _complain(f"no command {' '.join(arguments[:2])!r}; there is: {', '.join(names)}", BAD_USAGE)


def _run(command: Command, arguments: Sequence[str]) -> int:
    module = importlib.import_module(command.module, __package__)
    add_arguments: Callable[[argparse.ArgumentParser], None] = module.add_arguments
    run: Callable[[argparse.Namespace], int] = module.run
    parser = argparse.ArgumentParser(prog=" ".join([PROGRAM, *command.words]), description=command.about)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def _complain(text: str, status: int) -> int:
    print(f"{PROGRAM}: {text}", file=sys.stderr)
    return status


def _reader_has_gone() -> bool:
    """Whether the broken pipe is our stdout (``| head``), and not one that a command works with."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _help_parser() -> argparse.ArgumentParser:
    """The parser of everything that is no command: it shows the help and the version."""
    width = max(len(" ".join(command.words)) for command in COMMANDS)
    lines = [f"  {' '.join(command.words):{width}}  {command.about}" for command in COMMANDS]
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [OPTION ...]",
        description="Fault tolerance for PyTorch training.",
        epilog="\n".join(["commands:", *lines, "", f"More about one: {PROGRAM} COMMAND --help"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    package = sys.modules[__package__ or ""]
    parser.add_argument("--version", action="version", version=f"{__package__} {package.__version__}")
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
