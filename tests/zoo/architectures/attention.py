"""Attention, transformers and vision transformers."""

import torch
import torch.nn.functional as F
from torch import nn

from .registry import Net, add, architecture, floats, ints, padding, several, weight


def attended(**options):
    """Self-attention over (n, 3, 4), mean over tokens, linear; the model permutes where batch is not first."""

    def call(s, x, mask=None):
        h = x if s.mha.batch_first else x.transpose(0, 1)
        h, _ = s.mha(h, h, h, key_padding_mask=mask)
        return s.head(h.mean(1 if s.mha.batch_first else 0))

    return Net(call, mha=nn.MultiheadAttention(4, 2, **options), head=nn.Linear(4, 2))


add("attention", lambda: attended(batch_first=True, dropout=0.1), floats(3, 4))
add("attention_time_major", lambda: attended(), floats(3, 4))
add("attention_padding_mask", lambda: attended(batch_first=True), several(floats(3, 4), padding(3)))
add("attention_bias_kv", lambda: attended(add_bias_kv=True), floats(3, 4))
add("attention_zero_attn", lambda: attended(batch_first=True, add_zero_attn=True, bias=False), floats(3, 4))
add("attention_everything", lambda: attended(add_bias_kv=True, add_zero_attn=True), several(floats(3, 4), padding(3)))


@architecture(several(floats(2, 4), floats(3, 3), floats(3, 2)))
def attention_kdim_vdim():
    def call(s, q, k, v):
        h, w = s.mha(q, k, v)
        return s.head(torch.cat([h.mean(1), w.flatten(1)], 1))

    return Net(call, mha=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True), head=nn.Linear(10, 2))


@architecture(floats(3, 4), "tokens")
def attention_causal_no_weights():
    def call(s, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        h, _ = s.mha(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        return s.head(h)

    return Net(call, mha=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 2))


@architecture(floats(3, 4))
def attention_fused_qkv():
    """GPT-style: one projection for q, k and v; scaled_dot_product_attention."""

    def call(s, x):
        n, t, _ = x.shape
        q, k, v = s.qkv(x).view(n, t, 3, 2, 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return s.head(s.out(h.transpose(1, 2).reshape(n, t, 4))[:, -1])

    return Net(call, qkv=nn.Linear(4, 12, bias=False), out=nn.Linear(4, 4), head=nn.Linear(4, 2))


@architecture(floats(3, 4))
def attention_heads_in_batch():
    """Heads folded into the batch axis, bmm and softmax by hand."""

    def call(s, x):
        n, t, _ = x.shape

        def heads(h):
            return h.view(n, t, 2, 2).transpose(1, 2).reshape(n * 2, t, 2)

        q, k, v = heads(s.q(x)), heads(s.k(x)), heads(s.v(x))
        a = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * s.temperature, -1)
        h = torch.bmm(a, v).view(n, 2, t, 2).transpose(1, 2).reshape(n, t * 4)
        return s.head(h)

    return Net(
        call,
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4, bias=False),
        v=nn.Linear(4, 4),
        temperature=weight(1, 1, 1),
        head=nn.Linear(12, 2),
    )


for _norm_first in (False, True):
    for _batch_first in (False, True):
        _name = f"encoder_{'pre' if _norm_first else 'post'}_norm_{'batch' if _batch_first else 'time'}_first"
        add(
            _name,
            lambda nf=_norm_first, bf=_batch_first: Net(
                lambda s, x: s.head(s.layer(x).mean(1) if bf else s.layer(x.transpose(0, 1))[0]),
                layer=nn.TransformerEncoderLayer(
                    4, 2, 5, norm_first=nf, batch_first=bf, activation="gelu" if nf else "relu"
                ),
                head=nn.Linear(4, 2),
            ),
            floats(3, 4),
        )


@architecture(several(floats(3, 4), padding(3)), "tokens")
def encoder_stack_padding_mask():
    layer = nn.TransformerEncoderLayer(4, 1, 3, batch_first=True, bias=False)
    stack = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
    return Net(lambda s, x, mask: s.head(s.stack(x, src_key_padding_mask=mask)), stack=stack, head=nn.Linear(4, 2))


