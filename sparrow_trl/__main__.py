"""`python -m sparrow_trl` is `sparrow-trl`, without an installation."""

import sys

from .cli import main


sys.exit(main())
