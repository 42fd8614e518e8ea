"""Start several processes for one run: this process becomes Accelerate's launcher."""

import os
import sys
from pathlib import Path

from accelerate.commands.config import load_config_from_file

from distill.config.command_line import LaunchOptions
from distill.config.load import config_file, read_yaml
from speculative.errors import UserError

# For child Python processes: with it, `-m` does not import from the working directory, which may have its own `data` package.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
DDP = "configs/accelerate/ddp.yaml"
ONE_PROCESS = ("NO", False, "MULTI_CPU")  # An unquoted NO is false in YAML.


def launch_if_asked(options: LaunchOptions, module: str, *arguments: str) -> None:
    """Replace this process by `accelerate launch -m module arguments`; signals, output and exit status are then the launcher's.

    Return if one process is wanted. UserError: an unreadable or invalid file, one for one process, or a launcher started this one.
    """
    if not options.config_file and (options.num_processes or 1) == 1:
        return
    if "LOCAL_RANK" in os.environ:
        raise UserError("--num-processes, --config-file: a launcher started this process; give the options to it")
    path = Path(options.config_file or DDP)
    read_yaml(path)
    try:
        kind = load_config_from_file(str(config_file(path))).distributed_type
    except (ValueError, TypeError) as error:
        raise UserError(f"--config-file {path}: {' '.join(str(error).split())}") from error
    if kind in ONE_PROCESS:
        raise UserError(
            f"--config-file {path}: distributed_type {getattr(kind, 'value', 'NO')} starts one process; leave --config-file out"
        )
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_file(path))]
    words += ["--num_processes", str(options.num_processes)] if options.num_processes else []
    os.execve(sys.executable, [*words, "-m", module, *arguments], {**os.environ, **SAFE_PATH})
