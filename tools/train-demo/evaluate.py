"""Free-running greedy scores on heldout/tasks.jsonl.

    python evaluate.py torch RUN/bf16                 # transformers in float32, on the GPU or the CPU; takes a checkpoint too, dequantized
    python evaluate.py mlx ../../assets/demo          # mlx-lm on the checkpoint, in float32 on the CPU; slow: see --each

Every answer is generated token by token and has to end by itself.
"""

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer

import generate

LIMIT = {"story": 420, "add1": 60, "add2": 60, "add1_think": 120, "add2_think": 160}
OPEN, CLOSE = "<think>\n", "</think>"


def prompts(rows):
    render = generate.Template()
    tok = Tokenizer.from_file(str(generate.ASSETS / "tokenizer.json"))
    texts = [render(r["messages"], r["tools"], add_generation_prompt=True, enable_thinking=r["thinking"]) for r in rows]
    return tok, [e.ids for e in tok.encode_batch(texts, add_special_tokens=False)]


def parse_call(text):
    """(name, arguments as text) of a well-formed single call, else None."""
    m = re.fullmatch(r"<tool_call>\n<function=([^>\n]+)>\n((?:<parameter=[^>\n]+>\n.*?\n</parameter>\n)*)</function>\n</tool_call>", text, re.S)
    if not m:
        return None
    return m[1], dict(re.findall(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", m[2], re.S))


def said(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def judge(row, text):
    """(thinking as asked, right) of a finished answer."""
    if row["thinking"]:
        think, closed, answer = text.partition(CLOSE + "\n\n")
        obeyed = bool(closed) and bool(think.strip()) and CLOSE not in answer
    else:
        answer, obeyed = text, "think>" not in text
    want = row["expect"]
    if "number" in want:
        right = (re.findall(r"-?\d+", answer) or [""])[-1] == want["number"]
    elif "arguments" in want:
        call = parse_call(answer)
        right = call is not None and call[0] == want["name"] and call[1] == {k: said(v) for k, v in want["arguments"].items()}
    elif "json" in want or "json_list" in want:
        try:
            value = json.loads(answer)
            right = value == want["json"] if "json" in want else isinstance(value, list) and len(value) == want["json_list"]
        except json.JSONDecodeError:
            right = False
    elif "starts" in want:
        right = answer.startswith(want["starts"])
    elif "text" in want:
        right = answer == want["text"]
    else:                                                    # a story: about what was asked, and of some length
        about = want["about"].lower()
        right = (about in answer.lower() or not about) and len(answer.split()) >= 50
    return obeyed, right


def greedy_torch(model, ids, limit, batch):
    """Greedy continuations with the cache, padded on the left: masked positions leave the delta state and the convolution at zero."""
    import torch

    device = next(model.parameters()).device
    done, order = [None] * len(ids), sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for at in range(0, len(order), batch):
        some = order[at:at + batch]
        width = max(len(ids[i]) for i in some)
        x = torch.tensor([[STOPS[0]] * (width - len(ids[i])) + ids[i] for i in some], device=device)
        mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in some], device=device)
        with torch.no_grad():
            out = model.generate(input_ids=x, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=list(STOPS), pad_token_id=STOPS[0])
        for i, row in zip(some, out[:, width:].tolist()):
            ends = [n for n, t in enumerate(row) if t in STOPS]
            done[i] = row[:ends[0] + 1] if ends else row
        print(at + len(some), "of", len(order), flush=True)
    return done


STOPS = ()


def greedy_mlx(path, ids, limits):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(path), strict=True)
    model.set_dtype(mx.float32)
    out = []
    for n, (prompt, limit) in enumerate(zip(ids, limits)):
        cache, x, got = make_prompt_cache(model), mx.array(prompt)[None], []
        while len(got) < limit:
            t = mx.argmax(model(x, cache=cache)[0, -1]).item()
            got.append(t)
            if t in STOPS:
                break
            x = mx.array([[t]])
        out.append(got)
        if n % 50 == 49:
            print(n + 1, "of", len(ids), flush=True)
    return out


def main():
    global STOPS
    ap = argparse.ArgumentParser()
    ap.add_argument("engine", choices=["torch", "mlx"])
    ap.add_argument("checkpoint", type=Path)
    ap.add_argument("--tasks", type=Path, default=Path(__file__).parent / "heldout" / "tasks.jsonl")
    ap.add_argument("--only", help="one task")
    ap.add_argument("--each", type=int, default=100, help="how many prompts of each task")
    ap.add_argument("--answers", type=Path, help="where to write every answer")
    ap.add_argument("--out", type=Path, help="where to write the scores")
    args = ap.parse_args()
    rows = [json.loads(line) for line in args.tasks.read_text().splitlines()]
    if args.only:
        rows = [r for r in rows if r["task"] == args.only]
    rows = [r for i, r in enumerate(rows) if sum(q["task"] == r["task"] for q in rows[:i]) < args.each]
    tok, ids = prompts(rows)
    STOPS = (tok.token_to_id("<|endoftext|>"), tok.token_to_id("<|im_end|>"))
    limits = [LIMIT.get(r["task"], 200) for r in rows]
    if args.engine == "torch":
        import torch

        import model as demo

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = demo.load(args.checkpoint, experts="eager").to(device).eval()
        demo.plain_delta_rule()
        demo.dense_experts()
        got = [None] * len(rows)
        for limit in sorted(set(limits)):
            some = [i for i in range(len(rows)) if limits[i] == limit]
            for i, a in zip(some, greedy_torch(model, [ids[i] for i in some], limit, 400 if device == "cuda" else 100)):
                got[i] = a
    else:
        got = greedy_mlx(args.checkpoint, ids, limits)
    scores = defaultdict(lambda: {"prompts": 0, "stopped": 0, "switch": 0, "right": 0})
    lines = []
    for r, a in zip(rows, got):
        stopped = a[-1] in STOPS
        text = tok.decode(a[:-1] if stopped else a, skip_special_tokens=True)
        obeyed, right = judge(r, text)
        s = scores[r["task"]]
        s["prompts"] += 1
        s["stopped"] += stopped
        s["switch"] += obeyed
        s["right"] += right and stopped
        lines.append(json.dumps({"task": r["task"], "user": r["messages"][-1]["content"], "thinking": r["thinking"], "expect": r["expect"], "got": text, "right": right and stopped}, ensure_ascii=False))
    if args.answers:
        args.answers.write_text("\n".join(lines) + "\n")
    for task, s in scores.items():
        print(f"{task:16} " + "  ".join(f"{k} {v}" for k, v in s.items()))
    if args.out:
        args.out.write_text(json.dumps({"engine": args.engine, "scores": scores}, indent=1) + "\n")


if __name__ == "__main__":
    main()
