"""The closed loop as a demonstration (docs/loop.md): `make loop`, or `python bench/closed_loop.py my.yaml --shifted other.jsonl`."""

from distill.faults import exit_status

import sys

from distill.config.command_line import run_program
from loop.loop import LoopOptions, loop_demo


def program(options: LoopOptions) -> int:
    """Show the closed loop: traffic shifts, an alarm fires, a new draft is trained and takes over. Each part is killed once.

    Exit status: 0 success, 1 a step failed (see loop.json), 2 user error.
    """
    try:
        return loop_demo(options)
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)


if __name__ == "__main__":
    sys.exit(run_program(program))
