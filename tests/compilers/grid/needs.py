"""What one device must send, compute, keep and read for the program of a cell: the formulas.

A ring of n devices sends (1 - 1/n) of an array from each of them when it gathers it, scatters a sum
of it or exchanges it all to all, and twice that when each device gets the whole sum. So a
parameter of which a loss needs P numbers on each device (all, or its part along "tensor") moves

- once in 16 bits for a forward pass, and once more for a backward pass that gathers at its use
  what a layer then computes again,
- once in 32 bits as a gradient, scattered along the axes that divide it; its part is then added up
  along all other axes along which the devices hold different rows or positions.

Activations move as tensor parallelism with divided positions has them (Korthikanti et al. 2022):
each sub-layer gathers its input along "tensor" and scatters its sum, and once more for the
gradient. "sequence" exchanges queries, keys, values and results of attention (Jacobs et al. 2023).
"""

import math
import re
from functools import cache
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxformer.config import TransformerConfig
from jaxformer.distributed.sharding_rules import loss_specs, mesh_axes, partition_specs
from jaxformer.nn.axes import Axes, parameter_axes
from jaxformer.nn.remat import REMAT
from jaxformer.training.parameters import flatten
from tests.compilers.grid.cells import MESHES, Cell
from tests.compilers.grid.programs import (
    BEAMS,
    CACHE,
    CONFIGS,
    LENGTH,
    PREDICTED,
    ROWS,
    TEXTS,
    init_params,
    make_model,
    model_inputs,
)

HALF, FULL = 2, 4
"""Bytes of a number in bfloat16, in which activations and gathered parameters are, and float32."""
_CUBLAS_MEMORY = 2**22
"""Bytes that XLA gives the products of NVIDIA's library to work in."""


class Needs(NamedTuple):
    """Bytes that a device sends in a step or for a token, FLOPs of its products outside of kernels,
    bytes of what it keeps, bytes that it reads and writes for a token (0 for a loss)."""

    sent: float
    flops: float
    live: float
    read: float


class Mesh(NamedTuple):
    """The number of devices along each axis."""

    data: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return math.prod(self)

    def along(self, axes: Any) -> int:
        """The number of devices along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)


class Parameter(NamedTuple):
    """A parameter and its division.

    `part` is the number of its elements that a loss needs on a device, `parts` are the devices that
    share these, `copies` the devices with other rows or positions that keep the same share. A row
    of its product has `outputs` numbers on a device.
    """

    path: str
    elements: int
    is_matrix: bool
    part: float
    parts: int
    copies: int
    outputs: float

    @property
    def kept(self) -> float:
        """The number of elements that a device keeps."""
        return self.part / self.parts

    @property
    def in_block(self) -> bool:
        return "blocks_" in self.path


def mesh_of(cell: Cell) -> Mesh:
    """The sizes of the axes of the cell's mesh."""
    pairs = (axis.split("=") for axis in MESHES[cell.mesh].split(","))
    return Mesh(**{name: int(size) for name, size in pairs})


def needs(cell: Cell) -> Needs:
    """The needs of one device for the program of `cell`."""
    mesh, config = mesh_of(cell), CONFIGS[cell.family]
    parameters = _parameters(cell.family, mesh)
    if cell.program in ("train", "validate"):
        return _loss(cell, config, mesh, parameters)
    return _search(cell, config, mesh, parameters)


@cache
def _parameters(family: str, mesh: Mesh) -> list[Parameter]:
    model = make_model(family, REMAT["none"])
    axes = parameter_axes(model, *model_inputs(family))
    params = jax.eval_shape(lambda: init_params(family, model))
    sizes = mesh._asdict()
    specs = partition_specs(params, sizes, axes=axes)
    kept = loss_specs(params, specs, axes=axes)
    return [
        _parameter(path, leaf, axes[path], mesh, specs[path], kept[path])
        for path, leaf in flatten(params).items()
    ]


def _parameter(
    path: str, leaf: Any, axes: Axes, mesh: Mesh, spec: PartitionSpec, kept: PartitionSpec
) -> Parameter:
    dividing, by_name = mesh_axes(spec), mesh_axes(kept)
    part = leaf.size / mesh.along(by_name)
    parts = mesh.along(axis for axis in dividing if axis not in by_name)
    copies = mesh.along(axis for axis in mesh._fields if axis not in dividing)
    outputs = math.prod(leaf.shape[len(axes.inputs) :]) / mesh.along(by_name)
    return Parameter(path, leaf.size, leaf.ndim > 1, part, parts, copies, outputs)


def ring(size: float, devices: int) -> float:
    """Bytes of a gather, a scatter or an exchange of an array of this size."""
    return size * (1 - 1 / devices)


# --- a loss, and its gradient ---


