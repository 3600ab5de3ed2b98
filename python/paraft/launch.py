"""``python -m paraft.launch``: ``paraft launch`` of this package's program, with this Python for scripts and modules."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._fleet import program
from .errors import ConfigError


def main() -> NoReturn:
    """Becomes ``paraft launch``, with the arguments of this process."""
    try:
        paraft = program()
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(e.exit_code)
    os.environ["PARAFT_PYTHON_EXECUTABLE"] = sys.executable
    os.execv(paraft, [paraft, "launch", *sys.argv[1:]])


if __name__ == "__main__":
    main()
