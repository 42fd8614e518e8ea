"""The closed loop shown whole (docs/loop.md): `make loop`, or `python bench/closed_loop.py my.yaml --shifted other.jsonl`."""

from distill.faults import exit_status

import sys

from distill.config.command_line import run_program
from loop.loop import LoopOptions, loop_demo


def program(options: LoopOptions) -> int:
    """The closed loop shown whole: traffic shifts, an alarm rings, a new draft is trained and takes over; everything is killed once.

    Exit status: 0 all went as it should, 1 something did not (loop.json says what), 2 a mistake.
    """
    try:
        return loop_demo(options)
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)


if __name__ == "__main__":
    sys.exit(run_program(program))
