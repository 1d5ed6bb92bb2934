"""Flash attention in a TPU's program: the blocks, FLOPs and cycles of its kernels."""

import pytest

from experiments.harness.planning.flash_kernels import FlashKernel, seen_pairs
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.schedules import Schedule, read_schedule
from jaxformer.ops.attention import AttentionSpec, DeviceInfo
from jaxformer.ops.attention.tpu_flash import plan_of

# Schedules that libtpu 0.0.52 made for v5e of the call of gpt2_124m (12 rows of 1,024, 12 heads of
# 64, documents), with the lines alone that say operands, branches and loops.
FORWARD = """\
     0   :  { %s0 = inlined_call_operand.vmem [shape: bf16[12,1024,768], index: 0] ;; %s1 = inlined_call_operand.vmem [shape: bf16[12,1024,768], index: 1] ;; %s2 = inlined_call_operand.vmem [shape: bf16[12,1024,768], index: 2] ;; %s3 = inlined_call_operand.hbm [shape: s32[12,8,1024], index: 3] }
  0x4b : > { sbr.rel (%p21879_p11) target bundleno = 315 (0x13b), region = 16 }
  0x50 : > { sbr.rel (!%p28801_p4) target bundleno = 154 (0x9a), region = 20 }
  0x9a PF: > { sbr.rel (!%p28842_p5) target bundleno = 228 (0xe4), region = 54 }
  0xe4 PF: > { sbr.rel (!%p28842_p5) target bundleno = 302 (0x12e), region = 88 }
 0x13f : > { sbr.rel (%p1496_p12) target bundleno = 5637 (0x1605), region = 130 }
 0x160 : > { sbr.rel (%p21942_p7) target bundleno = 669 (0x29d), region = 150 }
 0x2a7 : > { sbr.rel (%p2489_p5) target bundleno = 2855 (0xb27), region = 154 }
 0xb29 : > { sbr.rel (%p11099_p12) target bundleno = 5197 (0x144d), region = 158 }
0x1455 : > { sbr.rel (%p23368_p9) target bundleno = 5534 (0x159e), region = 162 }
0x159e PF: > { sbr.rel (!%p28885_p13) target bundleno = 5611 (0x15eb), region = 166 }
0x160d : > { %p1 = scmp.ge.s32.totalorder %s23_s15, 290 /* loop exit test */ }
0x1618 : > { sbr.rel (!%p52449_p12) target bundleno = 21 (0x15), region = 280 }
0x1620 :  { %21610 = vsyncpa [#allocation13 + $0x1], 1 }
"""  # noqa: E501
BACKWARD = """\
     0   :  { %s0 = inlined_call_operand.hbm [shape: bf16[12,1024,768], index: 0] ;; %s1 = inlined_call_operand.hbm [shape: bf16[12,1024,768], index: 1] ;; %s2 = inlined_call_operand.hbm [shape: bf16[12,1024,768], index: 2] ;; %s5 = inlined_call_operand.vmem [shape: bf16[12,1024,768], index: 5] }
  0x6e : > { sbr.rel (%p31768_p3) target bundleno = 307 }
  0x99 : > { sbr.rel (!%p68990_p1) target bundleno = 223 }
  0xec : > { sbr.rel (!%p69000_p6) target bundleno = 307 }
 0x13d : > { sbr.rel (%p1444_p7) target bundleno = 10278 }
 0x17c : > { sbr.rel (%p1708_p5) target bundleno = 642 }
 0x28a : > { sbr.rel (%p31850_p2) target bundleno = 1138 }
 0x48e : > { sbr.rel (%p3759_p4) target bundleno = 5144 }
0x141a : > { sbr.rel (%p15804_p3) target bundleno = 9169 }
0x23d9 : > { sbr.rel (%p34307_p5) target bundleno = 9481 }
0x2513 : > { sbr.rel (%p29211_p6) target bundleno = 9924 }
0x251d : > { %p2 = scmp.ge.s32.totalorder %s29220_s19, 2 /* loop exit test */ }
0x26bf : > { sbr.rel (!%p29217_p8) target bundleno = 9496 }
0x26c4 : > { sbr.rel (!%p40945_p0) target bundleno = 10000 }
0x2710 : > { sbr.rel (!%p40955_p13) target bundleno = 10139 }
0x279b : > { sbr.rel (!%p40955_p13) target bundleno = 10278 }
0x282d : > { %p3 = scmp.ge.s32.totalorder %s33_s3, 290 /* loop exit test */ }
0x283a : > { sbr.rel (!%p30_p0) target bundleno = 32 }
0x2846 :  { }
"""  # noqa: E501
# The backward pass of 16 rows of 512, 4 heads of 64, both ways: each row has one block of keys.
ONE_BLOCK = """\
     0   :  { %s0 = inlined_call_operand.vmem [shape: bf16[16,512,256], index: 0] ;; %s1 = inlined_call_operand.vmem [shape: bf16[16,512,256], index: 1] ;; %s2 = inlined_call_operand.vmem [shape: bf16[16,512,256], index: 2] }
  0x13 : > { sbr.rel (%p30972_p8) target bundleno = 386 (0x182), region = 16 }
  0x18 : > { sbr.rel (!%p37058_p5) target bundleno = 98 (0x62), region = 20 }
  0x62 PF: > { sbr.rel (!%p37058_p5) target bundleno = 172 (0xac), region = 54 }
  0xac PF: > { sbr.rel (!%p37058_p5) target bundleno = 246 (0xf6), region = 88 }
  0xf6 PF: > { sbr.rel (!%p37058_p5) target bundleno = 316 (0x13c), region = 130 }
 0x13c PF: > { sbr.rel (!%p37058_p5) target bundleno = 386 (0x182), region = 164 }
 0x186 : > { sbr.rel (%p1255_p11) target bundleno = 5181 (0x143d), region = 200 }
0x13ab : > { sbr.rel (!%p24835_p5) target bundleno = 5045 (0x13b5), region = 280 }
0x13b5 : > { sbr.rel (!%p24835_p5) target bundleno = 5113 (0x13f9), region = 281 }
0x13f9 : > { sbr.rel (!%p24835_p5) target bundleno = 5181 (0x143d), region = 282 }
0x143e : > { %p1 = scmp.ge.s32.totalorder %s23_s15, 34 /* loop exit test */ }
0x1441 : > { sbr.rel (!%p52449_p12) target bundleno = 8 (0x8), region = 280 }
0x1446 :  { }
"""  # noqa: E501
V5E = DeviceInfo("tpu", "TPU v5 lite")


