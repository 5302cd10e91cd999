"""Metrics on scripted clocks with exact values, workloads, the send loop, the command."""
import json
import math
import os
import pathlib
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest

import bench
import bench_peers
import metrics
import show
import simulator
from conftest import ROOT
from bench import SampleRequest, arrival_times, random_requests, run
from metrics import RequestFuncOutput, is_good, parse_goodput, percentile, summarize, table
from options import check_folder, check_writable
from request import RequestRefused
from workloads import file_requests


def output(*token_times, start=0.0, prompt_len=10, finish_reason="length", **more):
    return RequestFuncOutput(prompt_len, start, list(token_times), finish_reason, **more)


# --- one request ------------------------------------------------------------------------------------------------------


def test_two_tokens_in_one_chunk():
    """Tokens are counted, not chunks: ITL has N - 1 values, TTFT not among them, and TPOT is their mean."""
    o = output(1.0, 1.1, 1.1, 1.4)
    assert o.ttft == 1.0 and o.output_tokens == 4
    assert o.itls == pytest.approx([0.1, 0.0, 0.3]) and sum(o.itls) == pytest.approx(0.4)
    assert o.tpot == pytest.approx(0.4 / 3) and o.latency == pytest.approx(1.4)


def test_one_token_has_no_tpot_and_none_is_a_failure():
    one, none = output(2.5, start=2.0), output()
    assert one.success and one.ttft == 0.5 and one.itls == [] and one.tpot is None and one.latency == 0.5
    assert not none.success and none.ttft is None and none.tpot is None and none.latency is None
    result = summarize([one, none], 4.0)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (1, 1, 1)
    assert result["mean_tpot_ms"] is None and result["mean_itl_ms"] is None and result["mean_ttft_ms"] == 500.0


@pytest.mark.parametrize("reason,success", [("stop", True), ("length", True), ("abort", False), ("error", False),
                                            (None, False)])
def test_success_needs_a_proper_end(reason, success):
    assert output(1.0, 2.0, finish_reason=reason).success is success
    assert not output(1.0, finish_reason="stop", error="cut off").success


# --- many -------------------------------------------------------------------------------------------------------------


def test_failed_requests_stay_out_of_every_figure():
    """Ten sent: three refused, two cut, one error, four good.  All figures are those of the four alone."""
    good = [output(1.0 + i, 1.5 + i, 2.0 + i, start=float(i)) for i in range(4)]
    bad = ([output(finish_reason=None, error="503", prompt_len=9999) for _ in range(3)]
           + [output(0.01, 50.0, finish_reason=None) for _ in range(2)] + [output(0.02, 99.0, finish_reason="error")])
    mixed, alone = summarize(bad[:3] + good + bad[3:], 10.0, {"ttft": 2000}), summarize(good, 10.0, {"ttft": 2000})
    assert (mixed["completed"], mixed["failed"], alone["failed"]) == (4, 6, 0)
    assert mixed["total_output_tokens"] == 12 and mixed["total_input_tokens"] == 40
    assert mixed["request_throughput"] == 0.4 and mixed["request_goodput"] == 0.4
    per_request = {key for key in mixed if isinstance(mixed[key], list)}
    assert all(mixed[key] == alone[key] for key in mixed if key not in per_request | {"failed"})
    assert mixed["output_lens"] == [0, 0, 0, 3, 3, 3, 3, 0, 0, 0]


def test_all_failed_is_null_not_fast():
    result = summarize([output(finish_reason="error") for _ in range(3)], 5.0)
    assert result["completed"] == 0 and result["request_throughput"] == 0 and result["failed"] == 3
    assert result["mean_ttft_ms"] is None and result["p99_itl_ms"] is None and result["std_e2el_ms"] is None
    assert "Failed requests:                         3" in table(result)


