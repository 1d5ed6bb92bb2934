"""GPT and BERT: `presets`, `train`, `generate`, `evaluate`, `finetune`, `export`.

`corpus` and `prepare` make ids of text, `objectives` says in what causal and masked models differ,
`scoring` measures, `tasks` are what `finetune` learns, `load_run` opens a run or a folder of
transformers. `plan` and `page` are what `experiments.plan` and `experiments.runs page` show of it.
"""
