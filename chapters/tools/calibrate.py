"""Where the ledger's constants come from: kernel times that others measured, or a run on this machine.

    fit            the H100's constants from chapters/data (`calibrate.py --fit` prints every error)
    calibrate      the constants of this machine and one model, from the StepRecords of the real engine
    reality_check  the simulator against the engine here, on a workload that it was not calibrated with
                   (`python chapters/tools/calibrate.py`)

Both search for the numbers that bring the ledger's estimate nearest to what was measured.  ledger.py itself never looks
at a measurement, so that the reader can follow it with a pencil.
"""
import argparse
import csv
import functools
import math
import pathlib
import sys
import time
from dataclasses import replace

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE)]

import bench  # noqa: E402
from givens import CALIBRATED_H100, AttentionCost, Calibration, Cost, ModelShape, this_machine  # noqa: E402
from ledger import Ledger, work_of  # noqa: E402
from metrics import percentile  # noqa: E402
from options import end_quietly  # noqa: E402
from simulator import SimulatedEngine  # noqa: E402

# The measurement's name -> ours.
MEASURED = {"attn_pre_proj": "qkv_proj", "attn_post_proj": "o_proj", "mlp_up_proj": "gate_up_proj",
            "mlp_down_proj": "down_proj", "input_layernorm": "norm", "post_attention_layernorm": "norm",
            "attn_rope": "rope", "mlp_act": "silu_and_mul", "add": "residual_add"}


@functools.cache
def read_csv(name):
    with open(HERE.parent / "data" / name) as file:
        return list(csv.DictReader(file))


def measured_ops():
    """{(measured name, tokens): seconds} of one layer of the 70B on one of eight H100s."""
    return {(row["op"], int(row["num_tokens"])): float(row["median_us"]) / 1e6
            for row in read_csv("h100_llama70b_tp8_ops.csv") if row["op"] in MEASURED}


def estimated_ops(calibration, keys):
    """The same table, estimated."""
    ledger = Ledger(calibration=calibration)
    ops = {T: {op.name: ledger.seconds(op) for op in ledger.layer_ops(T)} for T in {T for _, T in keys}}
    return {(name, T): ops[T][MEASURED[name]] for name, T in keys}


def layer_seconds(table):
    """{tokens: seconds of the whole layer}; a layer adds to the residual twice, the measurement names it once."""
    total = dict.fromkeys([T for _, T in table], 0.0)
    for (name, T), seconds in table.items():
        total[T] += seconds * (2 if name == "add" else 1)
    return total


def measured_attention():
    """[(chunks, seconds)] of one layer's attention, 8 query heads on 1 KV head: decodes, then prefills."""
    decode = [([(int(row["context"]) - 1, 1)] * int(row["batch"]), float(row["us"]) / 1e6)
              for row in read_csv("h100_vllm_decode_attention_tp8.csv")]
    return decode, [([(int(row["cached_tokens"]), int(row["new_tokens"]))] * int(row["batch"]), float(row["us"]) / 1e6)
                    for row in read_csv("h100_vllm_prefill_attention_tp8.csv")]


def attention_errors(cost, rows):
    """[estimated / measured]; the operators depend on the sizes alone, so they are made once."""
    ledger = Ledger(calibration=replace(CALIBRATED_H100, attention=AttentionCost(*cost)))
    return [ledger.seconds(op) / seconds for op, seconds in rows]


def measured_all_reduces():
    """[(bytes, seconds)] over eight GPUs, each where vLLM uses it: its own below 8 MiB, from there on NCCL's."""
    own = [(int(row["bytes"]), float(row["us_in_graph"]) / 1e6) for row in read_csv(
        "h100_vllm_custom_allreduce_8gpu.csv")]
    nccl = [(int(row["bytes"]), float(row["median_us"]) / 1e6) for row in read_csv("h100_dgx_allreduce_8gpu.csv")]
    return [row for row in own if row[0] < 8 << 20] + [row for row in nccl if row[0] >= 8 << 20]


def all_reduce_errors(calibration):
    """{bytes: estimated / measured}."""
    ledger = Ledger(calibration=calibration)
    return {size: ledger.seconds(*ledger.all_reduce("", size / 2, 2 * 7 / 8)) / seconds
            for size, seconds in measured_all_reduces()}