def test_percentiles_by_hand():
    assert [percentile([5, 1, 4, 2, 3], p) for p in (0, 50, 100)] == [1, 3, 5]
    values = list(range(1, 101))
    random.Random(0).shuffle(values)
    assert percentile(values, 99) == pytest.approx(99.01) and percentile(values, 50) == 50.5
    assert {percentile([7.0], p) for p in (0, 1, 50, 99, 100)} == {7.0}
    assert percentile([], 50) is None


def test_percentile_and_std_are_numpys():
    rng = random.Random(1)
    for size in (1, 2, 3, 10, 101):
        values = [rng.expovariate(1) for _ in range(size)]
        for p in (0, 10, 33.3, 50, 90, 99, 99.9, 100):
            assert percentile(values, p) == pytest.approx(numpy.percentile(values, p))
        figures = metrics.statistics_ms("x", values, (99.9,))
        assert figures["std_x_ms"] == pytest.approx(1000 * numpy.std(values), abs=1e-9)
        assert figures["mean_x_ms"] == pytest.approx(1000 * numpy.mean(values))
        assert figures["p99.9_x_ms"] == pytest.approx(1000 * numpy.percentile(values, 99.9))


def test_mean_itl_weighs_tokens_mean_tpot_weighs_requests():
    result = summarize([output(0.0, 1.0), output(0.0, *[0.1 * i for i in range(1, 10)])], 1.0)
    assert result["mean_tpot_ms"] == pytest.approx(1000 * (1.0 + 0.1) / 2)
    assert result["mean_itl_ms"] == pytest.approx(1000 * (1.0 + 0.9) / 10)


def test_throughput_and_peaks():
    """Two requests overlap on [1, 2); the one that starts as the other ends does not overlap it."""
    outputs = [output(0.5, 2.0, start=0.0), output(1.2, 1.4, 1.6, 3.0, start=1.0), output(3.5, start=3.0)]
    result = summarize(outputs, 4.0)
    assert result["output_throughput"] == 7 / 4 and result["total_token_throughput"] == (30 + 7) / 4
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 3                 # seconds [0,1): 1, [1,2): 3, [2,3): 1, [3,4): 2


def test_goodput():
    fast, slow_first, slow_rest = output(0.4, 0.45), output(0.6, 0.65), output(0.4, 0.5)
    slo = {"ttft": 500, "tpot": 60}
    assert [is_good(o, slo) for o in (fast, slow_first, slow_rest)] == [True, False, False]
    assert is_good(output(0.5), {"ttft": 500, "tpot": 0}), "a limit that is met exactly is met; one token has TPOT 0"
    assert is_good(fast, {"e2el": 450}) and not is_good(fast, {"e2el": 449})
    assert summarize([fast, slow_first, slow_rest], 2.0, slo)["request_goodput"] == 0.5
    assert summarize([fast], 2.0)["request_goodput"] is None


