"""A callback of Transformers' Trainer: it fits the best model, on the trainer's own batches."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import lapwing.huggingface as door  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Trainer's own


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of several lengths whose class is their first token, modulo three."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 8, (size,), generator=generator).tolist()
        self.ids = [torch.randint(1, 30, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": int(self.ids[index][0]) % 3}


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    ids = torch.stack([nn.functional.pad(item["input_ids"], (0, longest - len(item["input_ids"]))) for item in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([i["labels"] for i in items])}


def classifier() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return hf.BertForSequenceClassification(config)


def trainer(folder: Path, callback: Any, **options: Any) -> Any:
    hf.utils.logging.set_verbosity_error()
    arguments = hf.TrainingArguments(
        output_dir=str(folder), num_train_epochs=3, per_device_train_batch_size=8, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", learning_rate=1e-2, **options,
    )  # fmt: skip
    return hf.Trainer(
        classifier(), arguments, train_dataset=Sentences(40, 0), eval_dataset=Sentences(24, 1), data_collator=padded,
        callbacks=[callback],
    )  # fmt: skip


def test_fits_after_the_best_model_is_loaded(tmp_path: Path) -> None:
    """The lowest accuracy counts as best, so that the best model is not the last one."""
    callback = door.LaplaceCallback("classification", structure="kron", select="classifier.*", progress=False)
    with pytest.raises(lapwing.UnsupportedOperation, match="fitted when"):
        _ = callback.la
    run = trainer(
        tmp_path, callback, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch",
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    run.train()
    best = Path(run.state.best_model_checkpoint)
    saved = hf.BertForSequenceClassification.from_pretrained(best)
    assert run.state.best_metric == max(entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry)
    assert torch.equal(callback.la.module.classifier.weight, saved.classifier.weight)
    assert callback.la.n_data == 40
    assert callback.la.tuning is not None
    batch = padded([Sentences(24, 1)[k] for k in range(5)])
    p = callback.la.predict(batch)
    assert p.probs.shape == (5, 3)
    # the same posterior from a fit by hand at the saved weights
    data = [padded([Sentences(40, 0)[k] for k in range(start, start + 8)]) for start in range(0, 40, 8)]
    hand = lapwing.fit(saved, data, "classification", structure="kron", select="classifier.*", progress=False)
    mean = callback.la.replace(prior=1.0, temperature=1.0, logit_temperature=1.0)
    assert torch.allclose(hand.predict(batch).probs, mean.predict(batch).probs, atol=1e-4)


def test_padding_does_not_count(tmp_path: Path) -> None:
    """A sentence has the same prediction alone and padded to the length of others."""
    callback = door.LaplaceCallback("classification", structure="kron", tune=False, progress=False)
    trainer(tmp_path, callback, save_strategy="no").train()
    assert callback.la.tuning is None
    items = [Sentences(24, 1)[k] for k in range(6)]
    together = callback.la.predict(padded(items)).probs
    for item, probs in zip(items, together):
        assert torch.allclose(callback.la.predict(padded([item])).probs[0], probs, atol=1e-4)


def test_held_out_data_may_be_given(tmp_path: Path) -> None:
    data = [padded([Sentences(24, 1)[k] for k in range(24)])]
    options = {"data": data, "grid": {"prior": (2.0, 3.0)}, "learn": "prior"}
    callback = door.LaplaceCallback("classification", select="classifier.*", structure="kron", tune=options)
    trainer(tmp_path, callback, save_strategy="no", max_steps=2).train()
    assert callback.la.tuning is not None
    assert callback.la.tuning.setting.deterministic or callback.la.tuning.setting.precision.item() in (2.0, 3.0)


@pytest.mark.slow
@pytest.mark.data
def test_questions_by_adapters_of_a_language_model(tmp_path: Path, data_dir: Path) -> None:
    """TREC-6 questions by LoRA on the 260k Llama: trained, fitted and tuned by Trainer, then loaded from the folder."""
    peft = pytest.importorskip("peft")
    hf.utils.logging.disable_progress_bar()
    hf.set_seed(0)
    folder = data_dir / "tinystories-260k"
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, pad_token="</s>")

    def read(name: str, size: int) -> list[dict[str, Any]]:
        with gzip.open(data_dir / "text-classification" / f"trec6_{name}.tsv.gz", "rt", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file]
        found = [sorted(row, key=len) for row in rows[:size]]
        return [{"input_ids": tokenizer(text)["input_ids"][:32], "labels": int(label)} for label, text in found]

    def base() -> Any:
        hf.set_seed(0)
        return hf.LlamaForSequenceClassification.from_pretrained(
            folder, num_labels=6, pad_token_id=tokenizer.pad_token_id
        )

    train, test = read("train", 900), read("test", 300)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS")
    model = peft.get_peft_model(base(), lora)
    callback = door.LaplaceCallback("classification", structure="kron", select="*lora*", progress=False)
    arguments = hf.TrainingArguments(
        str(tmp_path / "run"), num_train_epochs=3, per_device_train_batch_size=16, learning_rate=5e-3, report_to=[],
        use_cpu=True, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, disable_tqdm=True,
    )  # fmt: skip
    hf.Trainer(
        model, arguments, train_dataset=train[:700], eval_dataset=train[700:], processing_class=tokenizer,
        callbacks=[callback],
    ).train()  # fmt: skip
    batches = [dict(tokenizer.pad(test[k : k + 50], return_tensors="pt")) for k in range(0, 300, 50)]
    report = lapwing.evaluate({"MAP": model, "Laplace": callback.la}, batches).to_dict()
    scores = {name: report["models"][name] for name in ("MAP", "Laplace")}
    assert scores["Laplace"]["accuracy"] > 0.5
    assert scores["Laplace"]["nll"] < scores["MAP"]["nll"] + 0.02
    model.save_pretrained(tmp_path / "adapter")
    door.save(callback.la, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", adapter_name="questions")
    la = door.load(tmp_path / "adapter", again)
    assert torch.allclose(la.predict(batches[0]).probs, callback.la.predict(batches[0]).probs, atol=1e-6)


def test_wrong_options_are_told_before_the_training() -> None:
    with pytest.raises(lapwing.BadData, match=r"'structur' is no option of lapwing\.fit, which takes .*structure"):
        door.LaplaceCallback("classification", structur="kron")
    with pytest.raises(lapwing.LapwingError):
        door.LaplaceCallback("classificaton")


def test_several_processes_are_refused() -> None:
    callback = door.LaplaceCallback("classification")
    with pytest.raises(lapwing.UnsupportedOperation, match=r"would count twice.*data="):
        callback.on_train_end(type("Arguments", (), {"world_size": 2}), None, None, model=None)


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = "import sys; sys.modules['transformers'] = None; import lapwing.huggingface"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ImportError: lapwing.huggingface needs Transformers: pip install 'lapwing-torch[huggingface]'" in run.stderr
