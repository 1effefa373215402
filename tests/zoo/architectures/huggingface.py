"""Tiny Hugging Face models from their configurations: nothing is downloaded."""

import torch

from .registry import Net, add, attend, floats, ints, named

try:
    import transformers as hf
except ImportError:  # the extra is not installed
    hf = None

TEXT = named(input_ids=lambda n: torch.randint(3, 9, (n, 4)), attention_mask=attend(4))
TOKENS = named(input_ids=ints(7, 3))
SMALL = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 5}


def bert():
    return hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=9, max_position_embeddings=5, num_labels=3, **SMALL)
    )


def bert_tokens():
    return hf.BertForTokenClassification(hf.BertConfig(vocab_size=9, max_position_embeddings=5, num_labels=2, **SMALL))


def gpt2():
    config = hf.GPT2Config(
        vocab_size=9,
        n_positions=5,
        n_embd=4,
        n_layer=1,
        n_head=2,
        n_inner=5,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2ForSequenceClassification(config)


def llama():
    config = hf.LlamaConfig(
        vocab_size=7, max_position_embeddings=8, num_key_value_heads=1, tie_word_embeddings=True, **SMALL
    )
    return hf.LlamaForCausalLM(config)


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=4, patch_size=2, num_channels=1, num_labels=3, **SMALL))


def t5_encoder():
    config = hf.T5Config(
        vocab_size=7, d_model=4, d_kv=2, d_ff=5, num_layers=1, num_heads=2, relative_attention_num_buckets=4
    )
    encoder = hf.T5EncoderModel(config)
    return Net(
        lambda s, input_ids: s.head(s.encoder(input_ids=input_ids).last_hidden_state.mean(1)),
        encoder=encoder,
        head=torch.nn.Linear(4, 2),
    )


if hf is not None:
    add("hf_bert", bert, TEXT)
    add("hf_bert_tokens", bert_tokens, TEXT, "tokens")
    add("hf_gpt2", gpt2, named(input_ids=lambda n: torch.randint(3, 9, (n, 4))))
    add("hf_llama", llama, TOKENS, "tokens", tolerance=1e-5)
    add("hf_vit", vit, named(pixel_values=floats(1, 4, 4)))
    add("hf_t5_encoder", t5_encoder, TOKENS, tolerance=1e-5)
