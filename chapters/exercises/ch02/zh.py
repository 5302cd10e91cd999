"""Chapter 2's rules in Chinese."""
ZH = {
    # 1  percentile
    "The percentile stands at rank (n - 1) * p / 100 of the sorted values, counted from 0.":
        "百分位在排好序的第 (n - 1) * p / 100 名，名次从 0 数起。",
    "Values come in any order: they are sorted first, by size.": "值的顺序不定：要先按大小排序。",
    "Between two ranks it is interpolated: as far between the two values as the rank is between their ranks.":
        "落在两个名次之间要插值：名次走到两者之间的几成，值就取两者之间的几成。",
    "Each value counts, equal ones too.": "每个值都算数，相等的也各算一个。",
    "The 0th percentile is the smallest value, the 100th the largest: no rank lies beyond them.":
        "第 0 百分位是最小值，第 100 百分位是最大值：名次不会越过两端。",
    "A single value is all of its percentiles.": "只有一个值时，所有百分位都是它。",
    "Without values there is no percentile: None.": "没有值就没有百分位：None。",
    "The percentile is neither rounded nor cut.": "百分位既不四舍五入，也不截断。",
    # 2  goodput
    "Goodput is a rate: good requests over the duration of the run, in requests a second.":
        "有效吞吐是速率：达标的请求数除以整次运行的时长，单位是请求/秒。",
    "Limits are in milliseconds, times in seconds.": "限额以毫秒计，时间以秒计。",
    "It is judged request by request: neither a mean nor a percentile decides for all.":
        "要逐个请求判断：均值和百分位都不能替所有请求作主。",
    "A good request keeps all limits that are given.": "达标的请求要遵守给出的每一项限额。",
    "Only the limits that are given count, whatever the other times are.": "只看给出的限额，别的时间再长也不管。",
    "Who needs exactly as long as the limit has kept it.": "恰好等于限额，算达标。",
    "An answer of one token has no TPOT: it counts as 0, and keeps any limit.": "只有一个 token 的回答没有 TPOT：当作 0，任何限额都算遵守。",
    "A request that failed is not good, however quickly.": "失败的请求不算达标，失败得再快也不算。",
    "Without good requests the goodput is 0.": "没有达标的请求，有效吞吐就是 0。",
    # 3  mean_concurrency
    "It is the time that all spent inside, added up, over the time that there was.": "把所有请求停留的时间加起来，除以总共的时间。",
    "Requests that are there at the same time count each: it is neither the share of busy time nor the peak.":
        "同时在场的每个请求都要算：它既不是忙碌时间的占比，也不是峰值。",
    "Time in which nobody is there counts, too: it is divided by the whole from begin to end.":
        "没有请求的时间也是时间：要除以从 begin 到 end 的全长。",
    "The time runs from begin, wherever on the clock that lies.": "时间从 begin 算起，不管它在时钟的哪里。",
    "Who came before begin counts from begin on.": "begin 之前就来的，从 begin 算起。",
    "Who leaves after end counts up to end.": "end 之后才走的，算到 end 为止。",
    "Who was there only before begin or only after end adds nothing, and takes nothing away.":
        "只在 begin 之前或 end 之后在场的，不加，也不减。",
    "Who hasn't left (None) is there to the end.": "还没离开的（None），一直在场到 end。",
    # 4  response_times
    "A user waits until the answer is there: the seconds that the request takes are part of it.":
        "用户要等到回答出来：请求本身花的时间也在其中。",
    "No request is sent before it is due, however free a client is.": "客户端再空闲，也不会提前发请求。",
    "The wait begins when the request is due: what it waits for a client is part of it.":
        "等待从应发的时刻开始：等客户端空出来的时间也算。",
    "A client takes one request after the other: a late one makes those behind it late.":
        "客户端一次只处理一个请求：前面的晚了，后面的跟着晚。",
    "Each of the clients has a request of its own: as many as there are can be under way at once.":
        "每个客户端各发各的：有几个客户端，就可以同时有几个请求在途。",
    "The next request goes to the client that is free first, not round in turn.": "下一个请求交给最先空出来的客户端，不是轮流。",
    "The answer has a number for each request, in the order of the requests.": "答案里每个请求一个数，顺序与请求一致。",
    # 5  read_stream
    "The answer is a dict with exactly the keys ttft, itls, tpot and e2el.": "答案是一个字典，键恰好是 ttft、itls、tpot 和 e2el。",
    "Times run from when the request was sent, in seconds.": "时间从请求发出算起，以秒计。",
    "A first chunk without text holds the role: it is no token.": "开头没有文字的 chunk 只有 role：它不是 token。",
    "A last chunk without text holds the usage: the answer ended before it.": "末尾没有文字的 chunk 是 usage：回答在它之前就结束了。",
    "A chunk in the middle without text (half a character, for one) ends no gap.":
        "中间没有文字的 chunk（比如只有半个字符）不结束任何间隔。",
    "ITLs are the gaps between chunks with text, in order: one fewer than those chunks.":
        "ITL 是有文字的 chunk 之间的间隔，按顺序列出：比这些 chunk 少一个。",
    "A chunk may hold several tokens: TPOT is divided by num_tokens - 1, whatever the chunks.":
        "一个 chunk 可以有多个 token：TPOT 除以 num_tokens - 1，与 chunk 数无关。",
    "A single token has no gap after it: TPOT is None, and there are no ITLs.":
        "只有一个 token 时，后面没有间隔：TPOT 为 None，ITL 为空。",
    "a dict with the keys {keys}": "一个字典，键为 {keys}",
    "{key} is {value}": "{key} 为 {value}",
    # 6  mfu
    "Each scheduled token is computed, those of a prefill as those of a decode, and no other.":
        "本步安排的每个 token 都要算，Prefill 的和 Decode 的一样，别的都不算。",
    "A token attends to all positions computed before it.": "一个 token 要关注在它之前算好的所有位置。",
    "The i-th new token attends to i new positions, itself among them, and to no later one.":
        "第 i 个新 token 关注 i 个新位置，包括它自己，不看后面的。",
    "What could have been computed is the peak of all GPUs, for all the time.": "本来能算多少：所有 GPU 的峰值乘以全部时间。",
    "All FLOPs over all the time: the mean of the steps' shares weighs a short step like a long one.":
        "全部 FLOPs 除以全部时间：把各步的占比平均，会让短的一步和长的一步分量相同。",
    "Time in which nothing is computed is time.": "什么也没算的时间也是时间。",
    # the lab
    "The answer is a dict with exactly the keys queue_time, ttft, itls, tpot and e2e.":
        "答案是一个字典，键恰好是 queue_time、ttft、itls、tpot 和 e2e。",
    "The queue ends when the first step computes something of it, seconds after the arrival.":
        "排队到第一次参与计算的那一步为止，从到达算起，以秒计。",
    "TTFT runs from the arrival, so the queue is in it, to the first token.": "TTFT 从到达算到第一个 token，排队也在其中。",
    "ITLs are the gaps between one token and the next, in order: N tokens have N - 1, and the TTFT is none.":
        "ITL 是相邻两个 token 之间的间隔，按顺序列出：N 个 token 有 N - 1 个，TTFT 不在其中。",
    "TPOT is the time from the first token to the last, divided by N - 1.": "TPOT 是第一个 token 到最后一个的时间除以 N - 1。",
    "E2E runs from the arrival to the end.": "E2E 从到达算到结束。",
    "What can't be said yet is None, and not 0: a request that waits has no queue time yet, one without a token no "
    "TTFT, and its ITLs are an empty list.":
        "还说不出的是 None，不是 0：还在等待的请求没有排队时间，没有 token 的请求没有 TTFT，ITL 是空列表。",
    "It is asked after every step, and says what is true now: tokens come, and the end comes last.":
        "每一步之后都会问到，要按当时的情况回答：token 陆续出现，结束在最后。",
    "A request may end without a token: then it has an E2E, and no TTFT.": "请求可能一个 token 都没有就结束：这时有 E2E，没有 TTFT。",
    "Who was preempted and runs again keeps the first moment at which it was scheduled.":
        "被抢占后重新运行的请求，仍以第一次被调度的时刻为准。",
    "after step {step}, {name}: {key} is {value}": "第 {step} 步之后，{name}：{key} 为 {value}",
    "a request from its arrival to its end": "一个请求，从到达到结束",
    "an answer of a single token": "只有一个 token 的回答",
    "a request that waits, and one without a token": "还在等待的请求，和还没有 token 的请求",
    "a request that runs": "正在运行的请求",
    "requests that ended without a token": "没有 token 就结束的请求",
    "five requests on three seats, asked after every step": "五个请求三个座位，每步之后都问",
    "preemptions and aborts, asked after every step": "抢占与中止，每步之后都问",
}
