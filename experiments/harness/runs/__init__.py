"""A run outside its training: its folder, its processes, the texts it reads and what it logs.

The folder: `run_folder`, `environment`, `sample_tables`, `run_options`, `decoding_options`.
Processes: `distributed`, `shared_inputs`. Loggers: `loggers`.
Texts: `sources` and `source_kinds` (files, `records`, `data_sets`, `own_texts`), `shares`,
`downloads`, `text_cache`, `user_cache`, `text_io`.
Scores: `quantities`, `rounding`, `bootstrap`, `intervals`, `translation_items`.
"""
