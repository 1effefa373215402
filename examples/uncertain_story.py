"""Find the words of a generated story that a language model is unsure of because it has seen too few data.

Needs the extra `huggingface` and the folder `tinystories-260k`, a Llama with 260,000 weights, in LAPWING_DATA.

    LAPWING_DATA=data python examples/uncertain_story.py
"""

import os
from pathlib import Path

import torch
import transformers

import lapwing
from lapwing.huggingface import generate

FOLDER = Path(os.environ.get("LAPWING_DATA", ".")) / "tinystories-260k"
START = "Once upon a time, there was a little"


def main() -> None:
    """Fit and tune a posterior over the last attention layer, write a story, rank its words by their uncertainty."""
    if not FOLDER.is_dir():
        print(f"there is no folder {FOLDER}: set LAPWING_DATA")
        return
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    transformers.set_seed(0)

    begin = tokenizer([START] * 16, return_tensors="pt", return_token_type_ids=False)
    length = begin["input_ids"].shape[1] + 12
    stories = model.generate(**begin, do_sample=True, min_length=length, max_length=length)
    batches = [{"input_ids": part, "labels": part} for part in stories.split(8)]

    la = lapwing.fit(model, batches[:1], "classification", structure="kron", factor="mc", select="*layers.4.self_attn*",
                     generator=torch.Generator().manual_seed(0), memory=1_000_000_000)  # fmt: skip
    la = la.tune(batches[1:], grid={"prior": (10.0, 100.0, 1e3, 1e4)}, learn="prior", rule="lowest")
    print(la.tuned)

    prompt = {name: value[:1] for name, value in begin.items()}
    story = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    p = la.predict({"input_ids": story}, samples=32)
    unknown = p.epistemic[0, :-1]  # position t is about the token at t + 1
    for k in unknown.topk(5).indices.tolist():
        before, token = tokenizer.decode(story[0, max(0, k - 8) : k + 1]), tokenizer.decode(story[0, k + 1])
        print(f"{unknown[k]:.3f} nats unknown: …{before!r} -> {token!r} (p = {p.probs[0, k, story[0, k + 1]]:.2f})")

    print("\nthe same beginning, by networks from the posterior:")
    for text in generate(la, prompt, samples=3, max_new_tokens=24, do_sample=False):
        print("-", tokenizer.decode(text[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
