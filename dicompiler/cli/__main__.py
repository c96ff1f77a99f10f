"""The command line as `python -m dicompiler.cli`, for checkouts without the `dicompiler` script."""

import sys

from dicompiler.cli import main

if __name__ == "__main__":  # Worker processes import this module again and must not run the command.
    sys.exit(main())