def test_the_parts_of_a_schedule_are_told_apart_by_their_branches():
    # beginning 317, end 329, result 77 and queries 74; keys and values 74 each
    assert read_schedule(FORWARD) == Schedule(
        steps=288, step=174, fetch=148, block=2176, masked_block=2340, row=317 + 329 + 77 + 74
    )
    # a group: zeros 262, the loop's surroundings 10, two results 139; a row: 488, 304, 76, 141
    assert read_schedule(BACKWARD) == Schedule(
        steps=288,
        step=283,
        fetch=0,
        block=3978,
        masked_block=4023,
        row=488 + 304 + 76 + 141,
        group=262 + 10 + 139 + 139,
        group_block=423,
    )
    assert read_schedule("0x0 : { }") is None


def test_a_step_does_always_the_same_where_a_row_has_one_block_of_keys():
    schedule = read_schedule(ONE_BLOCK)
    assert (schedule.steps, schedule.block, schedule.masked_block) == (32, 0, 0)
    spec = call(batch=16, queries=512, keys=512, causal=False)
    steps = kernel_of(spec, plan_of(spec, V5E, 0.125)).cycles(schedule) / 32
    assert steps == pytest.approx(5177, rel=0.01)


def call(**facts):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 4, "key_size": 64, "value_size": 64}
    return AttentionSpec(**(sizes | {"dtype": "bfloat16", "causal": True} | facts))


CALLS = {
    "causal": call(queries=2048, keys=2048),
    "short": call(queries=384, keys=384),
    "padded": call(queries=1000, keys=1000),
    "both ways": call(queries=1280, keys=1280, causal=False),
    "other keys": call(queries=512, keys=1152, causal=False),
    "window": call(queries=4096, keys=4096, window=700),
    "narrow window": call(queries=1152, keys=1152, window=64),
    "offset": call(queries=640, keys=1664, offset=1024),
    "before": call(queries=1024, keys=1024, offset=-130),
    "shared heads": call(queries=1024, keys=1024, heads=12, kv_heads=3, key_size=128),
    "small heads": call(queries=1024, keys=1024, heads=16, kv_heads=16, key_size=16),
    "wide heads": call(queries=640, keys=640, key_size=256, value_size=256),
}
SCHEDULE = Schedule(1, 241, 151, 2111, 2399, 797, 557, 431)


def kernel_of(spec, tiling, is_backward=True):
    return FlashKernel(
        spec=spec,
        is_backward=is_backward,
        batch=spec.batch,
        queries=tiling.queries,
        keys=tiling.keys,
        query_groups=tiling.key_groups * tiling.share,
        key_groups=tiling.key_groups,
        width=tiling.width,
        block_q=tiling.block_q,
        block_k=tiling.block_k,
        first_key=tiling.first_key,
    )


