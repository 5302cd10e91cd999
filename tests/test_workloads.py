"""What is sent: the three forms of a trace, bad lines, and prefix blocks that hit what the trace says."""
import gzip
import json
import math
from datetime import datetime, timedelta

import pytest

import bench
import simulator
from conftest import ROOT
from kv_cache import KVCacheManager
from request import Request, SamplingParams
from scheduler import Scheduler, SchedulerConfig
from workloads import HASH_BLOCK, SampleRequest, block_tokens, file_requests, read_requests

DATA = ROOT / "chapters/data"


def test_azure_trace_that_ships():
    requests = file_requests(DATA / "azure_llm_2023_conv_first600.csv", 128256)
    assert len(requests) == 600
    rows = [(r.timestamp, len(r.prompt_token_ids), r.expected_output_len) for r in requests[:3]]
    assert rows == [(0.0, 374, 44), (4.315, 396, 109), (4.542, 879, 55)]
    assert len({tuple(r.prompt_token_ids[:16]) for r in requests if len(r.prompt_token_ids) > 16}) > 590, "nobody shares"
    assert requests == file_requests(DATA / "azure_llm_2023_conv_first600.csv", 128256)
    assert len(file_requests(DATA / "azure_llm_2023_code_first300.csv")) == 300


def test_azure_as_published(tmp_path):
    """Dates with seven digits, columns in the repository's names; times become relative to the first."""
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
                    "2023-11-16 18:15:50.9951690,396,109\n")
    first, second = file_requests(path)
    assert (first.timestamp, len(first.prompt_token_ids), first.expected_output_len) == (0.0, 374, 44)
    want = datetime(2023, 11, 16, 18, 15, 50, 995169) - datetime(2023, 11, 16, 18, 15, 46, 680590)
    assert timedelta(seconds=second.timestamp) == want


def mooncake(name):
    with gzip.open(DATA / name, "rt") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["mooncake_fast25_conv_first500.jsonl.gz", "mooncake_fast25_syn_first300.jsonl.gz"])
