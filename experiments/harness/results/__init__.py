"""Runs compared and shown.

`find_runs` finds them, `groups` puts runs together that differ in the seed alone, `scored_runs`
reads their scores. `comparing.compare` gives scores with intervals and tests, `tables` writes them,
`pages` makes HTML pages, `plots` figures; `exporting` writes a run for other programs. The modules
are imported one by one, because a training needs the statistics alone.
"""
