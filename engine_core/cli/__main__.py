"""`python -m engine_core.cli` is `engine-core`."""

import sys

from engine_core.cli import main

sys.exit(main())
