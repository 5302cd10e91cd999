"""The fleet: replicas on one clock are as replicas alone; routers choose as they say, and the same in every run."""
import itertools
import random

import pytest

import bench
import fleet
from conftest import ROOT
from fleet import Fleet, Router, faster, prefix_keys, serve
from ledger import Ledger
from metrics import Summary, summarize
from request import SamplingParams
from scheduler import SchedulerConfig
from simulator import SimulatedEngine
from workloads import SampleRequest, read_requests

DATA, LEDGER, CONFIG = ROOT / "chapters/data", Ledger(), SchedulerConfig(16, 512, 8192)


def some(seed, count=60, rate=40.0):
    rng, now = random.Random(seed), 0.0
    requests = []
    for i in range(count):
        now += rng.expovariate(rate) * rng.choice([0, 1, 2])           # some at the same moment
        requests.append(SampleRequest([rng.randrange(1000) for _ in range(rng.randint(1, 900))], rng.randint(1, 60), now))
    return requests


def test_replicas_are_engines_alone():
    """Round robin over three: each third of the workload, sent by bench.run to an engine of its own, fares the same."""
    for seed in range(4):
        requests, alone = some(seed), []
        for i in range(3):
            part = requests[i::3]
            engine = SimulatedEngine(LEDGER, CONFIG, 200, keep_records=False)
            alone += bench.run(engine, part, [r.timestamp for r in part])[0]
        together = serve(LEDGER, CONFIG, iter(requests), 3, "round_robin", {"ttft": 50}, num_kv_blocks=200)
        exact = summarize(alone, together["duration"], {"ttft": 50})
        for key in ("completed", "total_output_tokens", "request_goodput", "preemptions", "cached_tokens"):
            assert together[key] == exact[key], key
        for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
            assert together[key] == pytest.approx(exact[key], rel=1e-9), key


class Watched(Router):
    """Notes whom it chose, and how many requests it took to be under way."""
    def choose(self, request):
        self.log.append((request.timestamp, tuple(self.loads)))
        return super().choose(request)


@pytest.mark.parametrize("seed", range(4))
def test_a_router_knows_what_has_ended_by_now_and_no_more(seed):
    """Every load at every arrival, against the finish times that come out in the end."""
    requests, ends = some(seed, 80), []
    router = Watched("least_loaded", 3)
    router.log = []
    summary = Summary()
    add = summary.add
    summary.add = lambda output: (ends.append((output.start_time, output.token_times[-1])), add(output))
    whole = Fleet([SimulatedEngine(LEDGER, CONFIG, 400, keep_records=False) for _ in range(3)], router, summary)
    for request in requests:
        whole.send(request)
    whole.finish()
    assert len(ends) == 80
    for i, (now, loads) in enumerate(router.log):
        sent = [request.timestamp for request in requests[:i]]
        assert sum(loads) == len(sent) - sum(end <= now for start, end in ends if end <= now)


def test_rules_of_the_routers():
    def request(*ids):
        return SampleRequest([0] * (512 * len(ids)), 1, 0.0, ids)
    robin = Router("round_robin", 3)
    assert [robin.choose(request(1)) for _ in range(4)] == [0, 1, 2, 0]
    least = Router("least_loaded", 3)
    least.loads = [2, 1, 1]
    assert [least.choose(request(1)) for _ in range(3)] == [1, 2, 0], "ties go to the lowest number"
    near = Router("prefix_aware", 3, match=0.5, slack=2, factor=1.5)
    assert [near.choose(request(1, 2, 3)) for _ in range(3)] == [0, 0, 0], "it stays with its prefix within the slack"
    assert near.choose(request(1, 2, 3)) == 1, "three more than the least loaded is too many"
    assert near.choose(request(1, 2, 3)) == 1, "that replica holds the prefix now"
    assert near.choose(request(1, 8, 9)) == 2, "a third of the prompt is less than the half that it takes"
    assert near.choose(request(4, 2, 3)) == 2, "what begins differently matches nothing"
    small = Router("prefix_aware", 2, memory=3)
    small.choose(request(1, 2, 3)), small.choose(request(4))
    assert list(small.seen) == [2, 3, 4]
    with pytest.raises(ValueError, match="--policies knows .*, not 'psychic'"):
        Router("psychic", 2)


def test_prefix_keys_name_whole_blocks_and_all_before():
    a, b = [1] * 1100, [1] * 512 + [2] * 588
    keys = [list(prefix_keys(SampleRequest(tokens, 1))) for tokens in (a, b, [3] + a[1:])]
    assert [len(k) for k in keys] == [2, 2, 2]
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1] and not set(keys[0]) & set(keys[2])
    assert list(prefix_keys(SampleRequest(a, 1, 0.0, (7, 8, 9)))) == [7, 8], "the last block is not full"


