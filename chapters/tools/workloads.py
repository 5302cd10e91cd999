"""What is sent: random requests, or a trace that somebody recorded (chapters 2 and 13).

    random_requests    lengths drawn, token ids drawn
    read_requests      a file, request by request (file_requests: all at once), in one of three forms:

        JSON lines     {"prompt_token_ids": [..] | "prompt": "text" | "input_len": 512, "output_len": 64,
                        "timestamp": 0.25}                    the last in seconds, and optional
        Azure          arrived_at,num_prefill_tokens,num_decode_tokens, or as published: TIMESTAMP,ContextTokens,
                       GeneratedTokens with dates
        Mooncake       {"timestamp": ms, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ..]}

Files may end in .gz.  A trace has lengths and no text, so token ids are made up.  Each request gets its own, but
Mooncake's hash_ids name the prefix blocks of 512 tokens that requests share: equal ids become equal tokens, and unequal
ids differ within the first few.  So a prefix cache hits what the trace says, no more and no less.
"""
from __future__ import annotations

import csv
import gzip
import json
import math
import random
from dataclasses import dataclass
from datetime import datetime
from typing import Iterator

HASH_BLOCK = 512        # tokens that one of Mooncake's hash_ids stands for


@dataclass
class SampleRequest:
    """One request to send.  `timestamp`: when, in seconds from the start; None leaves it to the request rate.
    vLLM: benchmarks/datasets/datasets.py:77 SampleRequest"""
    prompt_token_ids: list[int]
    expected_output_len: int
    timestamp: float | None = None
    prefix_ids: tuple | None = None     # names of its prefix blocks, if the trace has some: for a router


def random_requests(num_prompts: int, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0,
                    vocab_size: int = 1000, seed: int = 0) -> list[SampleRequest]:
    """Random token ids: a prefix that all share, then each its own part; lengths uniform in len * (1 -+ range_ratio).

    The running example is prefix_len=2000, input_len=50, output_len=300.  The same seed gives the same workload.
    vLLM: benchmarks/datasets/datasets.py:584 RandomDataset.sample"""
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio is {range_ratio}, must be from 0 to below 1")
    rng = random.Random(seed)

    def length(middle: int) -> int:
        return max(1, rng.randint(math.floor(middle * (1 - range_ratio)), math.ceil(middle * (1 + range_ratio))))

    prefix = rng.choices(range(vocab_size), k=prefix_len)
    return [SampleRequest(prefix + rng.choices(range(vocab_size), k=length(input_len)), length(output_len))
            for _ in range(num_prompts)]


def block_tokens(hash_id: int, vocab_size: int) -> list[int]:
    """512 token ids for a prefix block: its number in base `vocab_size`, lowest digit first, then zeros.  Example:
    id 2053 with 1,000 words is 53 2 0 0 ..; no two ids have one beginning."""
    digits, rest = [], hash_id
    while rest:
        rest, digit = divmod(rest, vocab_size)
        digits.append(digit)
    return digits + [0] * (HASH_BLOCK - len(digits))


def whole(row: dict, name: str, least: int = 1) -> int:
    """A whole number out of a row; ValueError says which it is not."""
    try:
        value = int(row[name])
        if value != float(row[name]) or isinstance(row[name], bool):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} is {row[name]!r}, must be a whole number") from None
    if value < least:
        raise ValueError(f"{name} is {value}, must be at least {least}")
    return value


def seconds_of(value, a_second: int = 1) -> float:
    """A time in seconds, from units of which `a_second` has so many.  ValueError: no number, negative, or endless."""
    try:
        seconds = float(value) / a_second
    except (TypeError, ValueError):
        raise ValueError(f"the time is {value!r}, must be a number") from None
    if not 0 <= seconds < math.inf:
        raise ValueError(f"the time is {value}, must be from 0 on")
    return seconds


def check_columns(row, *forms: tuple) -> None:
    """That the row has one of the `forms`, sets of names, and no name beside it."""
    if not any(set(form) == set(row) for form in forms):
        known = set().union(*forms)
        unknown, missing = sorted(map(str, set(row) - known)), sorted(set(forms[0]) - set(row))
        raise ValueError(f"unknown column {unknown[0]!r}" if unknown else f"column {missing[0]!r} is missing"
                         if missing else f"these columns do not belong together: {', '.join(row)}")


