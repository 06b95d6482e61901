"""`python -m treetop.cli`."""

import sys

from treetop.cli.command_line import main

sys.exit(main())
