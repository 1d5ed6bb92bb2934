"""The library whose models, tokenizers and searches ours are compared with."""

from typing import Any

import pytest


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
