"""The log level of notices: lines about the start of slow work, which commands print to stderr."""

from __future__ import annotations

import logging

NOTICE_LEVEL = logging.INFO + 5
"""Level of log records that commands print like warnings, but without the word."""
logging.addLevelName(NOTICE_LEVEL, "NOTICE")
