"""`python -m draftwood` is the `draftwood` command."""

import sys

from draftwood.cli import main

if __name__ == "__main__":
    sys.exit(main())