def test_parse_goodput():
    assert parse_goodput(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5} and parse_goodput(None) == {}
    for wrong in ("ttft", "ttft:fast", "itl:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError, match=wrong):
            parse_goodput([wrong])


def test_table_has_vllms_lines():
    result = summarize([output(0.5, 0.6, 0.8)], 2.0, {"ttft": 500}, (99,), 4)
    lines = table(result, 4, 2.0, ("ttft", "tpot", "itl")).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    wanted = {"Successful requests:": "1", "Failed requests:": "0", "Maximum request concurrency:": "4",
              "Request rate configured (RPS):": "2.00", "Benchmark duration (s):": "2.00", "Total input tokens:": "10",
              "Total generated tokens:": "3", "Request throughput (req/s):": "0.50", "Request goodput (req/s):": "0.50",
              "Output token throughput (tok/s):": "1.50", "Peak output token throughput (tok/s):": "3.00",
              "Peak concurrent requests:": "1.00", "Total token throughput (tok/s):": "6.50",
              "Mean TTFT (ms):": "500.00", "Median TTFT (ms):": "500.00", "P99 TTFT (ms):": "500.00",
              "Mean TPOT (ms):": "150.00", "Median ITL (ms):": "150.00", "P99 ITL (ms):": "199.00"}
    found = {line[:41].strip(): line[41:].strip() for line in lines if ":" in line}
    assert {key: found.get(key) for key in wanted} == wanted
    assert "---------------Time to First Token----------------" in lines and "End-to-end" not in "\n".join(lines)


# --- workloads and arrivals -------------------------------------------------------------------------------------------


def test_random_requests():
    requests = random_requests(200, 50, 30, 0.2, prefix_len=16, vocab_size=99, seed=3)
    assert requests == random_requests(200, 50, 30, 0.2, prefix_len=16, vocab_size=99, seed=3)
    assert requests != random_requests(200, 50, 30, 0.2, prefix_len=16, vocab_size=99, seed=4)
    own = [len(request.prompt_token_ids) - 16 for request in requests]
    outs = [request.expected_output_len for request in requests]
    assert (min(own), max(own)) == (40, 60) and (min(outs), max(outs)) == (24, 36)
    assert len({tuple(request.prompt_token_ids[:16]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids[16:]) for request in requests}) == 200
    assert {token for request in requests for token in request.prompt_token_ids} == set(range(99))
    assert {len(request.prompt_token_ids) for request in random_requests(9, 5, 5)} == {5}
    with pytest.raises(ValueError, match="range-ratio"):
        random_requests(1, 5, 5, 1.0)


def test_arrivals():
    requests = random_requests(1000, 1, 1)
    assert arrival_times(requests) == [0.0] * 1000
    assert arrival_times(requests[:4], 2, math.inf) == [0.5, 1.0, 1.5, 2.0]
    for burstiness in (1.0, 0.25, 4.0):
        times = arrival_times(requests, 10.0, burstiness, seed=1)
        assert times == sorted(times) and times[-1] == pytest.approx(100.0)
        gaps = [b - a for a, b in zip([0.0] + times, times)]
        # The squared variation of gamma gaps is 1 / burstiness; of a Poisson process' gaps 1.
        assert numpy.var(gaps) / numpy.mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.25)
    assert arrival_times([SampleRequest([1], 1, 3.0), SampleRequest([1], 1, 1.0)], 99) == [3.0, 1.0]
    for rate, burstiness in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="above 0"):
            arrival_times(requests, rate, burstiness)


def test_file_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_token_ids": [3, 4], "output_len": 5, "timestamp": 0.5}\n\n'
                    '{"prompt": "ab", "output_len": 2}\n{"input_len": 7, "output_len": 1}\n')
    first, second, third = file_requests(path, 50, encode=lambda text: [ord(c) for c in text])
    assert first == SampleRequest([3, 4], 5, 0.5) and second == SampleRequest([97, 98], 2)
    assert len(third.prompt_token_ids) == 7 and max(third.prompt_token_ids) < 50
    for line, said in (('{"output_len": 5}', "input_len"), ("not json", ":1:"),
                       ('{"prompt": "x", "output_len": 1}', "tokenizer")):
        path.write_text(line)
        with pytest.raises(ValueError, match=said):
            file_requests(path)


# --- the send loop, on a scripted engine ------------------------------------------------------------------------------


class ScriptedEngine:
    """Every step takes one second and gives each request that is in a token; refuses prompts that begin with 13."""

    def __init__(self):
        self.now, self.alive, self.log, self.records = 100.0, {}, [], []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.log.append(("sleep", seconds))
        self.now += seconds

    def has_unfinished_requests(self):
        return bool(self.alive)

    def add_request(self, request_id, prompt_token_ids, sampling_params, arrival_time=None, priority=0):
        if prompt_token_ids[0] == 13:
            raise RequestRefused("unlucky")
        self.log.append(("add", request_id, self.now, arrival_time))
        self.alive[request_id] = SimpleNamespace(
            arrival_time=arrival_time, first_scheduled_time=self.now, token_times=[], finish_time=None,
            num_cached_tokens=0, num_preemptions=0, left=sampling_params.max_tokens)

    def step(self):
        self.now += 1.0
        results = []
        for name, request in list(self.alive.items()):
            request.token_times.append(self.now)
            request.left -= 1
            if request.left == 0:
                request.finish_time = self.now
                del self.alive[name]
            results.append(SimpleNamespace(request_id=name, finished=request.left == 0, metrics=request, error=None,
                                           outputs=[SimpleNamespace(text="t", finish_reason="length")]))
        return results


