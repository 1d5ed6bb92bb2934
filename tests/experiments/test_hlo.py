"""Programs read from their text: how often instructions run, what they compute, move and send."""

import jax
import jax.numpy as jnp
import pytest

from experiments.harness.planning.collectives import collectives, dearest_collectives
from experiments.harness.planning.compiling import AttentionCall, PlannedProgram
from experiments.harness.planning.hlo import Program, Shape, group_size
from experiments.harness.planning.largest_arrays import largest_arrays
from experiments.harness.planning.report import describe, describe_step
from experiments.harness.planning.schedules import Schedule
from experiments.harness.planning.step_time import step_time
from experiments.harness.planning.work import work
from experiments.harness.training import Cost
from jaxformer.ops.attention import AttentionSpec, DeviceInfo, explain

# As a TPU's compiler writes it: the loop says no trip count, one collective is spread over two
# kernels, all gathers have one channel, a fusion without a name of its own sums and slices, a
# batched product is a convolution with dilation, a custom call goes over several lines.
TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%fused.start (p0: bf16[6,128]) -> (bf16[24,128], u32[]) {
  %p0 = bf16[6,128]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.1 = bf16[24,128]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=1, replica_groups=[4,4]<=[16], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %steps.1 = (bf16[24,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%gather.1), custom_call_target="Steps"
}

%fused.product (p0: bf16[6,128], p1: bf16[3,5,7], p2: bf16[3,11,7]) -> bf16[3,5,11] {
  %p0 = bf16[6,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[3,5,7]{2,1,0:T(8,128)(2,1)} parameter(1)
  %p2 = bf16[3,11,7]{2,1,0:T(8,128)(2,1)} parameter(2)
  %gather.2 = bf16[24,128]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=1, replica_groups=[4,4]<=[16], dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %product = bf16[3,5,11]{2,1,0:T(8,128)(2,1)} convolution(%p1, %p2), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0oi->0bf, metadata={op_name="jit(step)/while/body/jvp(Net)/blocks_3/up/dot_general"}
}

%fused.part (p0: f32[40,1000,128], p1: s32[]) -> f32[1000,128] {
  %p0 = f32[40,1000,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %part = f32[1,1000,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,1000,128}
  ROOT %view = f32[1000,128]{1,0:T(8,128)} bitcast(%part)
}

%fused.other (p0: bf16[6,128]) -> (bf16[24,128], u32[]) {
  %p0 = bf16[6,128]{1,0:T(8,128)(2,1)} parameter(0)
  %gather.3 = bf16[24,128]{1,0:T(8,128)(2,1)} all-gather(%p0), channel_id=1, replica_groups=[4,4]<=[16], dimensions={0}, frontend_attributes={chain_id="1"}
  ROOT %steps.2 = (bf16[24,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%gather.3), custom_call_target="Steps"
}

%all-reduce-scatter.3.clone (p0: f32[28,11]) -> f32[7,11] {
  %p0 = f32[28,11]{1,0:T(8,128)} parameter(0)
  %whole = f32[28,11]{1,0:T(8,128)} all-reduce(%p0), channel_id=5, replica_groups=[4,4]<=[16], to_apply=%add.1
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %own = f32[7,11]{1,0:T(8,128)} dynamic-slice(%whole, %zero.1, %zero.1), dynamic_slice_sizes={7,11}
}

%body.1 (t: (s32[], bf16[6,128])) -> (s32[], bf16[6,128]) {
  %t = (s32[]{:T(128)}, bf16[6,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %w = bf16[6,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %q = bf16[3,5,7]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %k = bf16[3,11,7]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%w)
  %start = (bf16[24,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%fused.start, backend_config={"estimated_cycles":"100"}
  %up = bf16[3,5,11]{2,1,0:T(8,128)(2,1)} fusion(%w, %q, %k), kind=kOutput, calls=%fused.product, metadata={op_name="jit(step)/while/body/jvp(Net)/blocks_3/up/dot_general"}, backend_config={"estimated_cycles":"1000"}
  %start.1 = (bf16[24,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%fused.other
  %fusion.9 = f32[7,11]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.3.clone
  %turned = bf16[3,5,11]{1,2,0:T(8,128)(2,1)} copy(%up)
  %same = bf16[3,5,11]{1,2,0:T(8,128)(2,1)} copy(%turned)
  %sums = (f32[5]{0:T(128)}, bf16[11]{0:T(256)}) all-reduce(%f, %b), channel_id=9, replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=2] {'data','tensor'}, to_apply=%add.1
  ROOT %next = (s32[]{:T(128)}, bf16[6,128]{1,0:T(8,128)(2,1)}) tuple(%i, %w)
}

%condition.1 (t: (s32[], bf16[6,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(40)
  %t.1 = (s32[]{:T(128)}, bf16[6,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (a: f32[40,1000,128]) -> f32[1000,128] {
  %a = f32[40,1000,128]{2,1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %first = f32[1000,128]{1,0:T(8,128)} fusion(%a, %zero), kind=kLoop, calls=%fused.part
  %flash = bf16[3,4,1024,64]{3,2,1,0:T(8,128)(2,1)} custom-call(%q1, %k1, %v1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block_q": 512
}}, metadata={op_name="jit(step)/jvp(Net)/splash_mha_fwd_residuals/pallas_call"}
  %q1 = bf16[3,4,1024,64]{3,2,1,0:T(8,128)(2,1)} bitcast(%a)
  %k1 = bf16[3,4,1024,64]{3,2,1,0:T(8,128)(2,1)} bitcast(%a)
  %v1 = bf16[3,4,1024,64]{3,2,1,0:T(8,128)(2,1)} bitcast(%a)
  %loop = (s32[]{:T(128)}, bf16[6,128]{1,0:T(8,128)(2,1)}) while(%init), condition=%condition.1, body=%body.1
  %scatter = (f32[8]{0:T(128)}, f32[2]{0:T(128)}) reduce-scatter-start(%zero), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add.1
  ROOT %out = f32[1000,128]{1,0:T(8,128)} reduce-scatter-done(%scatter)
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def tpu():
    return Program(TPU)


def test_a_loop_runs_as_often_as_its_condition_says(tpu):
    times = {run.instruction.name: run.times for run in tpu.executed}
    assert (times["first"], times["up"], times["scatter"]) == (1, 40, 1)
    assert tpu.devices == 16 and not tpu.unknown_loops
    unbounded = Program(TPU.replace("constant(40)", "parameter(1)"))
    counted = "  %two = s32[] constant(2)\n  %next.i = s32[] add(%i, %two)\n  ROOT %next = "
    by_two = TPU.replace("  ROOT %next = ", counted).replace("tuple(%i, %w)", "tuple(%next.i, %w)")
    for bound, passes in ((40, 20), (41, 21)):
        program = Program(by_two.replace("constant(40)", f"constant({bound})"))
        assert {run.times for run in program.executed if run.loops} == {passes}
    assert unbounded.unknown_loops == {"body.1"}


def test_a_collective_spread_over_kernels_is_one_and_another_of_its_channel_is_not(tpu):
    moved = collectives(tpu)
    times = [(each.kind, each.times) for each in moved]
    assert sorted(times) == [
        *2 * [("all-gather", 40)],
        ("all-reduce", 40),
        ("reduce-scatter", 1),
        ("reduce-scatter", 40),
    ]
    by_kind = {each.kind: each for each in moved if each.dtype != "f32"}
    gather, reduce = by_kind["all-gather"], by_kind["all-reduce"]
    assert (gather.bytes, gather.devices, gather.asynchronous) == (24 * 128 * 2, 4, True)
    assert (reduce.devices, reduce.asynchronous, reduce.in_loop) == (4, False, True)
    assert reduce.bytes == 5 * 4 + 11 * 2
    assert gather.sent == 40 * gather.bytes * 3 / 4
    assert reduce.sent == 2 * 40 * reduce.bytes * 3 / 4


def test_a_sum_of_which_a_fusion_keeps_a_slice_is_a_reduce_scatter(tpu):
    fused, scatter = (x for x in collectives(tpu) if x.kind == "reduce-scatter")
    assert (fused.bytes, fused.devices, fused.asynchronous) == (28 * 11 * 4, 4, False)
    assert fused.sent == 40 * fused.bytes * 3 / 4
    assert (scatter.devices, scatter.asynchronous, scatter.in_loop) == (4, True, False)


STARTS = """
HloModule gpu, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[8,64]) -> bf16[2,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %a = ((bf16[8,64]{1,0}), bf16[8,64]{1,0}) all-to-all-start(%p), replica_groups=[2,4]<=[8]
  %b = bf16[8,64]{1,0} all-to-all-done(%a)
  %c = bf16[8,64]{1,0} all-reduce-start(%b), replica_groups=[2,4]<=[8]
  %d = bf16[8,64]{1,0} all-reduce-done(%c)
  %e = ((bf16[8,64]{1,0}), bf16[2,64]{1,0}) reduce-scatter-start(%d), replica_groups=[2,4]<=[8]
  ROOT %f = bf16[2,64]{1,0} reduce-scatter-done(%e)
}
"""


def test_a_start_that_returns_its_operands_too_moves_them_once():
    moved = collectives(Program(STARTS))
    assert {(each.kind, each.bytes) for each in moved} == {
        (kind, 8 * 64 * 2) for kind in ("all-to-all", "all-reduce", "reduce-scatter")
    }


CHOICES = """
HloModule search, is_scheduled=true, num_partitions=4

%cheap (p: f32[8,64]) -> f32[8,64] {
  ROOT %p = f32[8,64]{1,0} parameter(0)
}

%small (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %a = f32[8,64]{1,0} all-to-all(%p), replica_groups=[1,4]<=[4]
}

%inner (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %f = f32[8,64]{1,0} all-reduce(%p), replica_groups=[1,4]<=[4]
}

%large (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %b = f32[32,64]{1,0} all-gather(%p), replica_groups=[1,4]<=[4]
  ROOT %c = f32[8,64]{1,0} conditional(%i, %p, %p), branch_computations={%cheap, %inner}
}

ENTRY %main (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %i = s32[] constant(1)
  %d = f32[8,64]{1,0} conditional(%i, %p, %p), branch_computations={%small, %large}
  ROOT %e = f32[8,64]{1,0} conditional(%i, %p, %p), branch_computations={%cheap, %cheap}
}
"""


def test_of_a_choice_the_computation_that_sends_most_counts():
    program = Program(CHOICES)
    kinds = [each.kind for each in dearest_collectives(program)]
    assert kinds == ["all-gather", "all-reduce"]  # the second is within the choice of the first
    assert len(collectives(program)) == 3


def test_tiles_are_padded_and_memory_on_the_chip_is_known():
    shape = Shape("bf16", (12, 1024, 65), "1,2,0:T(8,128)(2,1)S(1)")
    assert shape.padded_bytes == 12 * 1024 * 72 * 2 and shape.on_chip
    assert Shape("f32", (700,), "0:T(1024)").padded_bytes == 4096
    assert Shape("pred", (3, 5)).padded_bytes == 15
    assert Shape("s4", (3, 6)).bytes == 9


def test_the_largest_arrays_are_those_of_loops_too_but_not_of_what_is_fused(tpu):
    assert largest_arrays(tpu, 3) == [
        (3 * 4 * 1024 * 128 * 2, "bf16[3,4,1024,64]", 1),  # 64 padded to 128
        (1000 * 128 * 4, "f32[1000,128]", 1),
        (3 * 16 * 128 * 2, "bf16[3,5,11]", 2),  # of the loop
    ]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("[2,8]<=[16]", 8),
        ("{{0,1,2},{3,4,5}}", 3),
        ("mesh['x'=5,'y'=3] {'x'}", 5),
        ("mesh['x'=5,'y'=3,'z'=7] {'x','y'}", 15),
        ("{}", 0),
    ],
)
def test_groups_are_read_in_each_notation(groups, size):
    assert group_size(f"replica_groups={groups}") == size


SPEC = AttentionSpec(
    batch=3, queries=1024, keys=1024, heads=4, kv_heads=4, key_size=64, value_size=64,
    dtype="bfloat16", causal=True,
)  # fmt: skip


def test_unknown_kernels_take_the_least_flops_at_the_peak_and_what_has_no_cycles_is_added(tpu):
    time = step_time(tpu, "v5e", [SPEC])
    assert time.cycles == 40 * 1_100
    assert time.kernels == pytest.approx(44_000 / 1.5e9)
    seen = 1025 / 2
    assert time.attention_bound == pytest.approx(4 * 3 * 4 * 1024 * 64 * seen / 197e12)
    assert time.attention == 0
    assert time.collectives == pytest.approx(40 * (2 * 42 + 28 * 11 * 4) * 3 / 4 / 0.9e11)
    assert time.total == pytest.approx(time.kernels + time.attention_bound + time.collectives)
    assert step_time(tpu, "v5e", []).attention_bound == 0


def flash(name, kernel, call, again=""):
    """The lines of a program with a kernel of `tpu_flash` in three layers."""
    big, sums = "bf16[3,1024,256]{2,1,0}", "f32[3,2,8,1024]{3,2,1,0}"
    operands, results = "%q, %q, %q", f"{big}, {sums}"
    if kernel == "bwd":
        operands, results = "%q, %q, %q, %q, %s, %q", f"{big}, {big}, {big}"
    facts = f'"block_kv":"512",\n"block_q":"512",\n"call":"{call}",\n"first_key":"0"'
    path = f"jit(step)/transpose(jvp(Net))/{again}tpu_flash_{kernel}/pallas_call"
    rows = [
        f"  %{name}.{layer} = ({results}) custom-call({operands}), "
        f'custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{\n{facts}\n'
        f'}}}}, metadata={{op_name="{path}"}}'
        for layer in range(3)
    ]
    return "\n".join(
        [
            "ENTRY %main () -> f32[] {",
            f"  %q = {big} parameter(0)",
            f"  %s = {sums} parameter(1)",
            *rows,
            "}",
            "",
        ]
    )


def test_kernels_of_ours_take_the_cycles_of_a_schedule_that_equal_ones_share():
    forward = Program(flash("tpu_flash_fwd", "fwd", SPEC))
    schedule = Schedule(steps=24, step=10, fetch=0, block=2_000, masked_block=2_300, row=700)
    time = step_time(forward, "v5e", [SPEC], {"tpu_flash_fwd.1": schedule})
    # 3 examples, 2 groups of heads: rows of 2 steps, one block of keys whole and two masked
    group = 2 * 700 + 4 * 10 + 2_000 + 2 * 2_300
    assert time.attention == pytest.approx(3 * 3 * 2 * group / 1.5e9)
    assert time.attention_bound == 0
    without = step_time(forward, "v5e", [SPEC])
    assert without.attention == 0
    pairs = 3 * 4 * 64 * 1024 * 1025 / 2
    assert without.attention_bound == pytest.approx(3 * 4 * pairs / 197e12)


def test_a_forward_pass_that_is_repeated_in_the_backward_pass_costs_a_forward_pass():
    """`remat` writes it into the backward pass."""
    once = step_time(Program(flash("f", "fwd", SPEC)), "v5e", [SPEC]).attention_bound
    again = Program(flash("f", "fwd", SPEC, again="rematted_computation/"))
    assert step_time(again, "v5e", [SPEC]).attention_bound == once
    backward = Program(flash("b", "bwd", SPEC))
    assert step_time(backward, "v5e", [SPEC]).attention_bound == pytest.approx(2.5 * once)


@pytest.mark.parametrize("name", ["gmm", "tgmm"])
def test_a_product_with_experts_takes_the_flops_of_its_own_estimate_and_is_no_attention(name):
    path = f"jit(step)/jvp(Net)/feed_forward/cond/branch_0_fun/jit({name})/pallas_call"
    estimate = '"cost_estimate":{"flops":"197000","transcendentals":"0"}'
    line = (
        'bf16[3,1024] custom-call(%p0, %p1), custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="{path}"}}, backend_config={{"custom_call_config":{{,{estimate}}}}}'
    )
    time = step_time(only(line, "bf16[3,7]", "bf16[7,1024]"), "v5e", [SPEC])
    assert time.experts == time.total == pytest.approx(1e-9)


def test_work_counts_what_a_loop_runs_as_often_as_it_runs(tpu):
    done = work(tpu)
    # the product [3, 5, 7] x [3, 11, 7], which a TPU writes as a convolution along the batch
    assert done.flops == 40 * 2 * 3 * 5 * 11 * 7
    slice_of_40 = 2 * 1000 * 128 * 4 + 4  # read and written, and an index
    once = Program(TPU.replace("constant(40)", "constant(1)"))
    looped, single = done.bytes, work(once).bytes
    in_loop = (looped - single) / 39
    assert single - in_loop == pytest.approx(slice_of_40 + 4 * 3 * 4 * 1024 * 64 * 2 + 40, abs=64)


def parameters(*shapes):
    return [f"  %p{n} = {shape} parameter({n})" for n, shape in enumerate(shapes)]


def only(line, *shapes):
    """The program of one instruction on parameters p0, p1 and so on of these shapes."""
    text = ["ENTRY %main () -> f32[] {", *parameters(*shapes), f"  ROOT %out = {line}", "}", ""]
    return Program("\n".join(text))


def fusion(result, lines, *shapes):
    """The program of one kernel that fuses `lines`."""
    text = ["%fused () -> f32[] {", *parameters(*shapes), *lines, "}"]
    names = ", ".join(f"%p{n}" for n in range(len(shapes)))
    text += ["ENTRY %main () -> f32[] {", *parameters(*shapes)]
    text += [f"  ROOT %out = {result} fusion({names}), kind=kLoop, calls=%fused", "}", ""]
    return Program("\n".join(text))


HEADS = "window={size=12 pad=11_11 rhs_reversal=1}, dim_labels=fb0_0oi->b0f"


@pytest.mark.parametrize(
    ("line", "shapes", "flops"),
    [
        # a TPU's projection of 12 heads of 64: one of 12 elements of the window meets data
        (
            f"bf16[768,12,64] convolution(%p0, %p1), {HEADS}",
            ("bf16[5120,768,1]", "bf16[12,64,5120]"),
            2 * 768 * 12 * 64 * 5120,
        ),
        (
            "f32[3,5,11] convolution(%p0, %p1), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, "
            "dim_labels=0bf_0oi->0bf",
            ("f32[3,5,7]", "f32[3,11,7]"),
            2 * 3 * 5 * 7 * 11,
        ),
        # 7 results with 3 elements of the window, but for the two at the ends
        (
            "f32[2,7,13] convolution(%p0, %p1), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            ("f32[2,7,5]", "f32[3,5,13]"),
            2 * 2 * (7 * 3 - 2) * 5 * 13,
        ),
        # two axes, of which the second has holes in its window
        (
            "f32[2,4,5,3] convolution(%p0, %p1), window={size=1x2 pad=0_0x0_0 rhs_dilate=1x2}, "
            "dim_labels=b01f_01io->b01f",
            ("f32[2,4,7,11]", "f32[1,2,11,3]"),
            2 * 2 * 4 * 5 * 2 * 11 * 3,
        ),
        (
            "f32[5,11] dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            ("f32[5,7]", "f32[7,11]"),
            2 * 5 * 7 * 11,
        ),
        # the library's call has a second result, its memory
        (
            '(bf16[5,11], s8[4096]) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul",'
            ' backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
            '"lhs_contracting_dimensions":["0","2"],"rhs_contracting_dimensions":["0","1"]}}}',
            ("bf16[7,5,3]", "bf16[7,3,11]"),
            2 * 5 * 11 * 7 * 3,
        ),
    ],
)
def test_a_product_has_two_flops_for_each_pair_of_elements_that_meet(line, shapes, flops):
    assert work(only(line, *shapes)).flops == flops


LOGITS = "bf16[12,1024,50304]"
LABELS = "s32[12,1024,1]"


@pytest.mark.parametrize(
    ("result", "lines", "shapes", "moved"),
    [
        # the labels' logits: a gather of converted ones
        (
            "f32[12,1024]",
            [
                "  %wide = f32[12,1024,50304] convert(%p0)",
                "  %cut = f32[12,1024,50257] slice(%wide), slice={[0:12], [0:1024], [0:50257]}",
                "  ROOT %one = f32[12,1024] gather(%cut, %p1), slice_sizes={1,1,1}",
            ],
            (LOGITS, LABELS),
            12 * 1024 * (2 + 4 + 4),
        ),
        # which are also summed
        (
            "(f32[12,1024], f32[12,1024])",
            [
                "  %wide = f32[12,1024,50304] convert(%p0)",
                "  %one = f32[12,1024] gather(%wide, %p1), slice_sizes={1,1,1}",
                "  %sum = f32[12,1024] reduce(%wide), dimensions={2}",
                "  ROOT %both = (f32[12,1024], f32[12,1024]) tuple(%one, %sum)",
            ],
            (LOGITS, LABELS),
            12 * 1024 * (2 * 50304 + 4 + 2 * 4),
        ),
        # a row of a cache is written where it is
        (
            "bf16[32,128,64]",
            [
                "  %low = bf16[32,1,64] convert(%p1)",
                "  ROOT %new = bf16[32,128,64] dynamic-update-slice(%p0, %low, %p2, %p2, %p2)",
            ],
            ("bf16[32,128,64]", "f32[32,1,64]", "s32[]"),
            32 * 64 * (2 + 4) + 4,
        ),
        # two rows, one after the other, and a view
        (
            "bf16[32,8192]",
            [
                "  %first = bf16[32,128,64] dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)",
                "  %next = bf16[32,128,64] dynamic-update-slice(%first, %p1, %p2, %p2, %p2)",
                "  ROOT %view = bf16[32,8192] bitcast(%next)",
            ],
            ("bf16[32,128,64]", "bf16[32,1,64]", "s32[]"),
            32 * 64 * (2 * 2 + 2) + 4,
        ),
        # a new array is written whole
        (
            "f32[16,64]",
            [
                "  %zeros = f32[16,64] broadcast(%p1), dimensions={}",
                "  ROOT %new = f32[16,64] dynamic-update-slice(%zeros, %p0, %p2, %p2)",
            ],
            ("f32[1,64]", "f32[]", "s32[]"),
            16 * 64 * 4 + 64 * 4 + 4 + 4,
        ),
    ],
)
def test_a_kernel_moves_the_parts_that_it_reads_and_writes(result, lines, shapes, moved):
    assert work(fusion(result, lines, *shapes)).bytes == moved


def test_an_update_alone_moves_what_is_new():
    shapes = "f32[128,64]", "f32[3,64]", "s32[]"
    line = "f32[128,64] dynamic-update-slice(%p0, %p1, %p2, %p2)"
    assert work(only(line, *shapes)).bytes == 2 * 3 * 64 * 4
    line = "f32[128,64] scatter(%p0, %p2, %p1), to_apply=%add"
    assert work(only(line, *shapes)).bytes == 2 * 3 * 64 * 4


def test_the_memory_that_a_product_of_cublas_works_in_is_not_moved():
    line = '(bf16[5,11], s8[4096]) custom-call(%p0, %p1), custom_call_target="__cublas$gemm"'
    shapes = "bf16[5,7]", "bf16[7,11]"
    assert work(only(line, *shapes)).bytes == 2 * (5 * 7 + 7 * 11 + 5 * 11)


def test_what_goes_to_another_slice_takes_the_time_of_the_network():
    slices = "  %sent = (f32[1000,128], u32[]) send(%a), channel_id=3, is_host_transfer=true\n"
    program = Program(f"ENTRY %main (a: f32[9]) -> f32[9] {{\n{slices}}}\n")
    time = step_time(program, "v5e", ())
    assert time.total == time.between_slices == pytest.approx(512_000 / 3.125e9)


def test_a_report_says_what_the_program_holds(tpu):
    explanation = explain(SPEC, DeviceInfo("tpu", "TPU v5 lite"))
    call = AttentionCall("blockwise", SPEC, explanation)
    step = PlannedProgram("step", 2**30, 0, 2**33, [call], tpu)
    lines = [*describe(step, "v5e").splitlines()]
    lines += describe_step(step, "v5e", Cost(1_000, int(197e11)), 2, "bfloat16").splitlines()
    assert max(map(len, lines)) <= 80
    time = step_time(tpu, "v5e", [SPEC])
    for line in (
        "step                9.66 GB of 16.91 GB that JAX may use on v5e: fits",
        "  of these          state and batch 1.07 GB, temporary 8.59 GB, new results 0 B",
        "  largest arrays      3.15 MB      1 x bf16[3,4,1024,64]",
        "  attention         blockwise, for B=3 T=1024 S=1024 N=4 K=4 H=64 Hv=64 bfloat16",
        "                    auto takes tpu_flash",
        "  collectives       all-gather bf16: 80 times, 491.52 kB, 4 devices,",
        "work per step       1.970e+13 FLOPs by the equations",
        "  of the program    1.848e+05 FLOPs of products on all devices, without kernels",
        f"  attention kernels {time.attention_bound:.3g} s, at least: their FLOPs at the peak",
    ):
        assert line in lines, (line, lines)
    assert f"MFU {197e11 / time.total / (2 * 197e12):.1%}" in lines[-1]


def test_a_program_of_this_machine_is_read():
    def steps(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    shapes = jax.ShapeDtypeStruct((2, 13), "float32"), jax.ShapeDtypeStruct((5, 13, 13), "float32")
    options = {"xla_backend_optimization_level": 0}
    program = Program(jax.jit(steps).lower(*shapes).compile(options).as_text())
    (sine,) = (run for run in program.executed if "sin" in run.instruction.op_name.split("/"))
    assert (str(sine.instruction.shapes[0]), sine.times) == ("f32[2,13]", 5)
    assert not program.unknown_loops
    assert work(program).flops == 5 * 2 * 2 * 13 * 13
