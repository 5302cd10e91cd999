"""What chapter 1's walk-through says, in Chinese; tools/lang.py says how it is looked up."""
ZH = {
    "Chapter 1, walked through: from one forward to continuous generation": "第 1 章导读：从一次 Forward 到持续生成",
    "timing a short piece, to say how long all of it will take": "先测一小段，估计全程需要多久",
    "computing": "正在计算", "serving the request, TP={tp}": "正在服务这个请求，TP={tp}", "here": "本机", "": "",
    "{where}, {what}": "{where}，{what}",
    """Read it beside the article's first chapter, whose section numbers it has. "here" is the tiny Llama-3 that comes
    with the project, on this machine's CPU, measured as you watch. "70B" is Llama-3-70B on 8 H100s: its bytes and FLOPs
    are exact, its times are estimates of chapters/tools/ledger.py, marked ~. Pictures speak in letters, explained below
    each; --save DIR writes them as SVG.""":
        """请与文章第 1 章对照阅读，小节编号一致。“本机”指项目自带的小 Llama-3 在这台机器的 CPU 上现场实测；“70B”指 8 张
        H100 上的 Llama-3-70B：字节数和 FLOP 是精确值，时间由 chapters/tools/ledger.py 估算，以 ~ 标出。图用字母表示，
        图例在图下方；加上 --save DIR 会另存为 SVG。""",

    # 1
    "From one forward to continuous generation": "从一次 Forward 到持续生成",
    """The request: {N} prompt tokens in, {M} out, at a tensor parallel size (TP, 张量并行) of {tp}. A step of the engine
    computes at most {budget} tokens, its token budget (Token 预算). Steps that the prompt takes: {chunks}; the last
    yields the first token. From then on each step feeds in the token of the step before.""":
        """这个请求：输入 {N} 个 prompt token，输出 {M} 个，张量并行 TP={tp}。引擎一步最多计算 {budget} 个 token，这就是
        Token 预算，所以 prompt 用 {chunks} 步算完，最后一步得到第 1 个 token。此后每一步都把上一步生成的 token 作为输入。""",
    "The life of one request (请求的生命周期)": "请求的生命周期",
    "step>": "步>", "ms>": "ms>", "computed>": "已计算>", "KV blocks>": "KV 块>", "MiB here>": "本机 MiB>",
    "MiB, 70B>": "70B 的 MiB>",
    "queued (排队)": "排队", "prefill": "prefill", "prefill, chunk {i}": "prefill 第 {i} 块", "decode {i}": "第 {i} 步 decode",
    "decode {i}-{j}, each": "第 {i}-{j} 步 decode，每步", "finished": "结束",
    """What stays between two steps is the KV cache: the keys and values of all tokens so far, in blocks of {size}
    tokens. It grows as the answer does, and nobody knows how far. (The last token was never fed in, so it has no K and
    V.)""": """跨越 step 保留下来的是 KV Cache：到目前为止所有 token 的 K 和 V，按每块 {size} 个 token 存放。它随回答一起增长，
        事先没有人知道会长到多大。（最后一个 token 不再作为输入，所以没有 K 和 V。）""",
    "The model did not say EOS.": "模型没有说 EOS。",
    "The model said EOS as token {n}: there it would have stopped, and nobody could have known before.":
        "模型的第 {n} 个 token 是 EOS：本应在那里结束，而这一点事先谁也不知道。",
    "Here the limit ended it, because this run ignores EOS. {said} It wrote: “{text}”":
        "这次运行忽略 EOS，所以由长度上限来结束。{said}它写的是：“{text}”",
    "the same two come out": "得到的是同样的两个", "other tokens come out": "得到的 token 不同",
    """Traditional serving makes a batch, one forward, an answer, and forgets. The next token then costs the whole
    sequence again. Tried for two tokens ({same}): {again} ms each, where a decode took {decode} ms. All {M} would
    compute {all:,} tokens instead of {used:,}. So the state is not a nuisance: it is what makes generation
    affordable.""": """传统 Serving 是组 Batch、一次 Forward、返回结果，然后什么也不留。这样生成下一个 token 就要把整个序列重算一遍。
        实际试了两个 token（{same}）：每个 {again} ms，而一步 decode 只要 {decode} ms。生成全部 {M} 个要计算 {all:,} 个
        token，而不是 {used:,} 个。所以这份状态不是累赘：正是它让持续生成负担得起。""",

    # 2
    "Prefill and decode: two workloads": "Prefill 与 Decode：两种完全不同的 GPU Workload",
    "The article's two data flows (数据流), as the tensors that have just gone through the first layer:":
        "文章里的两张数据流图，对应刚刚真正流过第一层的张量：",
    "Three real steps": "三个真实的 step", "decode": "decode", "decode + prefill": "decode + prefill",
    "input_ids": "input_ids", "Q": "Q", "K": "K", "V": "V", "KV slots written": "写入的 KV 槽位",
    "KV positions read": "读取的 KV 位置", "logits": "logits",
    """Q is [N, H, d], K and V are [N, Hkv, d]. A decode is a prefill with N = 1; and as the last column shows, the
    engine has no phases at all. It lays the tokens of all requests end to end, each request reads its own history, and
    only its last position becomes logits. The columns are the first step, the second, and the one after {decodes}
    decodes, in which a newcomer's prompt of {question} tokens is computed, too. There the first request reads {first}
    positions, its prompt's and {answer} of its answer; the newcomer's {question} make that {read}.""":
        """Q 是 [N, H, d]，K 和 V 是 [N, Hkv, d]。Decode 就是 N = 1 的 Prefill；从最后一列可以看到，引擎里其实不分阶段：
        所有请求的 token 首尾相接排成一批，每个请求读自己的历史 KV，只有最后一个位置得到 logits。三列分别是第 1 步、第 2 步，
        以及 {decodes} 步 decode 之后的那一步：这时新来了一个 {question} token 的 prompt，同一步里一起计算。其中第一个请求读
        {first} 个位置，即它的 prompt 加上 {answer} 个回答 token；再加上新请求的 {question} 个，共 {read} 个。""",
    "The matrix products of a step at {n} tokens (70B: on each GPU)": "{n} 个 token 处一步的矩阵乘法（70B：每卡）",
    "FLOPs>": "计算量>", "moved>": "访存量>", "FLOP/byte>": "FLOP/字节>", "of peak>": "占算力峰值>", "of bandwidth>": "占带宽>",
    """FLOP/byte is the intensity (计算强度). While it fetches one byte, an H100 could compute {ridge:.0f} FLOPs (this
    machine, as measured: {ours:.1f}). Prefill uses each weight for {n} tokens and lies above: compute-bound. Decode
    uses it for one and lies below: memory-bound. The tiny model's decode is near neither limit here. Its {weights} of
    weights are too small a job: much of the time goes to starting many small operations.""":
        """FLOP/字节就是计算强度。每读一个字节的时间里，H100 能做 {ridge:.0f} 次浮点运算（本机实测：{ours:.1f}）。Prefill
        每读一次权重用于 {n} 个 token，高于这个拐点：Compute-Bound。Decode 只用于一个 token，低于拐点：Memory-Bound。
        小模型在本机的 decode 两个上限都没有接近：{weights} 的权重太小，不少时间花在启动许多小算子上。""",
    """Both use the same hardware. Below, four requests are decoding when a prompt of {n} tokens arrives. Computed in
    one step, it makes everybody wait. In chunks of at most {chunk} (chunked prefill, 分块预填充) it makes several steps a
    little longer, and its own first token may come later. ITL (inter-token latency) is the gap between two tokens of a
    request, TTFT the time to its first.""":
        """两者竞争同一组硬件。下面有四个请求正在 decode，这时来了一个 {n} token 的 prompt。若在一步里算完，所有人都要等它；
        切成每步最多 {chunk} 个 token 的块（Chunked Prefill，分块预填充），则只是有几步稍长一些，而它自己的首个 token 可能
        来得更晚。ITL 是同一请求相邻两个 token 的间隔，TTFT 是首个 token 的时间。""",
    "whole": "整段", "chunked": "分块",
    "ITL of a decoding request as the long prompt arrives, {where}": "长 prompt 到达时，一个 decode 请求的 ITL（{where}）",
    "token number": "第几个 token",
    "The price of a long prefill, in ms": "长 Prefill 的代价（ms）", "others' median ITL>": "其他请求 ITL 中位数>",
    "others' worst ITL>": "其他请求最大 ITL>", "newcomer's TTFT>": "新请求 TTFT>",
    "The chunked run, step by step:": "分块的那次运行，逐步来看：",
    """It goes the other way round, too. Running requests are served first, one token of the budget each; the newcomer's
    prompt gets what they leave. A budget of {budget}, the 70B:""":
        """反过来也会发生。运行中的请求优先，每个 decode 占预算里的 1 个 token；新请求的 prompt 只能用剩下的。预算 {budget}，
        70B：""",
    "Decodes squeeze a prefill (挤压 Prefill)": "Decode 挤压 Prefill", "requests decoding>": "decode 请求数>",
    "budget left>": "剩余预算>", "steps for the prompt>": "prompt 所需步数>", "newcomer's TTFT, ms>": "新请求 TTFT，ms>",
    """With {n} of them the first token comes {times:.0f} times as late as with none, though no step computes more
    tokens. A larger budget would give the prompt more of each step, and make each decode wait longer.""":
        """有 {n} 个 decode 请求时，首个 token 的等待是没有它们时的 {times:.0f} 倍，尽管每一步计算的 token 并没有变多。调大
        预算，prompt 每步能分到更多，但每次 decode 也要等得更久。""",

    # 3
    "Throughput against latency": "吞吐与时延：无法同时最优的权衡",
    "simulating the batch sizes": "正在模拟各个 batch size", "measuring the batch sizes": "正在实测各个 batch size",
    "simulating a burst": "正在模拟突发请求",
    """The running example from 1 to {most} clients, each of which sends its next request when the last is answered,
    through the engine's own scheduler on the ledger's clock. TPOT is a request's mean time per token after the first;
    P99 is what 99 of 100 stay below; times are in ms. All start at once, so the worst TTFT is the first wave's last:
    with a budget of {budget} tokens a step takes in {fit} prompts at most. The prefix cache is off, so each request
    computes its whole prompt. SLO (service level objective, 服务等级目标): P99 TTFT {ttft}, TPOT {tpot}.""":
        """贯穿全文的例子，客户端从 1 个到 {most} 个，各自收到回答后才发下一个请求；调度用引擎自己的 Scheduler，时间用账本估算。
        TPOT 是首个 token 之后平均每个 token 的时间；P99 表示 100 个里有 99 个不超过它；单位都是 ms。所有客户端同时开始，所以
        最差的 TTFT 属于第一波的最后一个：预算 {budget} 个 token，一步最多容得下 {fit} 个 prompt。前缀缓存关闭，每个请求都
        完整计算自己的 prompt。SLO（服务等级目标）：P99 TTFT {ttft}，TPOT {tpot}。""",
    "70B on 8 H100s, simulated": "8 张 H100 上的 70B（模拟）", "the tiny model here, measured": "本机小模型（实测）",
    "batch>": "batch>", "tokens/s>": "每秒 Token>", "P50 TPOT>": "P50 TPOT>", "P99 TPOT>": "P99 TPOT>",
    "P50 TTFT>": "P50 TTFT>", "P99 TTFT>": "P99 TTFT>", "SLO": "SLO", "kept": "满足", "broken": "超出",
    "Batch size, throughput and latency: {title}": "Batch Size 对吞吐和延迟的影响：{title}",
    "throughput (吞吐)": "吞吐", "latency of a request (单请求延迟)": "单请求延迟", "batch size": "批大小 (Batch Size)",
    "% of the largest": "占最大值的 %", "within the SLO": "SLO 之内",
    """It cuts the curve at batch {batch}: {speed:,.0f} tokens/s. Batch {last} has {throughput:.1f} times the
    throughput, {latency:.1f} times the latency (mean E2E, the chart's second line), and, as a newcomer's prefill
    shares its steps with so many decodes, {ttft:.1f} times the median TTFT. What a server is built for is the best
    point within the SLO, not the largest batch.""":
        """SLO 把曲线切在 batch {batch}：{speed:,.0f} token/s。Batch {last} 的吞吐是它的 {throughput:.1f} 倍，延迟却是
        {latency:.1f} 倍（平均端到端时延，即图中第二条线）；新请求的 prefill 要和这么多 decode 挤在同一步里，TTFT 中位数也成了
        {ttft:.1f} 倍。系统的目标不是最大 Batch，而是 SLO 约束之内最好的那一点。""",
    "The article's picture is a sketch": "文章的曲线是示意图", "throughput, article>": "吞吐，文章>", "simulated>": "模拟>",
    "latency, article>": "延迟，文章>",
    """The article draws a schematic curve, to show its form; it names no model and no hardware. Its throughput is at
    {theirs} % where it ends, at batch {batch}. The 70B, simulated, has reached {ours:.0f} % of its largest there and
    grows on: on such hardware saturation comes later. And its latency there is {lat:.1f} times that of batch 1, not
    {article:.1f} times.""":
        """文章画的是示意曲线，只表示形状，没有对应的模型和硬件。它止于 batch {batch}，吞吐在那里是 {theirs} %；模拟的 70B
        在同一处只到最大值的 {ours:.0f} %，而且还在增长：在这样的硬件上饱和来得更晚。它在那里的延迟是 batch 1 的 {lat:.1f}
        倍，而不是 {article:.1f} 倍。""",
    """Now {clients} clients send their request in the same moment, {times} times what keeps the SLO. The engine can let
    them all run, let {n} run (--max-num-seqs) while the rest waits, or let only as many wait (--max-num-waiting) and
    refuse the rest: that is admission control (准入控制). To have too many run breaks the TPOT of all; to let them wait
    breaks the TTFT of the last. Who is refused knows at once, and can go to another replica.""":
        """现在 {clients} 个客户端在同一时刻发来请求，是 SLO 容许数量的 {times} 倍。引擎可以让它们全部运行；或者只让 {n} 个运行
        （--max-num-seqs），其余排队；或者排队的也只收这么多（--max-num-waiting），其余拒绝：这就是 Admission Control
        （准入控制）。同时运行的太多，所有人的 TPOT 都超标；全都排队，最后几个的 TTFT 超标。被拒绝的则立刻知道，可以去找别的副本。""",
    "Too many at once: the 70B, in ms": "一下子来得太多：70B，ms", "let all run": "全部运行",
    "let {n} run, the rest waits": "{n} 个运行，其余排队", "let {n} wait, refuse the rest": "只让 {n} 个排队，其余拒绝",
    "answered>": "已回答>", "refused>": "被拒绝>",
    "What the refused are told: “{words}”": "被拒绝的请求得到的说明：“{words}”",

    # 4
    "Three changes": "三个根本变化", "batching in two ways, in turns": "正在轮流运行两种批处理",
    """{n} requests, {seats} seats. A letter is a request, a capital its prefill, a dot the seat of a request that has
    ended, computed for nobody; the padding of short prompts hides in the capitals and is counted in the table. First
    the traditional way, a batch at a time; then the engine's. {same}""":
        """{n} 个请求，{seats} 个座位。一个字母是一个请求，大写是它的 prefill；点表示请求已经结束、座位仍在白算；短 prompt 的
        padding 藏在大写字母里，计入下面的表格。先是传统方式，一批一批地算；然后是引擎的方式。{same}""",
    "Both give the same text.": "两种方式生成的文本相同。", "The texts differ!": "两种方式生成的文本不同！",
    "static (静态)": "静态", "continuous (连续)": "连续", "{how} batching, {n} steps:": "{how}批处理，{n} 步：",
    "Static against continuous batching": "静态批处理与连续批处理", "steps>": "步数>", "tokens computed>": "计算的 token>",
    "for nobody>": "白算的>", "mean answer, s>": "平均回答，秒>", "tokens/s here>": "本机 token/s>", "70B>": "70B>",
    """Both ran on one engine with as many threads ({threads}), warmed up, taking turns; the median of three rounds. The
    engine also keeps records and makes text of the tokens, and has {here:.1f} times the throughput (70B: ~{big:.1f}
    times). The static loop wastes the padding of short prompts and the seats of those who have ended.""":
        """两者在同一个引擎上运行，同为 {threads} 个线程，预热之后轮流进行，取三轮的中位数。引擎还要多做记录和文本解码，吞吐仍是
        {here:.1f} 倍（70B：~{big:.1f} 倍）。静态方式浪费的是短 prompt 的 padding，以及请求结束后空占的座位。""",
    """The three changes, in the figures of the continuous run. From static to dynamic: {sets} different sets of active
    requests in {steps} steps. From stateless to stateful: {least} to {most} tokens of KV held. From one workload to a
    mixture: {mixed} steps that prefill for one request while others decode.""":
        """三个变化，用连续批处理这次运行的数字来说。从静态计算到动态执行：{steps} 步里出现了 {sets} 种不同的活跃请求集合。从无状态
        到带状态：持有的 KV 在 {least} 到 {most} 个 token 之间变化。从单一 Workload 到混合 Workload：有 {mixed} 步，一个请求在
        prefill，其他请求在 decode。""",
    """A pool of {pool} blocks; requests of {question} tokens, whose answers may have up to {most} and mostly end far
    earlier. Memory that is given out once must be enough for the longest. Given out block by block as a request grows,
    it holds more requests. But they all grow, and nobody keeps a block back: once none is free, the request that was
    admitted last gives up all of its blocks (preemption, 抢占), waits, and computes its tokens again (recompute,
    重计算).""":
        """一个 {pool} 块的 KV 池；每个请求 {question} 个 token，回答最多 {most} 个，多数远早于此就结束。若按请求一次性分配内存，
        就得按最长的情况预留；若随请求增长逐块分配，就能容纳更多请求。但它们都在增长，也没有人留出余量：一旦没有空闲块，最后被接纳
        的请求交出它全部的块（抢占），回去等待，再把自己的 token 重新算一遍（重计算）。""",
    "The same requests in the same pool, the 70B": "同样的请求，同样的池（70B）", "reserved up front": "一次性预留",
    "block by block": "逐块分配", "let in>": "可同时进入>", "pool in use>": "池的使用率>", "preempted>": "抢占次数>",
    "tokens again>": "重算 token>", "The second run, step by step:": "第二次运行，逐步来看：",
    "The {again} tokens computed twice are the price. With it the run took {share:.0%} of the other's time.":
        "代价是有 {again} 个 token 算了两遍。即便如此，用时只有前一种的 {share:.0%}。",

    # 5
    "The reading map": "阅读地图",
    "Four questions, and two constraints that cut across them": "四个问题，以及两个横切约束",
    "question": "问题", "chapters": "章", "where": "代码",
    "How to measure? (如何衡量)": "如何衡量", "How to schedule? (如何调度)": "如何调度",
    "How to keep state? (如何管理状态)": "如何管理状态", "How to compute? (如何计算)": "如何计算",
    "Models change (模型在变)": "模型在变", "Hardware changes (硬件在变)": "硬件在变",
    "What the constraints mean: the same request, with another model or on other hardware.":
        "横切约束意味着什么：同一个请求，换一个模型，或者换一种硬件。",
    "The same request elsewhere": "同一个请求，换个环境", "the running example": "贯穿全文的例子",
    "Llama-3-8B on one GPU": "Llama-3-8B，单卡", "70B without GQA": "70B，不用 GQA", "70B on 8 A100s": "70B，8 张 A100",
    "70B on 8 B200s": "70B，8 张 B200",
    "KiB a token>": "每 Token KiB>", "GB a GPU>": "GB/卡>", "prefill ms>": "prefill ms>", "decode ms>": "decode ms>",
    "at once>": "可同时容纳>",

    # 6
    "The running example": "一个贯穿全文的例子",
    """The two base quantities (算一笔账). Weights: {parameters:,} parameters x {n} bytes = {weights:.1f} GB, {share:.1f}
    GB on each of {tp} GPUs. KV of a token: 2 (K and V) x {layers} layers x {heads} KV heads x {d} x {n} bytes = {kv:,}
    bytes = {kib} KiB, {kib_gpu} KiB a GPU.""":
        """算一笔账，先算两个最基础的量。权重：{parameters:,} 个参数 x {n} 字节 = {weights:.1f} GB，{tp} 张卡每卡
        {share:.1f} GB。每个 token 的 KV：2（K 和 V）x {layers} 层 x {heads} 个 KV head x {d} x {n} 字节 = {kv:,} 字节 =
        {kib} KiB，每卡 {kib_gpu} KiB。""",
    "Llama-3-70B, FP16, 8 x H100 80GB, TP=8": "Llama-3-70B，FP16，8 张 H100 80GB，TP=8", "value>": "数值>", "how": "算法",
    """The request of section 1 kept the same books: {prompt} blocks after the prompt, {end} at the end, {steps} steps.
    Only a token's share differs: {bytes:,} bytes, in fp32.""":
        """第 1 节里真实运行的请求是同一本账：prompt 算完时 {prompt} 块，结束时 {end} 块，共 {steps} 步。不同的只是每个 token
        的大小：{bytes:,} 字节，fp32。""",
    "--tp 4: fewer ranks; are the tokens and the blocks the same?": "--tp 4：少几个 rank，token 和块数还一样吗？",
    """python chapters/tools/sweep.py --no-enable-prefix-caching --slo ttft:{ttft} tpot:20: only the limit of TPOT is
    another; where does it cut now?""":
        """python chapters/tools/sweep.py --no-enable-prefix-caching --slo ttft:{ttft} tpot:20：只改 TPOT 的上限，现在切在
        哪里？""",
    "In this file, CHUNK = 64, then 1024: who pays, the newcomer or the others?":
        "在本文件里设 CHUNK = 64，再设 1024：代价由谁承担，新请求还是其他请求？",
    "In this file, SEATS = 8: the static loop takes fewer steps; does its waste shrink, and why not?":
        "在本文件里设 SEATS = 8：静态批处理的步数少了，浪费也少了吗？为什么？",
    "In this file, POOL = 128: who is preempted now? From which size on nobody?":
        "在本文件里设 POOL = 128：这时谁被抢占？池大到多少就没有抢占了？",
    """Then the exercises, chapters/exercises/ch01/tasks.py, with make grade CH=1; and the article's chapter 2.""":
        "然后做练习 chapters/exercises/ch01/tasks.zh.py，用 make grade CH=1 评分；接着读文章第 2 章。",
}