def test_a_request_starts_when_it_is_due_not_when_it_is_seen():
    """Due at 0.4 while a step runs until 1.0: it was waiting for 0.6 s, and that is in its TTFT."""
    outputs, duration = run(ScriptedEngine(), [SampleRequest([1], 2), SampleRequest([1], 1)], [0.0, 0.4])
    assert [o.start_time for o in outputs] == [100.0, 100.4]
    assert [o.ttft for o in outputs] == pytest.approx([1.0, 1.6]) and duration == 2.0
    assert outputs[1].queue_time == pytest.approx(0.6)


def test_the_loop_sleeps_only_when_there_is_nothing_to_do():
    engine = ScriptedEngine()
    outputs, duration = run(engine, [SampleRequest([1], 1), SampleRequest([1], 1)], [5.0, 2.0])
    assert [entry for entry in engine.log if entry[0] == "sleep"] == [("sleep", 2.0), ("sleep", 2.0)]
    assert [o.start_time for o in outputs] == [105.0, 102.0], "outputs stand in the order of the requests"
    assert duration == 6.0


def test_max_concurrency_counts_the_wait_apart():
    """Two places, three requests: the third starts when the first place falls free, and its wait is a figure."""
    engine = ScriptedEngine()
    outputs, _ = run(engine, [SampleRequest([1], 2), SampleRequest([1], 5), SampleRequest([1], 1)], [0.0, 0.0, 0.0], 2)
    assert [o.client_queue_time for o in outputs] == [0.0, 0.0, 2.0] and [o.ttft for o in outputs] == [1.0, 1.0, 1.0]
    result = summarize(outputs, 5.0, max_concurrency=2)
    assert result["max_concurrent_requests"] == 2 and result["mean_client_queue_time_ms"] == pytest.approx(2000 / 3)


def test_a_refusal_is_a_failure_and_frees_its_place():
    requests = [SampleRequest([13], 2), SampleRequest([1], 2), SampleRequest([13], 1)]
    outputs, _ = run(ScriptedEngine(), requests, [0.0] * 3, 1)
    assert [o.error for o in outputs] == ["unlucky", "", "unlucky"]
    assert [o.success for o in outputs] == [False, True, False]
    assert outputs[1].client_queue_time == 0.0


def test_progress_is_called():
    calls = []
    run(ScriptedEngine(), [SampleRequest([1], 1), SampleRequest([1], 3)], [0.0, 0.0],
        progress=lambda done, total, tokens: calls.append((done, total, tokens)))
    assert calls == [(1, 2, 1), (1, 2, 1), (2, 2, 4)]


# --- the command ------------------------------------------------------------------------------------------------------

VLLM_FIELDS = """date backend model_id num_prompts request_rate burstiness max_concurrency duration completed failed
    total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
    max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms
    median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms""".split()
DETAILED = "input_lens output_lens ttfts itls start_times generated_texts errors latencies queue_times".split()


