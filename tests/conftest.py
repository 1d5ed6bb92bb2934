"""Shared by all tests: strict settings, random data, and one meaning of "equal"."""

import contextlib
import gc
import io
import os
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import pytest

import tests.shapes  # before the package is imported
from jaxformer.runtime import cpu_kind
from jaxformer.training.parameters import flatten
from tests import buckets

# The longest first: of the tests that are left at the end none makes a worker wait for long.
_FIRST = ("test_whole_runs", "test_typed_commands", "test_guides", "test_distributed")
# Where the shapes in the package's signatures are checked at every call.
_SHAPES = ("ops", "nn", "text", "decoding", "training")
# On a CPU XLA's newer loops take up to twice as long to compile, and code in 32 parts half as long
# again. A flag that XLA does not know ends a process: the first JAX that may not know it.
_QUICK_TO_COMPILE = {
    "--xla_cpu_use_fusion_emitters=false": (0, 11),
    "--xla_cpu_parallel_codegen_split_count=1": (0, 13),
}
_KEPT_SECONDS = 60 * 24 * 3600


def be_strict():
    """On a CPU unless told otherwise, no shape is stretched in silence, products are exact."""
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # children too look for no other device
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config: pytest.Config):
    be_strict()
    # Tracing makes many objects and few cycles: a sixth of the time went into looking for these.
    gc.set_threshold(100_000, 50, 50)
    flags = os.environ.get("XLA_FLAGS", "").split()
    for flag, version in _QUICK_TO_COMPILE.items():
        if jax.__version_info__ < version and flag not in flags:
            flags.append(flag)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    keep_programs()
    if not hasattr(config, "workerinput"):  # workers and children have the variable of this process
        folder = tempfile.TemporaryDirectory(prefix="jaxformer-config")
        os.environ["XDG_CONFIG_HOME"] = folder.name
        config.add_cleanup(folder.cleanup)


def keep_programs():
    """Compiled programs are kept for other workers, for children and for the next session.

    JAX_ENABLE_COMPILATION_CACHE=false does without.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        flags = zlib.crc32(os.environ.get("XLA_FLAGS", "").encode())
        root = Path("~/.cache/jaxformer/test-programs").expanduser()
        folder = root / f"{cpu_kind()}-jaxlib-{jaxlib.__version__}-{flags:08x}"
        folder.mkdir(parents=True, exist_ok=True)
        for program in root.rglob("*-cache"):
            with contextlib.suppress(FileNotFoundError):  # another worker has deleted it
                if time.time() - program.stat().st_mtime > _KEPT_SECONDS:
                    program.unlink()
        # Variables of the environment, for the processes that tests start too.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.hookimpl(optionalhook=True)  # where xdist is not installed
def pytest_xdist_auto_num_workers() -> int:
    """One more than the cores: a test that waits for a process or a disk leaves its core idle."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]):
    items.sort(key=lambda item: item.path.stem not in _FIRST)


def pytest_runtest_setup(item: pytest.Item):
    layer = item.path.relative_to(Path(__file__).parent).parts[0]
    fixtures = getattr(item, "fixturenames", ())
    tests.shapes.enabled = layer in _SHAPES and "misuse" not in fixtures
    # Most of the time goes into compiling programs that run once.
    marks = {mark.name for mark in item.iter_markers()}
    quick = not marks & {"slow", "compiler"} and "optimized" not in fixtures
    jax.config.update("jax_disable_most_optimizations", quick)
    # For the processes that tests start too.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))


@pytest.fixture
def optimized() -> None:
    """Programs are compiled with all of XLA's optimizations, as those of users are."""


