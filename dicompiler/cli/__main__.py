"""The command line as `python -m dicompiler.cli`, for checkouts without the `dicompiler` script."""

import sys

from dicompiler.cli import main

if __name__ == "__main__":  # worker processes and ranks import this module again
    sys.exit(main())
