"""How many examples hypothesis tries: few by default, more where HYPOTHESIS_EXAMPLES says so."""

import os

from hypothesis import settings

examples = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "20")), deadline=None, database=None
)
