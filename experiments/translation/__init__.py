"""Translation with an encoder-decoder: `presets`, `train`, `translate`, `evaluate`, `export`.

`corpus` and `prepare` make ids of text, `scoring` scores, `load_run` opens a run or a folder of
transformers. `plan` and `page` are what `experiments.plan` and `experiments.runs page` show of it.
"""