@pytest.fixture
def misuse() -> None:
    """Arrays of other shapes than a signature's reach the function, which has to refuse them."""


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that starts anew in every test."""
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of data that JAXFORMER_DATA names; without it the test is skipped."""
    folder = os.environ.get("JAXFORMER_DATA")
    if not folder:
        pytest.skip("JAXFORMER_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def assert_equal() -> Callable[..., None]:
    """The project's equality: |a - b| <= tolerance * max(1, |b|) for every element."""

    def check(given: Any, expected: Any, tolerance: float = 1e-5) -> None:
        given, expected = np.asarray(given, np.float64), np.asarray(expected, np.float64)
        assert given.shape == expected.shape
        error = np.abs(given - expected) / np.maximum(1.0, np.abs(expected))
        assert error.max() <= tolerance, f"differs by {error.max():.2e} at {error.argmax()}"

    return check


@pytest.fixture(scope="session")
def random_params() -> Callable[..., Any]:
    """Parameters of a model without a compiled init: every leaf random, biases and scales too."""

    def fill(model: Any, *inputs: Any, method: Any = None) -> Any:
        rng = np.random.default_rng(0)

        def init(*inputs: Any) -> Any:
            return model.init(jax.random.key(0), *inputs, method=method)["params"]

        shapes = jax.eval_shape(init, *inputs)

        def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
            center = 1.0 if path[-1].key == "scale" else 0.0
            return (center + 0.3 * rng.standard_normal(shape.shape)).astype(shape.dtype)

        return jax.tree_util.tree_map_with_path(leaf, shapes)

    return fill


@pytest.fixture(scope="session")
def leaf_shapes() -> Callable[[Any], dict[str, tuple[int, ...]]]:
    """A tree of parameters as {"path/of/leaf": shape}."""

    def shapes(params: Any) -> dict[str, tuple[int, ...]]:
        return {path: leaf.shape for path, leaf in flatten(params).items()}

    return shapes


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch for the tests marked `peer`, on one thread: its own wait for each other's cores."""
    library = pytest.importorskip("torch", reason="the peer tests need torch==2.13.0")
    library.set_num_threads(1)
    return library


@pytest.fixture(scope="session")
def odd_texts() -> list[str]:
    """Texts with what tokenizers lose, split or take for their own."""
    return [
        "",
        " ",
        "   ",
        " a",
        "a ",
        "  zwei  Leerzeichen  ",
        "\ttab\t\t",
        "\n",
        "a\r\nb",
        "\u2028",
        "a\u2028b",
        "🙂👩‍👩‍👧",
        "e\u0301 é",
        "\x00",
        "\ufeff",
        "\ufeffa",
        "<s",
        "Ġ Ċ ▁",
        "▁▁a ▁b",
        "it's 1,000 they'll",
        "Ａｂｃ ｶﾅ",
        "한국어 가각 हिन्दी",
        "=====aaaaaaaaaa",
    ]


@pytest.fixture(scope="session")
def train_pieces() -> Callable[..., bytes]:
    """A model file that SentencePiece makes of lines."""
    library = pytest.importorskip("sentencepiece", reason="needs the extra subwords")

    def train(lines: list[str], **options: Any) -> bytes:
        written = io.BytesIO()
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=written, minloglevel=2, **options
        )
        return written.getvalue()

    return train


@pytest.fixture(scope="session")
def object_storage() -> Iterator[dict[str, str]]:
    """An emulator of `gs://bucket`; the variables that lead clients there."""
    if not os.environ.get("CI"):  # where a skip would go unnoticed, what is missing is an error
        for name in ("gcsfs", "gcp_storage_emulator"):
            pytest.importorskip(name, reason="needs the extra buckets")
    with buckets.serving() as environment:
        yield environment


@pytest.fixture
def bucket_url(object_storage: dict[str, str]) -> Iterator[str]:
    """An empty folder in a bucket; afterwards all injected faults end."""
    yield f"gs://bucket/{uuid.uuid4().hex}"
    buckets.inject(fail_every=0, slow_every=0, read_only=0, closed="")


@pytest.fixture
def choose_platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """choose_platform("cuda"): programs of this CPU are written as those of that platform are."""

    def choose(platform: str) -> None:
        def dependent(*operands: Any, default: Callable[..., Any], **others: Any) -> Any:
            # A CPU cannot run the default where it has a way of its own.
            return others.get(platform, others.get("cpu", default))(*operands)

        monkeypatch.setattr(jax.lax, "platform_dependent", dependent)

    return choose


@pytest.fixture
def compiled():
    """A list of one number: how many programs were compiled so far in this test."""
    count = [0]

    def listener(name, _, **facts):
        count[0] += name.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield count
    jax.monitoring.unregister_event_duration_listener(listener)