def pattern_search(loss, start):
    """Positive numbers at a minimum of `loss`: each one a step up or down, the step halved when nothing helps."""
    x, best, step = [math.log(value) for value in start], loss(start), 0.3
    while step > 1e-5:
        for i, delta in [(i, sign * step) for i in range(len(x)) for sign in (1, -1)]:
            trial = [value + delta * (i == j) for j, value in enumerate(x)]
            value = loss([math.exp(v) for v in trial])
            if value < best - 1e-12:
                x, best = trial, value
                break
        else:
            step /= 2
    return [float(f"{math.exp(v):.3g}") for v in x]


def squared_logs(ratios):
    return sum(math.log(ratio) ** 2 for ratio in ratios)


@functools.cache
def fit():
    """The Calibration that chapters/data asks for: seven numbers for the operators of a layer, four for attention, two
    for each all-reduce.

    Each search minimises squared log errors.  Of the operators, small ones count a tenth (some take 1 us, measured in
    whole microseconds), and the whole layer fifty times, since the layer is what a step adds up."""
    measured = measured_ops()
    layers = layer_seconds(measured)

    def operators(x):
        return replace(CALIBRATED_H100, gemm=Cost(*x[0:2]), norm=Cost(*x[2:4]), elementwise=Cost(*x[4:6]),
                       smoothness=x[6])

    def loss(x):
        table = estimated_ops(operators(x), measured)
        return (sum(math.log(table[key] / measured[key]) ** 2 * (1 if "proj" in key[0] else 0.1) for key in measured)
                + 50 * squared_logs(seconds / layers[T] for T, seconds in layer_seconds(table).items()))

    fitted = operators(pattern_search(loss, [5e-6, 0.7, 4e-6, 0.4, 1e-6, 0.6, 3]))
    for kind, start in (("one_shot", [5e-6, 0.7]), ("two_shot", [1e-5, 0.8]), ("nccl", [3e-5, 0.8])):
        fitted = replace(fitted, **{kind: Cost(*pattern_search(lambda x: squared_logs(all_reduce_errors(
            replace(fitted, **{kind: Cost(*x)})).values()), start))})
    rows = [(Ledger().attention_op(work_of(chunks)), seconds) for chunks, seconds in sum(measured_attention(), [])]
    attention = pattern_search(lambda x: squared_logs(attention_errors(x, rows)), [1e-5, 3e-8, 0.9, 0.6])
    return replace(fitted, attention=AttentionCost(*attention))


def work_of_record(record):
    """The Work of a StepRecord."""
    chunks = [(request.computed, request.scheduled) for request in record.requests]
    return work_of(chunks, sum(request.sampled is not None for request in record.requests))


def calibrate(ledger, *runs):
    """A Calibration for `ledger` from StepRecords of the real engine: a small model's step is mostly on no datasheet.

    Four numbers: the share of the peaks that attention reaches, and all else; seconds a step, and a request.  With
    nothing else in it a step's time is linear in (1/share, 1/share, seconds, seconds), so least squares of the relative
    error finds them, none below 0.  `runs` repeat one workload: of each step the fastest counts, as noise only adds.
    The workload should have few long requests and many short ones, or the four cannot be told apart."""
    ideal = ledger.with_costs(**vars(plain(Cost(0, 1), 1)))
    rows = []
    for steps in zip(*runs):
        work, seconds = work_of_record(steps[0]), min(step.duration for step in steps)
        attention = ideal.total_seconds([ideal.attention_op(work)])
        parts = (ideal.step_time(work) - attention, attention, 1.0, work.requests)
        rows.append([part / seconds for part in parts])
    rest, attention, step, request = non_negative_least_squares(rows)
    return plain(Cost(0, 1 / rest if rest else math.inf), 1 / attention if attention else math.inf, step, request)


def plain(cost, attention, step_overhead=0.0, request_overhead=0.0):
    """A Calibration with one cost for all operators, and for attention the share `attention` of both peaks."""
    return Calibration(cost, cost, cost, AttentionCost(0, 0, attention, attention), cost, cost, cost, smoothness=1,
                       step_overhead=step_overhead, request_overhead=request_overhead)


def non_negative_least_squares(rows):
    """x >= 0 with the least sum of (row . x - 1)^2, one number at a time, each to its best value given the others."""
    size = range(len(rows[0]))
    square = [[sum(row[i] * row[j] for row in rows) for j in size] for i in size]
    linear, x = [sum(row[i] for row in rows) for i in size], [0.0 for _ in size]
    for _ in range(20_000):
        for i in size:
            others = sum(square[i][j] * x[j] for j in size if j != i)
            x[i] = max(0.0, (linear[i] - others) / square[i][i])
    return x