def test_command_on_the_real_engine(tmp_path, capsys):
    result_file, records_file = tmp_path / "result.json", tmp_path / "records.jsonl"
    assert bench.main(["--num-prompts", "5", "--random-input-len", "20", "--random-output-len", "6", "--request-rate",
                       "50", "--random-prefix-len", "16", "--num-warmups", "1", "--goodput", "ttft:100000", "--device",
                       "cpu", "--result-filename", str(result_file), "--save-detailed", "--records", str(records_file),
                       "--num-kv-blocks", "64"]) == 0
    shown, result = capsys.readouterr().out, json.loads(result_file.read_text())
    assert "Successful requests:                     5" in shown and "Peak memory" in shown
    assert set(VLLM_FIELDS) | set(DETAILED) <= result.keys()
    assert result["total_output_tokens"] == 30 and result["total_input_tokens"] == 5 * 36
    assert [len(gaps) for gaps in result["itls"]] == [5] * 5 and result["output_lens"] == [6] * 5
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["peak_rss_bytes"] > 50e6
    records = show.load_records(records_file)
    assert sum(r.sampled is not None for record in records for r in record.requests) == 30, "the warm-up is not in it"
    assert records[0].requests[0].request_id == "req-0" and records[0].requests[0].hit_blocks == 0


