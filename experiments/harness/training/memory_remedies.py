"""Settings that lower the memory of a training."""

from experiments.harness.cli import config_files
from experiments.harness.training.experiment_config import ExperimentConfig

_BATCHES = {"data.batch_size": "sequences", "data.batch_tokens": "tokens"}
"""Options of the size of a batch, of which an experiment has one, and what they count."""


def remedies(config: ExperimentConfig) -> str:
    """Sentences for somebody whose training finds no memory: options that would lower its need.

    Each is an option of `config`, and none of them is set so already.
    """
    training, names = config.training, config_files.settings(config)
    of_new_runs = [
        f"lower --{name} (now {getattr(config.data, name.partition('.')[2]):,} {unit})"
        for name, unit in _BATCHES.items()
        if name in names
    ]
    of_new_runs.append(f"raise --training.grad_accumulation (now {training.parts})")
    if config.model.dtype == "float32":
        of_new_runs.append("give --model.dtype bfloat16")
    of_any_run = []
    if training.remat != "blocks" and not training.block:
        of_any_run.append("--training.remat blocks")
    if training.attention_fn == "reference":
        of_any_run.append("--training.attention_fn blockwise")
    given = f"Give {' or '.join(of_any_run)}. " if of_any_run else ""
    return (
        f"{given}In a run without a checkpoint also {', '.join(of_new_runs)}. The command plan "
        "says what a choice needs. Attention may need the square of a text's tokens: cut a very "
        "long text"
    )
