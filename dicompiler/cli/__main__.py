"""`python -m dicompiler.cli`: the command line where the `dicompiler` script is not installed."""

import sys

from dicompiler.cli import main

sys.exit(main())