def test_command_simulated(tmp_path, capsys):
    argv = ["--model", "llama-3-70b", "-tp", "8", "--num-prompts", "12", "--max-concurrency", "4",
            "--random-prefix-len", "2000", "--random-input-len", "50", "--random-output-len", "20"]
    path = tmp_path / "r.json"
    assert simulator.main(argv + ["--result-filename", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["backend"] == "simulated" and result["completed"] == 12 and result["cached_tokens"] == 11 * 2000
    assert result["max_concurrent_requests"] == 4 and "ttfts" not in result
    assert "Client-side Queueing" in capsys.readouterr().out
    assert simulator.main(argv + ["--result-filename", str(path), "--no-enable-prefix-caching"]) == 0
    assert json.loads(path.read_text())["median_ttft_ms"] > result["median_ttft_ms"]


@pytest.mark.parametrize("argv,said", [
    (["--hardware", "tpu"], "tpu"), (["--goodput", "speed:1"], "speed:1"), (["--num-prompts", "0"], "--num-prompts"),
    (["--dataset-path", "/nowhere.jsonl"], "nowhere"), (["--request-rate", "0"], "--request-rate"),
    (["--percentile-metrics", "ttfx"], "--percentile-metrics")])
def test_command_refuses(argv, said, capsys):
    assert simulator.main(["--model", "llama-3-8b", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", """--max-concurrency=-1 --max-concurrency=0 --request-rate=nan --burstiness=nan
    --burstiness=0 --block-size=0 --num-kv-blocks=0 --num-kv-blocks=1 --max-num-seqs=0 --random-input-len=-5
    --random-input-len=0 --random-output-len=0 --random-prefix-len=-3 --num-prompts=-1 --num-warmups=-1
    --tensor-parallel-size=0 --tensor-parallel-size=-1 --gpu-memory-utilization=inf --metric-percentiles=x
    --metric-percentiles=nan --metric-percentiles=101 --result-filename=/nope/x --records=/nope/x""".split())
def test_an_option_out_of_range_is_named_before_the_run(wrong, capsys, monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *args: pytest.fail("it ran"))
    assert simulator.main(["--model", "llama-3-8b", "--num-prompts", "3", wrong]) == 2
    shown, (option, value) = capsys.readouterr(), wrong.split("=")
    assert not shown.out and shown.err.startswith("simulator.py: error: ") and shown.err.count("\n") == 1
    assert option in shown.err and value in shown.err


@pytest.mark.parametrize("filename, option", [([], "--save-result"),
                                              (["--result-filename", "below/x"], "--result-filename")])
def test_a_result_that_cannot_be_written_is_known_before_the_run(filename, option, tmp_path, capsys, monkeypatch):
    """Here nothing can, since the working directory is gone; without --result-filename the file would be there."""
    monkeypatch.setattr(bench, "run", lambda *args: pytest.fail("it ran"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert simulator.main(["--model", "llama-3-8b", "--save-result", *filename]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    assert shown.err.startswith(f"simulator.py: error: {option} ") and "No such file or directory" in shown.err


def test_save_result_names_the_file_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert simulator.main(["--model", "llama-3-8b", "--num-prompts", "1", "--save-result"]) == 0
    (path,) = tmp_path.iterdir()
    assert path.name == f"simulated-infqps-llama-3-8b-{json.loads(path.read_text())['date']}.json"
    assert capsys.readouterr().out.endswith(f"written: {path.name}\n")


def test_gaps_that_all_round_to_zero_are_refused():
    with pytest.raises(ValueError, match="--burstiness is 1e-300"):
        arrival_times(random_requests(3, 1, 1), 2.0, 1e-300)


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("option", ["--result-filename", "--records"])
def test_a_full_disk_costs_the_file_alone(option, capsys):
    assert simulator.main(["--model", "llama-3-8b", "--num-prompts", "1", option, "/dev/full"]) == 2
    shown = capsys.readouterr()
    assert "Successful requests:                     1" in shown.out
    assert shown.err == f"simulator.py: error: {option} /dev/full: No space left on device\n"


def test_a_look_at_a_file_leaves_no_trace(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    check_writable("--records", old), check_writable("--records", new)
    assert old.read_text() == "kept" and not new.exists()


def test_a_look_at_a_folder_makes_it_and_leaves_nothing_in_it(tmp_path):
    check_folder("--save", tmp_path / "new" / "one")
    assert not list((tmp_path / "new" / "one").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--save .*/file/x: Not a directory"):
        check_folder("--save", tmp_path / "file" / "x")


STOPPED = """
import argparse, runpy, sys
def stop(*arguments):
    raise KeyboardInterrupt
argparse.ArgumentParser.parse_args = stop
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["tools/bench.py", "tools/ledger.py", "tools/show.py", "tools/calibrate.py",
                                    "tools/bench_kernels.py", "ch01_paradigm.py", "exercises/grade.py"])
def test_ctrl_c_ends_a_command_quietly(script):
    """As a command looks at its options; it is nowhere more than a KeyboardInterrupt that nobody catches."""
    done = subprocess.run([sys.executable, "-c", STOPPED, ROOT / "chapters" / script], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", ["kernels.py", "chapters/tools/simulator.py --model llama-3-8b",
                                     "chapters/exercises/grade.py 1"])
def test_a_reader_that_has_gone_ends_a_command_quietly(command):
    """`| head -1`, at the first thing that is printed."""
    script, *arguments = command.split()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-u", ROOT / script, *arguments], stdout=writer, stderr=subprocess.PIPE,
                          text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_any_other_exception_still_has_its_traceback():
    done = subprocess.run([sys.executable, "-c", "import options; options.end_quietly(); 1 / 0"],
                          cwd=ROOT / "chapters/tools", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "ZeroDivisionError" in done.stderr


def test_the_peers_say_that_transformers_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)       # as if it were not installed
    monkeypatch.setattr(bench_peers, "compare", lambda args: pytest.fail("it ran"))
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--model", str(ROOT / "models" / "tiny-llama3")])
    with pytest.raises(SystemExit, match="2"):
        bench_peers.main()
    error = capsys.readouterr().err
    assert "transformers is not installed" in error and "requirements-test.txt" in error


@pytest.mark.parametrize("command,said", [
    ("tools/calibrate.py --x", "--x"), ("tools/bench_kernels.py --ben", "--ben"),
    ("ch01_paradigm.py --tp 3", "choice: 3")])
def test_other_commands_refuse(command, said):
    script, *arguments = command.split()
    done = subprocess.run([sys.executable, ROOT / "chapters" / script, *arguments], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 2 and not done.stdout and said in done.stderr
    assert f"{pathlib.Path(script).name}: error: " in done.stderr


def test_command_reports_failures(capsys):
    """A prompt longer than the model takes: counted, explained, and the exit status says that nothing succeeded."""
    assert simulator.main(["--model", "llama-3-8b", "--num-prompts", "3", "--random-input-len",
                       "9000"]) == 1
    shown = capsys.readouterr().out
    assert "3 failed: the prompt has 9000 tokens" in shown
    assert "--max-model-len" in shown and "Failed requests:                         3" in shown
