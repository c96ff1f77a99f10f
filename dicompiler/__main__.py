"""The command line as `python -m dicompiler`, for checkouts without the `dicompiler` script."""

import sys

from dicompiler.cli import main

# Worker processes of a search import this module again under another name. They must not run the command.
if __name__ == "__main__":
    sys.exit(main())