def json_request(row, rng, vocab_size: int, encode) -> SampleRequest:
    """A line of ours, or of Mooncake's."""
    if not isinstance(row, dict):
        raise ValueError(f"{json.dumps(row)[:40]} is not an object")
    if "hash_ids" in row or "input_length" in row:
        check_columns(row, ("timestamp", "input_length", "output_length", "hash_ids"))
        ids, length = row["hash_ids"], whole(row, "input_length")
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("hash_ids must be a list of whole numbers from 0")
        if len(ids) != -(-length // HASH_BLOCK):
            raise ValueError(f"{len(ids)} hash_ids for input_length {length}, must be {-(-length // HASH_BLOCK)}")
        tokens = [token for i in ids for token in block_tokens(i, vocab_size)][:length]
        return SampleRequest(tokens, whole(row, "output_length"), seconds_of(row["timestamp"], 1000), tuple(ids))
    kind = next((name for name in ("prompt_token_ids", "prompt", "input_len") if name in row), None)
    if kind is None:
        raise ValueError("expected prompt_token_ids, prompt or input_len, and output_len")
    check_columns(row, (kind, "output_len"), (kind, "output_len", "timestamp"))
    ids = row[kind]
    if kind == "prompt":
        if encode is None:
            raise ValueError("text needs a tokenizer, and this engine has none")
        ids = encode(ids)
    elif kind == "input_len":
        ids = rng.choices(range(vocab_size), k=whole(row, "input_len"))
    elif not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("prompt_token_ids must be a list of whole numbers from 0")
    time = row.get("timestamp")
    return SampleRequest(ids, whole(row, "output_len"), None if time is None else seconds_of(time))


AZURE = {"arrived_at": ("num_prefill_tokens", "num_decode_tokens"), "TIMESTAMP": ("ContextTokens", "GeneratedTokens")}


def azure_request(row: dict, start: list, rng, vocab_size: int) -> SampleRequest:
    """A line of an Azure trace; `start` holds the first line's date, if there are dates."""
    check_columns(row, *[(time, *lengths) for time, lengths in AZURE.items() if time in row] or [
        ("arrived_at", *AZURE["arrived_at"])])
    time = next(name for name in AZURE if name in row)
    length, output = [whole(row, name) for name in AZURE[time]]
    if time == "TIMESTAMP":
        date = datetime.fromisoformat(row[time].strip()[:26])       # the trace has a digit more than Python
        start.append(date)
        timestamp = seconds_of((date - start[0]).total_seconds())
    else:
        timestamp = seconds_of(row[time])
    # Two tokens tell a request apart from all others, as block_tokens does; drawing each would take longer than to
    # simulate the request.
    mark = rng.getrandbits(60)
    digits = [mark // vocab_size ** i % vocab_size for i in range(16)]
    return SampleRequest((digits + [0] * length)[:length], output, timestamp)


def read_requests(path: str, vocab_size: int = 1000, encode=None, seed: int = 0,
                  max_model_len: int | None = None) -> Iterator[SampleRequest]:
    """The requests of a file one by one, so that a trace of any length needs little memory.  ValueError names file and
    line: a column unknown or missing, a length below 1, a time that is negative or no number, prompt and output
    together over `max_model_len`."""
    rng, start, header, number = random.Random(seed), [], None, 0
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if header is None and line.lstrip()[0] not in "{[":
                    header = next(csv.reader([line.lstrip("\ufeff")]))
                    check_columns(dict.fromkeys(header), *[(time, *lengths) for time, lengths in AZURE.items()])
                    continue
                if header:
                    values = next(csv.reader([line]))
                    if len(values) != len(header):
                        raise ValueError(f"{len(values)} columns, the header has {len(header)}")
                    request = azure_request(dict(zip(header, values)), start, rng, vocab_size)
                else:
                    request = json_request(json.loads(line), rng, vocab_size, encode)
                prompt, output = len(request.prompt_token_ids), request.expected_output_len
                if max_model_len and prompt + output > max_model_len:
                    raise ValueError(f"{prompt} + {output} tokens are over the limit of {max_model_len} "
                                     "(--max-model-len)")
                yield request
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def file_requests(path: str, vocab_size: int = 1000, encode=None, seed: int = 0,
                  max_model_len: int | None = None) -> list[SampleRequest]:
    """All requests of a file; ValueError as read_requests."""
    return list(read_requests(path, vocab_size, encode, seed, max_model_len))


def arrival_times(requests: list[SampleRequest], request_rate: float = math.inf, burstiness: float = 1.0,
                  seed: int = 0) -> list[float]:
    """When each request is sent, seconds from the start: its own timestamp, else by the rate (requests/s).

    inf sends all at once.  burstiness 1 is a Poisson process (exponential gaps), inf a fixed gap, anything else gamma
    gaps; they are then stretched so that the last of n requests comes at exactly n / rate, for any seed.
    vLLM: benchmarks/serve.py:393 get_request"""
    if not (request_rate > 0 and burstiness > 0):       # so NaN is refused, too
        raise ValueError(f"--request-rate {request_rate} and --burstiness {burstiness} must be above 0")
    if any(request.timestamp is not None for request in requests):
        return [request.timestamp or 0.0 for request in requests]
    if math.isinf(request_rate):
        return [0.0] * len(requests)
    if math.isinf(burstiness):
        return [(i + 1) / request_rate for i in range(len(requests))]
    rng, times = random.Random(seed), [0.0]
    for _ in requests:
        times.append(times[-1] + rng.gammavariate(burstiness, 1 / (request_rate * burstiness)))
    if not times[-1]:
        raise ValueError(f"--burstiness is {burstiness}, so little that every gap is rounded to 0")
    return [t * (len(requests) / request_rate / times[-1]) for t in times[1:]]
