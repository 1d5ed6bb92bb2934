"""The config.json of published models, each as a public repository at GitHub has a copy of it.

A line of published_configs.jsonl names owner/repository@commit/path and has the keys and values,
without `_name_or_path`. (The copies of OPT are dicts, without `architectures`, which all OPT have.)
"""

import json
from pathlib import Path

_LINES = (Path(__file__).with_suffix(".jsonl")).read_text(encoding="utf-8").splitlines()
PUBLISHED = {row["from"]: row["config"] for row in map(json.loads, _LINES)}
REFUSED = {
    "ttssrr423/qwenBatchInference": "quantization_config=",
    "opt 350m": "word_embed_proj_dim=512 is not supported: only 1024",
    "bart-base": r"architectures=\['BartModel'\] is not supported",
}
"""The end or the beginning of a name, and the reason why this model cannot be computed here."""


def reason(name: str) -> str | None:
    """Why the model is refused, or None."""
    return next((said for part, said in REFUSED.items() if part in name), None)