def test_hash_ids_hit_exactly_as_they_say(name):
    """By brute force on the ids, and by the engine's own pool, unbounded, on the made-up tokens: request by request.
    A block hits if it and all before it were seen; the one with the last token is always computed anew."""
    rows, seen, wanted = mooncake(name), set(), []
    for row in rows:
        hits = next((i for i, block in enumerate(row["hash_ids"]) if block not in seen), len(row["hash_ids"]))
        wanted.append(min(hits, (row["input_length"] - 1) // HASH_BLOCK))
        seen |= set(row["hash_ids"][:row["input_length"] // HASH_BLOCK])     # full ones are published
    manager = KVCacheManager(sum(len(row["hash_ids"]) + 1 for row in rows), HASH_BLOCK)
    scheduler, found = Scheduler(SchedulerConfig(1, 200_000, 200_000), manager), []
    for i, request in enumerate(read_requests(DATA / name, 128256)):
        assert len(request.prompt_token_ids) == rows[i]["input_length"] and request.prefix_ids == tuple(rows[i]["hash_ids"])
        assert request.timestamp == rows[i]["timestamp"] / 1000 and request.expected_output_len == rows[i]["output_length"]
        scheduler.add_request(Request(str(i), request.prompt_token_ids, SamplingParams(max_tokens=1)))
        output = scheduler.schedule()
        found.append(output.num_hit_blocks[str(i)])
        scheduler.update_from_output(output, {str(i): 0})
    assert found == wanted and sum(found) > 300


def test_smaller_blocks_hit_no_more_than_the_hashes_say():
    """At 16 tokens a block, too, requests with different ids share nothing from the first different block on."""
    rows = mooncake("mooncake_fast25_conv_first500.jsonl.gz")[:120]
    manager = KVCacheManager(200_000, 16)
    scheduler, seen = Scheduler(SchedulerConfig(1, 200_000, 200_000), manager), {}
    for i, request in enumerate(read_requests(DATA / "mooncake_fast25_conv_first500.jsonl.gz", 128256)):
        if i == len(rows):
            break
        scheduler.add_request(Request(str(i), request.prompt_token_ids, SamplingParams(max_tokens=1)))
        output = scheduler.schedule()
        length, shared = len(request.prompt_token_ids), 0
        for block in rows[i]["hash_ids"]:
            if block not in seen:
                break
            shared += min(seen[block], HASH_BLOCK, length - shared)
        assert output.num_hit_blocks[str(i)] == min(shared, length - 1) // 16
        for at, block in enumerate(rows[i]["hash_ids"]):
            seen[block] = max(seen.get(block, 0), min(HASH_BLOCK, (length - at * HASH_BLOCK) // 16 * 16))
        scheduler.update_from_output(output, {str(i): 0})


def test_block_tokens_differ_from_the_first_on():
    for vocab_size in (2, 10, 1000):
        ids = [0, 1, vocab_size - 1, vocab_size, vocab_size ** 2 + 3, 10 ** 6]
        tokens = [block_tokens(i, vocab_size) for i in ids]
        assert all(len(t) == HASH_BLOCK and 0 <= min(t) and max(t) < vocab_size for t in tokens)
        assert len({tuple(t) for t in tokens}) == len(set(ids))
    assert block_tokens(2053, 1000)[:4] == [53, 2, 0, 0]


@pytest.mark.parametrize("text,line,said", [
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n1,5\n", 3, "2 columns, the header has 3"),
    ("arrived_at,num_prefill_tokens,colour\n0,5,5\n", 1, "unknown column 'colour'"),
    ("arrived_at,num_prefill_tokens\n0,5\n", 1, "column 'num_decode_tokens' is missing"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n-1,5,5\n", 2, "the time is -1, must be from 0 on"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\nnan,5,5\n", 2, "the time is nan"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,0,5\n", 2, "num_prefill_tokens is 0, must be at least 1"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,x\n", 2, "num_decode_tokens is 'x', must be a whole number"),
    ("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n\n0,60,41\n", 4, "60 + 41 tokens are over the limit of 100"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", 2, "yesterday"),
    ('{"input_len": 5, "output_len": 5}\n{"input_len": 5, "output_len": 5, "stamp": 1}', 2, "unknown column 'stamp'"),
    ('{"input_len": 5, "output_len": 5, "timestamp": -0.5}', 1, "the time is -0.5"),
    ('{"input_len": 2.5, "output_len": 5}', 1, "input_len is 2.5, must be a whole number"),
    ('{"input_len": 5}', 1, "column 'output_len' is missing"), ('{"output_len": 5}', 1, "input_len"),
    ('{"prompt_token_ids": [1, -2], "output_len": 5}', 1, "whole numbers from 0"), ("[1]", 1, "not an object"),
    ('{"input_len": 5, "output_len": 5}\n{"input_len":', 2, "Expecting value"),
    ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', 1, "1 hash_ids for input_length 513"),
    ('{"timestamp": -5, "input_length": 5, "output_length": 1, "hash_ids": [1]}', 1, "the time is -5"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}', 1, "hash_ids must be"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], "user": 3}', 1, "unknown column 'user'"),
])
def test_a_bad_line_is_named(text, line, said, tmp_path, capsys):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        file_requests(path, max_model_len=100)
    assert str(error.value).startswith(f"{path}:{line}: ") and said in str(error.value)
    if "limit" not in said:
        assert simulator.main(["--dataset-path", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"simulator.py: error: {path}:{line}: ")


def test_the_commands_take_any_form(tmp_path, capsys):
    assert simulator.main(["--dataset-path", str(DATA / "azure_llm_2023_conv_first600.csv"), "--num-prompts", "50"]) == 0
    assert "Successful requests:                     50" in capsys.readouterr().out
    assert simulator.main(["--dataset-path", str(DATA / "mooncake_fast25_conv_first500.jsonl.gz"), "--num-prompts", "40",
                           "--max-model-len", "131072", "--num-kv-blocks", "80000", "--stream"]) == 0
    shown = capsys.readouterr().out
    assert "Successful requests:" in shown and "Cached prompt tokens:" in shown and "Mean KV cache usage" in shown
    path = tmp_path / "azure.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,40,4\n0.05,20,3\n")
    assert bench.main(["--dataset-path", str(path), "--device", "cpu", "--price-per-hour", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "Total input tokens:                      60" in shown and "Cost per million output tokens:" in shown


def test_a_request_over_the_models_limit_names_its_line(capsys):
    path = DATA / "mooncake_fast25_conv_first500.jsonl.gz"
    assert simulator.main(["--dataset-path", str(path), "--max-model-len", "8000"]) == 2
    assert f"{path}:" in (error := capsys.readouterr().err) and "over the limit of 8000 (--max-model-len)" in error


def test_times_keep_their_order():
    assert all(isinstance(r, SampleRequest) and 0 <= r.timestamp < math.inf
               for r in read_requests(DATA / "azure_llm_2023_code_first300.csv"))