@architecture(several(floats(2, 4), floats(3, 4)), "tokens")
def decoder_layer():
    def call(s, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return s.head(s.layer(x, memory, tgt_mask=mask))

    return Net(call, layer=nn.TransformerDecoderLayer(4, 2, 3, batch_first=True), head=nn.Linear(4, 2))


def vit(add_class_token):
    def call(s, x):
        h = s.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([add_class_token(s.cls, x.shape[0]), h], 1) + s.pos
        return s.head(s.norm(s.layer(h))[:, 0])

    return Net(
        call,
        patch=nn.Conv2d(1, 4, 2, stride=2),
        cls=weight(1, 1, 4),
        pos=weight(1, 5, 4),
        layer=nn.TransformerEncoderLayer(4, 2, 4, batch_first=True, norm_first=True),
        norm=nn.LayerNorm(4),
        head=nn.Linear(4, 2),
    )


add("vit_class_token_expanded", lambda: vit(lambda cls, n: cls.expand(n, -1, -1)), floats(1, 4, 4))
add("vit_class_token_repeated", lambda: vit(lambda cls, n: cls.repeat(n, 1, 1)), floats(1, 4, 4))


@architecture(floats(3, 4))
def learned_queries():
    """Perceiver-like: queries and their projection depend on no sample until they meet the data."""

    def call(s, x):
        q = s.norm(s.project(s.queries))  # (2, 4)
        h, _ = s.mha(q.unsqueeze(0).expand(x.shape[0], -1, -1), x, x)
        return s.head(h.flatten(1))

    return Net(
        call,
        queries=weight(2, 3),
        project=nn.Linear(3, 4),
        norm=nn.LayerNorm(4),
        mha=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(8, 2),
    )


@architecture(floats(2, 4, 4))
def swin_windows():
    """Shifted windows folded into the batch, with a table of relative position biases."""

    def call(s, x):
        n = x.shape[0]
        h = torch.roll(x.permute(0, 2, 3, 1), (-1, -1), (1, 2))  # (n, 4, 4, 2)
        h = h.view(n, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(n * 4, 4, 2)  # windows of 2×2
        q, k, v = s.qkv(s.norm(h)).chunk(3, -1)
        bias = s.table[s.index.view(-1)].view(4, 4)
        h = torch.softmax(q @ k.transpose(-2, -1) / 2**0.5 + bias, -1) @ v
        h = s.proj(h).view(n, 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(n, 16, 2)
        return s.head(h.amax(1))

    at = torch.tensor([(i, j) for i in range(2) for j in range(2)])
    index = ((at[:, None] - at[None]) + 1) @ torch.tensor([3, 1])
    return Net(
        call,
        qkv=nn.Linear(2, 6),
        norm=nn.LayerNorm(2),
        table=weight(9),
        index=index,
        proj=nn.Linear(2, 2),
        head=nn.Linear(2, 2),
    )


@architecture(floats(2, 4))
def windows_before_batch():
    """Windows are the slow axis: rows run (window, sample)."""

    def call(s, x):
        n = x.shape[0]
        h = x.view(n, 2, 2, 2).permute(1, 0, 2, 3).reshape(2 * n, 4)
        h = torch.tanh(s.fc(h)).view(2, n, 3).permute(1, 0, 2).reshape(n, 6)
        return s.head(h)

    return Net(call, fc=nn.Linear(4, 3), head=nn.Linear(6, 2))


@architecture(floats(3, 4))
def mlp_mixer():
    def call(s, x):
        x = x + s.tokens(s.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + s.channels(F.gelu(s.norm2(x)))
        return s.head(x.mean(1))

    return Net(
        call,
        norm1=nn.LayerNorm(4),
        tokens=nn.Linear(3, 3),
        norm2=nn.LayerNorm(4),
        channels=nn.Linear(4, 4),
        head=nn.Linear(4, 2),
    )


@architecture(ints(5, 3), "tokens")
def tiny_gpt():
    """Token and position embeddings, pre-norm block, head tied with the embedding."""

    def call(s, tokens):
        h = s.embed(tokens) + s.position(torch.arange(tokens.shape[1]))
        q = s.norm1(h)
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        h = h + s.mha(q, q, q, attn_mask=mask, need_weights=False)[0]
        h = h + s.down(F.gelu(s.up(s.norm2(h))))
        return F.linear(h, s.embed.weight)

    return Net(
        call,
        embed=nn.Embedding(5, 4),
        position=nn.Embedding(3, 4),
        norm1=nn.LayerNorm(4),
        mha=nn.MultiheadAttention(4, 2, batch_first=True),
        norm2=nn.LayerNorm(4),
        up=nn.Linear(4, 6),
        down=nn.Linear(6, 4),
    )