def _loss(cell: Cell, config: TransformerConfig, mesh: Mesh, parameters: list[Parameter]) -> Needs:
    is_step = cell.program == "train"
    rows = ROWS / (mesh.data * mesh.fsdp)
    sent = sum(_moved(x, cell.gather_at == "use", is_step) for x in parameters)
    sent += _activations(cell.family, config, mesh, rows, is_step)
    blocks, head = _products(cell.family, config)
    flops = blocks + head
    if is_step:
        # Two gradients of each product, and what the backward pass computes again of each block:
        # all but its last product, unless a norm follows that.
        last = _positions(cell.family) * 2 * config.d_model * config.d_ff
        flops = 4 * blocks + 3 * head - (last if config.norm.placement == "pre" else 0)
    state = sum(x.kept for x in parameters) * FULL * (3 if is_step else 1)
    live = state + _temporaries(cell, config, mesh, parameters, rows)
    return Needs(sent, flops / mesh.size, live, 0.0)


def _moved(x: Parameter, at_use: bool, is_step: bool) -> float:
    """Bytes of a parameter and of its gradient."""
    gathers = 2 if at_use and is_step and x.in_block else 1
    moved = gathers * ring(HALF * x.part, x.parts)
    if is_step:
        moved += ring(FULL * x.part, x.parts) + 2 * ring(FULL * x.kept, x.copies)
    return moved


def _activations(
    family: str, config: TransformerConfig, mesh: Mesh, rows: float, is_step: bool
) -> float:
    """Bytes of activations in a step that recomputes its blocks, or in a loss."""
    hidden = rows * LENGTH / mesh.sequence * config.d_model * HALF
    along_tensor = ring(hidden, mesh.tensor)
    backward = 2 if is_step else 1
    # Gather and sum of attention and feed-forward; again but for the last sum.
    layers = {
        "self": (2 * 2 * backward + (3 if is_step else 0)) * along_tensor
        + (2 * backward - 1 if not is_step else 3) * _exchanges(config, mesh, rows),
    }
    layers["cross"] = (3 * 2 * backward + (5 if is_step else 0)) * along_tensor + (
        1 if not is_step else 3
    ) * 2 * _exchanges(config, mesh, rows)
    sent = config.num_encoder_layers * layers["self"]
    if family == "translator":
        sent += config.num_decoder_layers * layers["cross"]
        sent += backward * along_tensor  # the encoder's result, for all layers of the decoder
    else:
        sent += config.num_decoder_layers * layers["self"]
    # The sum of the looked-up parts of the table, and the input of the logits.
    lookups = 2 if family == "translator" else 1
    sent += lookups * backward * along_tensor
    if family == "bert":
        masked = rows * PREDICTED * config.d_model * HALF
        sent += backward * 2 * ring(masked, mesh.tensor * mesh.sequence)
        sent += 3 * 2 * ring(rows * PREDICTED * FULL, mesh.tensor)
    else:
        sent += backward * along_tensor
        # The largest logit, the sum of exponentials and the label's logit of each position.
        sent += 3 * 2 * ring(rows * LENGTH / mesh.sequence * FULL, mesh.tensor)
    return sent


def _exchanges(config: TransformerConfig, mesh: Mesh, rows: float) -> float:
    """Bytes of an exchange of queries, keys, values and results along "sequence"."""
    parts = mesh.tensor * mesh.sequence
    kv_heads = math.lcm(config.kv_heads, parts)
    heads = (2 * config.num_heads + 2 * kv_heads) / mesh.tensor
    each = rows * LENGTH / mesh.sequence * config.key_size * HALF
    return ring(heads * each, mesh.sequence)


def _positions(family: str) -> int:
    """Rows x positions x layers."""
    config = CONFIGS[family]
    return ROWS * LENGTH * (config.num_encoder_layers + config.num_decoder_layers)


def _products(family: str, config: TransformerConfig) -> tuple[float, float]:
    """FLOPs of the products with weights in all blocks, and in the head, for all rows."""
    width = config.num_heads * config.key_size
    kv_width = config.kv_heads * config.key_size
    attention = 2 * config.d_model * (2 * width + 2 * kv_width)
    matrices = 3 if config.feed_forward.gated else 2
    feed_forward = 2 * matrices * config.d_model * config.d_ff
    positions = ROWS * LENGTH
    layers = config.num_encoder_layers + config.num_decoder_layers
    blocks = positions * layers * (attention + feed_forward)
    if family == "translator":
        blocks += positions * config.num_decoder_layers * attention
    if family == "bert":
        predicted = ROWS * PREDICTED
        return blocks, 2 * predicted * config.d_model * (config.d_model + config.vocab_size)
    return blocks, 2 * positions * config.d_model * config.vocab_size


