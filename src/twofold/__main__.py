"""`python -m twofold`."""

import sys

from twofold.cli import main

sys.exit(main())
