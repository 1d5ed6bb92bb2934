"""Runs compared and shown.

`comparing.compare` gives scores with intervals and tests, `tables` writes them, `pages` makes HTML
pages, `plots` figures; `exporting` writes a run for other programs. The modules are imported one
by one, because a training needs the statistics alone.
"""
