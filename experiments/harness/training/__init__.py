"""Training of a run: `session.open_training` opens it, `fit.fit` trains it, `build` makes parts.

`training_config` has the options that all experiments share, `initialization` what a run takes over
from another one, `early_stopping` the score that is watched, `progress` what is logged and shown,
`flops` and `utilization` the work of a step, `finetuning` the rows of examples.
"""
