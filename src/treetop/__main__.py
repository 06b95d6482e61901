"""`python -m treetop`."""

import sys

from treetop.cli.command_line import main

sys.exit(main())