def reality_check(model=None, repetitions=3):
    """The engine on this CPU with one thread, and the simulator calibrated to it, on requests that are new to it.

    Returns (measured, simulated) seconds over all steps and the two numbers of steps.  Seconds are CPU seconds of this
    process, and the two workloads take turns, so that what else the machine does disturbs both alike and little."""
    import torch

    from nano_serve import EMBEDDED_MODEL, EngineArgs, LLMEngine
    model, threads = model or EMBEDDED_MODEL, torch.get_num_threads()
    torch.set_num_threads(1)
    engine = LLMEngine(EngineArgs(model, device="cpu", dtype="float32", max_num_seqs=16, max_num_batched_tokens=512,
                                  num_kv_blocks=1000), clock=time.process_time)
    vocab = engine.config.vocab_size
    few_long = bench.random_requests(4, 700, 24, 0.3, vocab_size=vocab, seed=1)
    many_short = bench.random_requests(24, 40, 24, 0.5, vocab_size=vocab, seed=2)
    workload = bench.random_requests(24, 250, 50, 0.5, prefix_len=64, vocab_size=vocab, seed=3)
    calibration_runs, measured_runs = [], []
    try:
        for _ in range(repetitions):
            for requests, runs in ((few_long + many_short, calibration_runs), (workload, measured_runs)):
                bench.warm_up(engine, requests[0], 1)
                bench.run(engine, requests, [0.0] * len(requests))
                runs.append(list(engine.records))
    finally:
        engine.close()
        torch.set_num_threads(threads)
    ledger = Ledger(ModelShape.from_config(model), this_machine(time.process_time), tp=1, dtype_bytes=4)
    ledger = ledger.with_costs(**vars(calibrate(ledger, *calibration_runs)))
    simulated = SimulatedEngine(ledger, engine.scheduler.config, num_kv_blocks=1000)
    _, seconds = bench.run(simulated, workload, [0.0] * len(workload))
    measured = sum(min(step.duration for step in steps) for steps in zip(*measured_runs))
    return measured, seconds, len(measured_runs[0]), simulated.num_steps


def print_fit():
    """The constants, and the error of every estimate in percent."""
    fitted, measured = fit(), measured_ops()
    table = estimated_ops(fitted, measured)
    print(f"{fitted}\n\nestimated / measured - 1, in %, by tokens in the batch:")
    sizes, layers, wanted = sorted({T for _, T in measured}), layer_seconds(table), layer_seconds(measured)
    ratios = {name: [table[name, T] / measured[name, T] for T in sizes] for name in MEASURED}
    print(" " * 26 + "".join(f"{T:6}" for T in sizes))
    for name, row in {**ratios, "the whole layer": [layers[T] / wanted[T] for T in sizes]}.items():
        print(f"{name:26}" + "".join(f"{100 * (ratio - 1):+6.0f}" for ratio in row))
    print("\nall_reduce, by bytes a rank: " + "  ".join(
        f"{size}: {100 * (ratio - 1):+.0f}" for size, ratio in all_reduce_errors(fitted).items()))
    for name, rows in zip(("decode", "prefill"), measured_attention()):
        print(f"\n{name} attention, by requests x (tokens before + new tokens):")
        ratios = attention_errors(fitted.attention, [(Ledger().attention_op(work_of(c)), s) for c, s in rows])
        cells = [f"{len(chunks)} x ({chunks[0][0]} + {chunks[0][1]}): {100 * (ratio - 1):+.0f}"
                 for (chunks, _), ratio in zip(rows, ratios)]
        for at in range(0, len(cells), 5):
            print("".join(f"{cell:24}" for cell in cells[at:at + 5]).rstrip())
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        print(f"{len(rows)} sizes, error {percentile(errors, 50):.0%} at the median, {percentile(errors, 90):.0%} at "
              f"the 90th percentile, {errors[-1]:.0%} at most")


def main(argv=None):
    parser = argparse.ArgumentParser(description=reality_check.__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="instead, fit the H100's constants to chapters/data and "
                                                           "print every error")
    if parser.parse_args(argv).fit:
        print_fit()
        return 0
    measured, simulated, steps, simulated_steps = reality_check()
    print(f"measured {measured:.3f} s of CPU in {steps} steps, simulated {simulated:.3f} s in {simulated_steps}: "
          f"{simulated / measured - 1:+.1%}")
    return 0


if __name__ == "__main__":
    end_quietly()
    sys.exit(main())
