"""A trained run with the settings of its training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness.runs import run_folder
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.shared_inputs import check_shared_folder
from experiments.harness.training.build import build_attention
from experiments.harness.training.first_contact import AutoAttention
from jaxformer.distributed import Strategy
from jaxformer.ops.attention import DeviceInfo
from jaxformer.pretrained import Loaded, is_pretrained, load
from jaxformer.pretrained.hf_folder import locate


def load_run(
    folder: Path, options: RunOptions, *kinds: type, devices: Strategy | None = None
) -> Loaded:
    """The result of `jf.load` of `folder`, with the run's settings as one of `kinds`.

    The weights are the ones that `options` name, on `devices` or theirs. What computes attention of
    a folder of transformers is compared with `reference` first, where it is for one kind of device.
    Raises what `run_folder.load_config` and `jf.load` do.
    """
    check_shared_folder(folder, lambda: options.weights.steps)
    asked: Any = {"checkpoint": options.checkpoint, "step": options.step}
    asked["strategy"] = devices or options.strategy
    if is_pretrained(locate(folder)):
        if DeviceInfo.current().platform != "cpu":
            asked["attention_fn"] = AutoAttention()
        return load(folder, **asked)
    config: Any = run_folder.load_config(folder, *kinds)
    loaded = load(folder, attention_fn=build_attention(config.training), **asked)
    return replace(loaded, config=config)
