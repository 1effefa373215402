# %% [markdown]
# # Adapters of a language model
#
# A language model is fine-tuned with LoRA adapters: small matrices beside the frozen weights. A posterior over the adapters says, token by
# token, how much the fine-tuning data leave open. The model is a pretrained Llama with 260,000 weights that writes children's stories
# (`tinystories-260k` in the folder named by `LAPWING_DATA`).

# %%
import os
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model

import lapwing

transformers.utils.logging.disable_progress_bar()
transformers.set_seed(0)
folder = Path(os.environ["LAPWING_DATA"]) / "tinystories-260k"
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
base = transformers.LlamaForCausalLM.from_pretrained(folder)
model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

# %% [markdown]
# ## Fine-tune the adapters
# The data are twenty texts about a dragon that differ in a name and a place. The adapters are trained with the model's own loss.

# %%
names, places = ["Tim", "Lily", "Max", "Anna", "Ben"], ["cave", "garden", "forest", "castle"]
texts = [f"The dragon lived in a {place}. One day {name} saw the dragon in the {place} and said hello." for name in names for place in places]
tokens = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
batch = {**tokens, "labels": labels}
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
model.eval()
before = model(**batch).loss.item()
for _ in range(40):
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()
print(f"loss {before:.2f} before, {model(**batch).loss.item():.2f} after fine-tuning")

# %% [markdown]
# ## Fit a posterior over the adapters
# `factor="mc"` estimates the curvature from sampled tokens; the exact curvature would need one direction per token and word. A fit covers
# only weights that require gradients, so the posterior is over the adapters.

# %%
la = lapwing.fit(
    model, [batch], "classification", structure="kron", factor="mc", prior=3000.0, generator=torch.Generator().manual_seed(0)
)
print(f"{la.params.size:,} weights in {len(la.params.names)} tensors")

# %% [markdown]
# ## Compare the uncertainty of two texts
# `p.epistemic[:, t]` is the epistemic uncertainty about the token at t + 1, in nats. It is small in a text like the fine-tuning data, and
# larger in a text about something else.

# %%
for text in (texts[0], "The robot lived in a volcano. One day Zoe heard the robot sing."):
    ids = tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"]
    p = la.predict({"input_ids": ids}, samples=32)
    print(f"{p.epistemic[0, :-1].mean():.3f} nats per token: {text}")
