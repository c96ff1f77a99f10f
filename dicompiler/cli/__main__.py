"""`python -m dicompiler.cli`: the command line where the `dicompiler` script is not installed."""

import sys

from dicompiler.cli import main

if __name__ == "__main__":  # a pool of processes or ranks imports this again
    sys.exit(main())