def _temporaries(
    cell: Cell, config: TransformerConfig, mesh: Mesh, parameters: list[Parameter], rows: float
) -> float:
    """Bytes of parameters and activations that are alive together.

    Inputs of blocks, and what two layers or the logits take: their values and the gradients of
    these. Gathered parameters: all of them, or with "use" those of two layers or of the table.
    """
    is_step = cell.program == "train"
    positions = rows * LENGTH / mesh.sequence
    inputs = positions / mesh.tensor * config.d_model * HALF
    layers = config.num_encoder_layers + config.num_decoder_layers
    width = (2 * config.num_heads + 2 * config.kv_heads) * config.key_size
    matrices = 3 if config.feed_forward.gated else 2
    layer = (2 * config.d_model + (width + matrices * config.d_ff) / mesh.tensor) * positions * HALF
    predicted = rows * PREDICTED if cell.family == "bert" else positions
    logits = predicted * config.vocab_size / mesh.tensor * (FULL + HALF)
    gathered = {x.path: HALF * x.part for x in parameters if x.parts > 1}
    gradients = {x.path: FULL * x.part for x in parameters if is_step}
    in_blocks = {x.path for x in parameters if x.in_block}
    share = 2 / layers if cell.gather_at == "use" else 1
    moved = sum(size for path, size in gathered.items() if path not in in_blocks)
    moved += share * sum(size for path, size in gathered.items() if path in in_blocks)
    whole = sum(size for path, size in gradients.items() if path not in in_blocks)
    whole += 2 / layers * sum(size for path, size in gradients.items() if path in in_blocks)
    at_once = max((4 if is_step else 2) * layer, 2 * logits if is_step else logits)
    return (layers * inputs if is_step else 0) + at_once + moved + whole


# --- a token of a search ---


def _search(
    cell: Cell, config: TransformerConfig, mesh: Mesh, parameters: list[Parameter]
) -> Needs:
    """The needs of a token. "data" divides the texts, "tensor" and "sequence" divide the heads.

    Each of several beams sees the caches of all beams of its text, of which nothing is moved.
    """
    texts, beams = TEXTS[cell.program], BEAMS if cell.program == "beam" else 1
    is_translator = cell.family == "translator"
    rows = texts * beams / (mesh.data if texts % mesh.data == 0 else 1)
    layers = config.num_decoder_layers
    parts = mesh.tensor * mesh.sequence
    of_row = 2 * CACHE * config.kv_heads * config.key_size * HALF / parts
    caches = layers * rows * of_row * (1 + is_translator / beams)
    read_weights = [x for x in parameters if _is_read(x, config, is_translator)]
    # Float32 numbers that are written, and read twice: their sum of exponentials, and the rest.
    keys = CACHE * (beams + is_translator)
    scores = rows * config.num_heads / parts * keys * FULL
    logits = rows * config.vocab_size / mesh.tensor * FULL
    # Ids and log-probabilities of the open and the closed hypotheses, and who wrote each token.
    histories = rows * CACHE * (2 * FULL * 2 + FULL * beams) if beams > 1 or is_translator else 0
    read = sum(x.kept * HALF for x in read_weights) + caches
    read += layers * 3 * scores + 3 * logits + 2 * histories

    # A TPU's product has 8 rows at least.
    computed = rows if cell.machine == "h100" else max(rows, 8)
    hidden = computed * config.d_model * HALF
    sublayers = 3 if is_translator else 2
    sent = (layers * sublayers + 1) * 2 * ring(hidden, mesh.tensor)
    if beams == 1 and not is_translator:
        sent += ring(logits * mesh.tensor, mesh.tensor)  # where the sampler sorts all logits
    # A matrix divided along "fsdp" or "sequence" stays where it is: its results are added up.
    sent += sum(2 * ring(computed * x.outputs * HALF, x.parts) for x in read_weights)

    kept = sum(x.kept * (HALF if _is_rounded(x) else FULL) for x in parameters)
    live = kept + caches + 2 * histories + 4 * logits + 2 * scores
    if cell.machine == "h100":
        live += _CUBLAS_MEMORY
    return Needs(sent, 0.0, live, read)


def _is_read(x: Parameter, config: TransformerConfig, is_translator: bool) -> bool:
    """Whether a token's products read the matrix: no rows of tables, nothing of the source."""
    of_source = x.path.startswith("encoder/") or re.search("cross_attention/(key|value)", x.path)
    is_table = x.path.endswith("table") and config.embeddings.tied == "none"
    return _is_rounded(x) and not is_table and not (is_translator and of_source)


def _is_rounded(x: Parameter) -> bool:
    """Whether a search keeps the parameter in 16 bits."""
    return x.is_matrix and "positions" not in x.path and not x.path.endswith("bias")