def walked_cycles(tiling, schedule):
    """The cycles of a row of a batch, step after step of the grid as the kernel decides."""
    groups, share, rows, steps = tiling.grid
    cycles, fetched = 0, None
    for group in range(groups):
        cycles += schedule.group + schedule.group_block * (tiling.keys // tiling.block_k)
        for _ in range(share):
            for i in range(rows):
                cycles += schedule.row
                for step in range(steps):
                    block = tiling.key_block(i, step)
                    cycles += schedule.step + schedule.fetch * (fetched != (group, block))
                    fetched = group, block
                    if tiling.sees(i, step):
                        is_whole = tiling.all_seen(i, block)
                        cycles += schedule.block if is_whole else schedule.masked_block
    return cycles


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("first_key", [0, 512])
def test_the_cycles_are_those_of_a_walk_over_the_grid(name, first_key):
    spec = CALLS[name]
    tiling = plan_of(spec, V5E, 0.125)
    keys = tiling.keys - first_key
    if keys <= 0 or keys % tiling.block_k:
        pytest.skip("the keys have no such part")
    tiling = tiling._replace(first_key=first_key, keys=keys)
    steps = spec.batch * tiling.grid[0] * tiling.grid[1] * tiling.grid[2] * tiling.grid[3]
    schedule = SCHEDULE._replace(steps=steps)
    walked = spec.batch * walked_cycles(tiling, schedule)
    kernel = kernel_of(spec, tiling)
    # heads that share keys may begin with the block that is there
    assert kernel.cycles(schedule) == pytest.approx(walked, rel=0.03)
    # two cores of a chip share the steps
    assert kernel.cycles(schedule._replace(steps=steps // 2)) == kernel.cycles(schedule) / 2


@pytest.mark.parametrize("name", CALLS)
def test_a_query_sees_the_keys_that_its_mask_leaves(name):
    spec = CALLS[name]
    query = [n + (spec.offset or 0) for n in range(spec.queries)]
    least = [0 if spec.window is None else max(n - spec.window + 1, 0) for n in query]
    last = [min(n, spec.keys - 1) if spec.causal else spec.keys - 1 for n in query]
    pairs = sum(max(b - a + 1, 0) for a, b in zip(least, last, strict=True))
    assert seen_pairs(spec) == pairs
    halves = seen_pairs(spec, 0, spec.keys // 2), seen_pairs(spec, spec.keys // 2, spec.keys)
    assert sum(halves) == pairs


def test_a_long_backward_pass_in_parts_of_its_keys_costs_no_more_flops_than_in_one():
    spec = call(batch=1, queries=131_072, keys=131_072, key_size=128, value_size=128)
    tiling = plan_of(spec, DeviceInfo("tpu", "TPU v5"), 0.1)
    parts = [
        kernel_of(spec, tiling._replace(first_key=first, keys=16_384))
        for first in range(0, tiling.keys, 16_384)
    ]
    assert len(parts) == 8
    # five products of the queries with half of the keys, in 4 heads of 128
    expected = 2 * 5 * 4 * 128 * 131_072 * 131_073 / 2
    assert sum(part.flops for part in parts) == pytest.approx(expected)


def test_a_kernel_is_read_from_a_program_and_what_takes_its_results_is_none():
    spec = call(queries=1000, keys=1000, heads=12, kv_heads=4, key_size=64)
    facts = f'"block_kv":"512",\n"block_q":"512",\n"call":"{spec}",\n"first_key":"512"'
    attributes = f"frontend_attributes={{kernel_metadata={{\n{facts}\n}}}}"
    program = Program(
        f"""\
ENTRY %main (q: bf16[2,1024,768]) -> bf16[2,1024,768] {{
  %q = bf16[2,1024,768]{{2,1,0}} parameter(0)
  %k = bf16[2,512,256]{{2,1,0}} parameter(1)
  %v = bf16[2,512,256]{{2,1,0}} parameter(2)
  %out = bf16[2,1024,768]{{2,1,0}} parameter(3)
  %sums = f32[2,6,8,1024]{{3,2,1,0}} parameter(4)
  %d_out = bf16[2,1024,768]{{2,1,0}} parameter(5)
  %flash = (f32[2,1024,768]{{2,1,0}}, bf16[2,512,256]{{2,1,0}}, bf16[2,512,256]{{2,1,0}}) custom-call(%q, %k, %v, %out, %sums, %d_out), custom_call_target="tpu_custom_call", {attributes}
  ROOT %dq = f32[2,1024,768]{{2,1,0}} get-tuple-element(%flash), index=0, {attributes}
}}
"""  # noqa: E501
    )
    kernels = [
        FlashKernel.read(program, run.computation, run.instruction, [CALLS["causal"], spec])
        for run in program.executed
    ]
    assert kernels[:6] == 6 * [None] and kernels[7] is None
    assert kernels[6] == FlashKernel(
        spec=spec,
        is_backward=True,
        batch=2,
        queries=1024,
        keys=512,
        query_groups=6,
        key_groups=2,
        width=128,
        block_q=512,
        block_k=512,
        first_key=512,
    )
