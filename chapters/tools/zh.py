"""What the tools of this folder say, in Chinese; lang.py says how it is looked up."""
ZH = {
    # page.py
    "starting": "正在启动",
    "… {what}, {seconds:.0f} s": "……{what}，已用 {seconds:.0f} 秒",
    "{title} (about {seconds:.0f} s in all on {cores} cores, TP={tp})":
        "{title}（全程约 {seconds:.0f} 秒，{cores} 核，TP={tp}）",
    "{width} columns cut tables short; --width {tables} shows them whole.":
        "{width} 列放不下完整的表格；用 --width {tables} 可以看全。",
    "Now try": "动手试试",
    "{seconds:.0f} seconds; the first line said {forecast:.0f}.": "用时 {seconds:.0f} 秒；第一行的预计是 {forecast:.0f} 秒。",
    "seat {i}": "座位 {i}", "prefill": "prefill", "decode": "decode", "computed for nobody": "白算的", "step": "步",
    "Who sat where, step by step": "每一步里谁坐在哪个座位",
    # show.py
    "preempted (抢占)": "被抢占", "recompute (重计算)": "重计算", "prefill after a prefix hit": "命中前缀后的 prefill",
    "prefill chunk": "prefill 分块", "waiting": "等待", "no budget left for it": "没分到预算",
    "1 block hit": "命中 1 块", "{n} blocks hit": "命中 {n} 块",
    "steps": "各步", "start ms": "开始 ms", "took ms": "用时 ms", "requests": "请求", "tokens": "token 数", "run": "运行",
    "wait": "等待", "free blocks": "空闲块", "{n} steps more": "另外 {n} 步", "{n} decodes": "{n} 个 decode",
    "{name} preempted": "{name} 被抢占", "{name} done": "{name} 完成", "nobody": "无",
    "… and {n} requests more": "……另有 {n} 个请求",
    "One column is {n} steps: the first of these letters that occurs in them.":
        "一列代表 {n} 步：图例中排在最前、且在这几步里出现过的那个字母。",
    "Who did what in which step": "每一步里谁在做什么",
    "0 null block   . free   + free, still cached   2-9 * held by so many   capital: full and cached":
        "0 空块   . 空闲   + 空闲但仍有缓存   2-9 * 被几个请求共享   大写：已满并进入缓存",
    "The KV block pool": "KV 块池", "full and cached": "已满并进入缓存", "not full yet": "未满", "free": "空闲",
    "shared by two": "两个请求共享", "free, still cached": "空闲但仍有缓存",
    # ledger.py
    "parameters": "参数量", "embedding, layers, last norm, LM head": "embedding、各层、最后的 norm、LM head",
    "weights": "权重", "{n} bytes each": "每个参数 {n} 字节", "weights a GPU": "每卡权重",
    "TP={tp}, norms on each": "TP={tp}，norm 每卡一份", "KV a token": "每 token 的 KV",
    "2 x {layers} layers x {heads} KV heads x {d} x {n} bytes": "2 x {layers} 层 x {heads} 个 KV head x {d} x {n} 字节",
    "KV a token and GPU": "每 token 每卡的 KV", "{n} KV heads each": "每卡 {n} 个 KV head",
    "KV of the prompt, {n} tokens": "prompt 的 KV（{n} token）", "{n} blocks of {size}": "{n} 块，每块 {size} 个 token",
    "KV at the end, {n} tokens": "结束时的 KV（{n} token）", "{n} blocks": "{n} 块", "system prompt": "system prompt",
    "a second request hits them and computes {n} tokens": "第二个请求命中这些块，只需计算 {n} 个 token",
    "FLOP a byte, prefill": "计算强度，prefill", "FLOP a byte, decode": "计算强度，decode",
    "more than the ridge, {ridge:.0f}, is bound by compute": "FLOP/字节；高于拐点 {ridge:.0f}，受限于计算",
    "each weight is read for one token": "每读一次权重，只用于一个 token",
    "prefill alone": "单独一次 prefill", "prefill after the hit": "命中之后的 prefill", "decode alone": "单独一步 decode",
    "estimated: the least TTFT": "估算：TTFT 的下限", "estimated: the least TTFT then": "估算：命中时 TTFT 的下限",
    "estimated: the least ITL": "估算：ITL 的下限", "KV pool": "KV 池", "~{n:,} tokens": "~{n:,} 个 token",
    "estimated: {share} of {memory:.0f} GB, less weights and activations":
        "估算：{memory:.0f} GB 的 {share}，减去权重和激活",
    "requests at once": "可同时容纳的请求", "estimated: that fit whole, sharing nothing": "估算：完整放下，互不共享",
}