def test_faster_and_copies():
    def read(seed):
        return iter([SampleRequest([seed], 1, 0.0), SampleRequest([seed], 1, 10.0)])
    assert [(r.prompt_token_ids, r.timestamp) for r in faster(read, 4, 2)] == [
        ([0], 0.0), ([0], 2.5), ([1], 2.5), ([1], 5.0)]


def mooncake(policy, replicas=4, count=250):
    requests = itertools.islice(read_requests(DATA / "mooncake_fast25_conv_first500.jsonl.gz", 128256), count)
    return serve(Ledger(block_size=512), SchedulerConfig(256, 8192, 131072), requests, replicas, policy, {"ttft": 5000})


def test_prefix_aware_routing_finds_more_on_mooncake():
    """More of the prompts is found in the cache where their prefixes are.  (What that is worth in time, 250 requests are
    too few to tell: long prompts that share a beginning also queue up at one replica.)"""
    robin, least, near = [mooncake(policy) for policy in fleet.POLICIES]
    assert near["completed"] == robin["completed"] == 250
    assert near["prefix_hit_rate"] > 1.3 * max(robin["prefix_hit_rate"], least["prefix_hit_rate"])
    assert mooncake("prefix_aware") == near, "a run repeats to the last bit"


def test_prefix_aware_routing_pays_where_prefixes_are_long():
    """Eight documents of 6,000 tokens, questions in turn about each, caches that hold two or three of them."""
    def requests():
        rng = random.Random(1)
        for i in range(160):
            yield SampleRequest([rng.randrange(8)] * 6000 + [rng.randrange(9) for _ in range(40)], 20, i * 0.06)
    least, near = [serve(Ledger(), SchedulerConfig(32, 2048, 8192), requests(), 4, policy, {"ttft": 400},
                         num_kv_blocks=1200) for policy in ("least_loaded", "prefix_aware")]
    assert near["prefix_hit_rate"] > 1.3 * least["prefix_hit_rate"]
    assert near["mean_ttft_ms"] < 0.7 * least["mean_ttft_ms"] and near["request_goodput"] > least["request_goodput"]


def test_least_loaded_beats_round_robin_under_load():
    results = [serve(LEDGER, CONFIG, faster(lambda seed: read_requests(DATA / "azure_llm_2023_conv_first600.csv"), 12), 4,
                     policy, {"ttft": 1000}, num_kv_blocks=20_000) for policy in ("round_robin", "least_loaded")]
    assert results[1]["request_goodput"] > results[0]["request_goodput"]


def test_more_replicas_more_goodput(capsys, tmp_path):
    assert fleet.main(["--dataset-path", str(DATA / "azure_llm_2023_conv_first600.csv"), "--speed", "30", "--replicas", "1",
                       "3", "--max-num-seqs", "64", "--num-kv-blocks", "20000", "--save", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "least_loaded" in shown and (tmp_path / "fleet.svg").read_text().startswith("<svg")
    results = [serve(LEDGER, SchedulerConfig(64, 8192, 8192), faster(lambda seed: read_requests(
        DATA / "azure_llm_2023_conv_first600.csv"), 30), n, "least_loaded", {"ttft": 1000}, num_kv_blocks=20_000)
        for n in (1, 3)]
    assert results[1]["request_goodput"] > 1.5 * results[0]["request_goodput"]
    pictures = fleet.pictures(results)
    assert [round(y, 3) for y in pictures[1].series["least_loaded"]] == [round(r["request_goodput"], 3) for r in results]


@pytest.mark.parametrize("argv,said", [
    ("--policies psychic", "--policies knows"), ("--speed 0", "--speed"), ("--replicas 0", "--replicas"),
    ("--max-model-len 300", ":2: 374 + 44 tokens are over the limit of 300"), ("-tp 3", "--tensor-parallel-size")])
def test_command_refuses(argv, said, capsys):
    path = str(DATA / "azure_llm_2023_conv_first600.csv")
    assert fleet.main(["--dataset-path", path, *argv.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fleet.py: error: ") and said in error and error.count("\n") == 1


def test_earliest_end_is_never_late():
    """No request ends before the time that was named, whatever else waits or prefills."""
    for seed in range(3):
        engine = SimulatedEngine(LEDGER, CONFIG, 60, keep_records=False)
        assert engine.earliest_end() == float("inf")
        waiting = some(seed, 25)
        while waiting or engine.has_unfinished_requests():
            if waiting:
                request = waiting.pop()
                engine.add_request(str(len(waiting)), request.prompt_token_ids,
                                   SamplingParams(max_tokens=request.expected_output_len, ignore_eos=True))
            bound = engine.earliest_end()
            assert bound > engine.now
            for result in engine.step_until(engine.now + 1e-3):
                assert result.metrics.finish_time >= bound - 1e-12
