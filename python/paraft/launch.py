"""``python -m paraft.launch``: this package's ``paraft launch``, with this Python for scripts and modules."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ._fleet import program
from .errors import ConfigError


def main() -> NoReturn:
    """Replaces this process by ``paraft launch`` with its arguments."""
    try:
        paraft = program()
        os.execv(paraft, [paraft, "launch", "--python", sys.executable, *sys.argv[1:]])
    except (ConfigError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)


if __name__ == "__main__":
    main()
