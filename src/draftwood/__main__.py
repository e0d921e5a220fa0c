"""`python -m draftwood` is the `draftwood` command."""

import sys

from draftwood.cli import main

sys.exit(main())
