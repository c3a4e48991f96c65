"""The DeepSeek-V4 architecture as a plain differentiable function over a dictionary of weights.

Weights carry the released checkpoint names (routed experts stacked as `ffn.experts.w1` [E, I, D]).
Training wants every position at once, so attention here is dense over blocks: each block of 128
queries sees its own and the previous block of latents plus all compressed entries, masked.
Formulas: the DeepSeek-V4 technical report and transformers' `deepseek_v4` classes.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from quantise import fake_activation, fake_latent
from sinkhorn import sinkhorn
from torch import Tensor

NEGATIVE = -1e30


@dataclass(frozen=True)
class Config:
    vocab: int
    hidden: int
    ratios: tuple[int, ...]
    heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    groups: int
    o_lora: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    topk: int
    expert_width: int
    hash_layers: int
    route_scale: float
    limit: float
    streams: int
    sinkhorn_rounds: int
    hc_eps: float
    eps: float
    theta: float
    compress_theta: float
    yarn: tuple[float, float, float, float]

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Reads the vendor's config.json."""
        c = json.loads(Path(path).read_text())
        yarn = c["rope_scaling"]
        return cls(
            c["vocab_size"],
            c["hidden_size"],
            tuple(c["compress_ratios"]),
            c["num_attention_heads"],
            c["head_dim"],
            c["qk_rope_head_dim"],
            c["q_lora_rank"],
            c["o_groups"],
            c["o_lora_rank"],
            c["sliding_window"],
            c["index_n_heads"],
            c["index_head_dim"],
            c["index_topk"],
            c["n_routed_experts"],
            c["num_experts_per_tok"],
            c["moe_intermediate_size"],
            c["num_hash_layers"],
            c["routed_scaling_factor"],
            c["swiglu_limit"],
            c["hc_mult"],
            c["hc_sinkhorn_iters"],
            c["hc_eps"],
            c["rms_norm_eps"],
            c["rope_theta"],
            c["compress_rope_theta"],
            (yarn["factor"], yarn["original_max_position_embeddings"], yarn["beta_fast"], yarn["beta_slow"]),
        )


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every trained tensor's name and shape (no tid2eid, no gate.bias: those are buffers)."""
    d, flat = c.hidden, c.streams * c.hidden
    mix = (2 + c.streams) * c.streams
    out = {"embed.weight": (c.vocab, d), "head.weight": (c.vocab, d), "norm.weight": (d,)}
    out |= {"hc_head_fn": (c.streams, flat), "hc_head_base": (c.streams,), "hc_head_scale": (1,)}
    for n, ratio in enumerate(c.ratios):
        layer: dict[str, tuple[int, ...]] = {}
        for part in ("attn", "ffn"):
            layer |= {f"hc_{part}_fn": (mix, flat), f"hc_{part}_base": (mix,)}
            layer |= {f"hc_{part}_scale": (3,), f"{part}_norm.weight": (d,)}
        layer |= {
            "attn.wq_a.weight": (c.q_lora, d),
            "attn.q_norm.weight": (c.q_lora,),
            "attn.wq_b.weight": (c.heads * c.head_dim, c.q_lora),
            "attn.wkv.weight": (c.head_dim, d),
            "attn.kv_norm.weight": (c.head_dim,),
            "attn.wo_a.weight": (c.groups * c.o_lora, c.heads * c.head_dim // c.groups),
            "attn.wo_b.weight": (d, c.groups * c.o_lora),
            "attn.attn_sink": (c.heads,),
            "ffn.gate.weight": (c.experts, d),
            "ffn.experts.w1": (c.experts, c.expert_width, d),
            "ffn.experts.w2": (c.experts, d, c.expert_width),
            "ffn.experts.w3": (c.experts, c.expert_width, d),
            "ffn.shared_experts.w1.weight": (c.expert_width, d),
            "ffn.shared_experts.w2.weight": (d, c.expert_width),
            "ffn.shared_experts.w3.weight": (c.expert_width, d),
        }
        if ratio:
            layer |= compressor_shapes("attn.compressor", ratio, c.head_dim, d)
        if ratio == 4:
            layer |= compressor_shapes("attn.indexer.compressor", ratio, c.index_dim, d)
            layer["attn.indexer.wq_b.weight"] = (c.index_heads * c.index_dim, c.q_lora)
            layer["attn.indexer.weights_proj.weight"] = (c.index_heads, d)
        out |= {f"layers.{n}.{k}": v for k, v in layer.items()}
    return out


def compressor_shapes(prefix: str, ratio: int, dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    width = 2 * dim if ratio == 4 else dim
    return {
        f"{prefix}.wkv.weight": (width, hidden),
        f"{prefix}.wgate.weight": (width, hidden),
        f"{prefix}.ape": (ratio, width),
        f"{prefix}.norm.weight": (dim,),
    }


def frequencies(c: Config, compressed: bool) -> Tensor:
    """Rotary frequencies [rope_dim / 2]; YaRN on layers with a compressor only."""
    half, dim = c.rope_dim // 2, c.rope_dim
    theta = c.compress_theta if compressed else c.theta
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if compressed:
        factor, original, fast, slow = c.yarn
        turn = lambda r: dim * math.log(original / (r * 2 * math.pi)) / (2 * math.log(theta))  # noqa: E731
        low, high = max(math.floor(turn(fast)), 0), min(math.ceil(turn(slow)), dim - 1)
        ramp = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freq = freq / factor * ramp + freq * (1 - ramp)
    return freq.float()


def tables(c: Config, length: int, device: str) -> dict[str, Tensor]:
    """cos and sin [length, rope_dim / 2] of both kinds of layer."""
    at = torch.arange(length).float()[:, None]
    out = {}
    for name, compressed in (("main", False), ("compress", True)):
        angle = at * frequencies(c, compressed)
        out[f"{name}.cos"], out[f"{name}.sin"] = angle.cos().to(device), angle.sin().to(device)
    return out


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the last channels of x in interleaved pairs; cos and sin broadcast over x[..., pair]."""
    dim = 2 * cos.shape[-1]
    a, b = x[..., -dim:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-dim], turned.to(x.dtype)), -1)


def mix_in(c: Config, w: dict[str, Tensor], part: str, x_btsd: Tensor):
    """Hyper-connection before a sublayer: its input [B, T, D], post [B, T, S], comb [B, T, S, S]."""
    s = c.streams
    flat = x_btsd.flatten(2).float()
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.eps)
    m = (flat @ w[f"hc_{part}_fn"].float().T) * scale
    base, gain = w[f"hc_{part}_base"].float(), w[f"hc_{part}_scale"].float()
    pre = torch.sigmoid(m[..., :s] * gain[0] + base[:s]) + c.hc_eps
    post = 2 * torch.sigmoid(m[..., s : 2 * s] * gain[1] + base[s : 2 * s])
    comb = sinkhorn(m[..., 2 * s :] * gain[2] + base[2 * s :], c.sinkhorn_rounds, c.hc_eps)
    u = (pre[..., None] * x_btsd.float()).sum(2).to(x_btsd.dtype)
    return rms(u, w[f"{part}_norm.weight"], c.eps), post, comb.unflatten(-1, (s, s))


def mix_out(x_btsd: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i comb[i, j] X_i."""
    x = x_btsd.float()
    mixed = sum(comb[..., i, :, None] * x[..., i, None, :] for i in range(x.shape[-2]))
    return (post[..., None] * y.float()[..., None, :] + mixed).to(x_btsd.dtype)


def compress(c: Config, w: dict[str, Tensor], prefix: str, x: Tensor, ratio: int, rope) -> Tensor:
    """Compressed entries [B, T // ratio, dim], normalised and rotated at their first position."""
    value, score = F.linear(x, w[f"{prefix}.wkv.weight"]), F.linear(x, w[f"{prefix}.wgate.weight"])
    usable = x.shape[1] // ratio * ratio
    value = value[:, :usable].unflatten(1, (-1, ratio)).float()
    score = score[:, :usable].unflatten(1, (-1, ratio)).float() + w[f"{prefix}.ape"].float()
    if ratio == 4:
        half = value.shape[-1] // 2
        before = lambda t, fill: F.pad(t[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=fill)  # noqa: E731
        value = torch.cat((before(value, 0.0), value[..., half:]), 2)
        score = torch.cat((before(score, NEGATIVE), score[..., half:]), 2)
    entry = (value * score.softmax(2)).sum(2).to(x.dtype)
    entry = rms(entry, w[f"{prefix}.norm.weight"], c.eps)
    cos, sin = (t[:usable:ratio] for t in rope)
    return rotate(entry, cos, sin)


def index_scores(c: Config, w: dict[str, Tensor], x: Tensor, qr: Tensor, rope, simulate: bool) -> Tensor:
    """Indexer scores fp32 [B, T, T // 4]."""
    batch, length, _ = x.shape
    key = compress(c, w, "attn.indexer.compressor", x, 4, rope)
    q = F.linear(fake_activation(qr) if simulate else qr, w["attn.indexer.wq_b.weight"])
    q = rotate(q.unflatten(-1, (c.index_heads, c.index_dim)), *(t[:, None] for t in rope))
    dots = torch.bmm(q.reshape(batch, -1, c.index_dim), key.transpose(1, 2))
    dots = dots.view(batch, length, c.index_heads, -1)
    weight = F.linear(x, w["attn.indexer.weights_proj.weight"]).float()
    weight = weight * (c.index_dim * c.index_heads) ** -0.5
    return (F.relu(dots.float()) * weight[..., None]).sum(2)


def select(c: Config, score: Tensor, visible: Tensor, sparse: Tensor) -> Tensor:
    """Mask [B, T, W] of the entries that attention reads; all visible ones unless `sparse` is 1."""
    score = score.detach().masked_fill(~visible, NEGATIVE)
    if score.shape[-1] <= c.index_topk:
        return visible.expand_as(score)
    least = score.topk(c.index_topk, -1).values[..., -1:]
    return visible & ((score >= least) | (sparse < 0.5))


def index_loss(score: Tensor, visible: Tensor, share: Tensor) -> Tensor:
    """KL from the attention's share over visible entries [B, T, W] to softmax of the scores."""
    share = share / (share.sum(-1, keepdim=True) + 1e-9)
    log_q = score.masked_fill(~visible, NEGATIVE).log_softmax(-1)
    kl = (share * ((share + 1e-9).log() - log_q)).masked_fill(~visible, 0.0).sum(-1)
    return kl.sum() / (score.shape[0] * visible.any(-1).sum()).clamp(min=1)


def attention(c: Config, w: dict[str, Tensor], x: Tensor, ratio: int, rope, sparse: Tensor, simulate: bool):
    """x [B, T, D], T a multiple of the window -> (y [B, T, D], indexer loss or 0)."""
    batch, length, _ = x.shape
    heads, dim, win = c.heads, c.head_dim, c.window
    act = fake_activation if simulate else lambda t: t
    latent = fake_latent if simulate else lambda t: t
    xq = act(x)
    wide = tuple(t[:, None] for t in rope)
    qr = rms(F.linear(xq, w["attn.wq_a.weight"]), w["attn.q_norm.weight"], c.eps)
    q = F.linear(act(qr), w["attn.wq_b.weight"]).unflatten(-1, (heads, dim))
    q = rotate(rms(q, None, c.eps), *wide)
    kv = rms(F.linear(xq, w["attn.wkv.weight"]), w["attn.kv_norm.weight"], c.eps)
    kv = latent(rotate(kv, *rope))
    block = kv.unflatten(1, (-1, win))
    near = torch.cat((F.pad(block[:, :-1], (0, 0, 0, 0, 1, 0)), block), 2).flatten(0, 1)
    q_block = q.reshape(-1, win * heads, dim)
    s_near = torch.bmm(q_block, near.transpose(1, 2)).view(batch, -1, win, heads, 2 * win)
    row, col = torch.arange(win, device=x.device)[:, None], torch.arange(2 * win, device=x.device)
    first = (torch.arange(length // win, device=x.device) == 0)[:, None, None]
    seen = (col > row) & (col <= row + win) & ~(first & (col < win))
    s_near = (s_near.float() * dim**-0.5).masked_fill(~seen[:, :, None], NEGATIVE)
    s_near = s_near.flatten(1, 2)
    sink = w["attn.attn_sink"].float()[:, None]
    top = torch.maximum(s_near.amax(-1, keepdim=True), sink)
    extra = x.new_zeros((), dtype=torch.float32)
    if ratio == 0:
        top = top.detach()
        e_near = (s_near - top).exp()
        total = e_near.sum(-1, keepdim=True) + (sink - top).exp()
    else:
        far = latent(compress(c, w, "attn.compressor", x, ratio, rope))
        s_far = torch.bmm(q.reshape(batch, -1, dim), far.transpose(1, 2)).view(batch, length, heads, -1)
        visible = torch.arange(far.shape[1], device=x.device) < (
            (torch.arange(length, device=x.device)[:, None] + 1) // ratio
        )
        s_far = (s_far.float() * dim**-0.5).masked_fill(~visible[:, None], NEGATIVE)
        top = torch.maximum(top, s_far.amax(-1, keepdim=True)).detach()
        e_near, e_far = (s_near - top).exp(), (s_far - top).exp()
        near_total = e_near.sum(-1, keepdim=True) + (sink - top).exp()
        if ratio == 4:
            with torch.no_grad():
                whole = near_total + e_far.sum(-1, keepdim=True)
                share = (e_far / whole).sum(2)
            score = index_scores(c, w, x.detach(), qr.detach(), rope, simulate)
            extra = index_loss(score, visible, share)
            e_far = e_far * select(c, score, visible, sparse)[:, :, None]
        total = near_total + e_far.sum(-1, keepdim=True)
    p_near = (e_near / total).to(x.dtype)
    out = torch.bmm(p_near.reshape(-1, win * heads, 2 * win), near).view(batch, length, heads, dim)
    if ratio:
        p_far = (e_far / total).to(x.dtype)
        out = out + torch.bmm(p_far.reshape(batch, length * heads, -1), far).view_as(out)
    out = rotate(out, wide[0], -wide[1])
    grouped = out.reshape(batch * length, c.groups, -1).transpose(0, 1)
    low = torch.bmm(grouped, w["attn.wo_a.weight"].unflatten(0, (c.groups, -1)).transpose(1, 2))
    low = low.transpose(0, 1).reshape(batch, length, -1)
    return F.linear(act(low), w["attn.wo_b.weight"]), extra


def experts(c: Config, w: dict[str, Tensor], x: Tensor, fixed: Tensor | None, bias: Tensor | None, simulate: bool):
    """Routed and shared experts; `fixed` [B, T, k] are hash-routed ids. Returns y, load [E].

    All experts are computed for all tokens and weighted with zero where not chosen: with experts
    this small one wide product is faster than grouping.
    """
    act = fake_activation if simulate else lambda t: t
    score = F.softplus(F.linear(x.float(), w["ffn.gate.weight"].float())).sqrt()
    chosen = fixed if fixed is not None else (score.detach() + bias).topk(c.topk, -1).indices
    mask = torch.zeros_like(score).scatter(-1, chosen, 1.0)
    weight = score * mask
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * c.route_scale
    xq = act(x)
    gate = F.linear(xq, w["ffn.experts.w1"].flatten(0, 1)).float().clamp(max=c.limit)
    up = F.linear(xq, w["ffn.experts.w3"].flatten(0, 1)).float().clamp(-c.limit, c.limit)
    inner = (F.silu(gate) * up).unflatten(-1, (c.experts, -1))
    if simulate:  # each expert's activation is quantised by itself; its weight comes with it
        inner = fake_activation((inner * weight[..., None]).flatten(-2).to(x.dtype))
    else:
        inner = (inner * weight[..., None]).flatten(-2).to(x.dtype)
    y = F.linear(inner, w["ffn.experts.w2"].transpose(0, 1).flatten(1))
    gate = F.linear(xq, w["ffn.shared_experts.w1.weight"]).float().clamp(max=c.limit)
    up = F.linear(xq, w["ffn.shared_experts.w3.weight"]).float().clamp(-c.limit, c.limit)
    y = y + F.linear(act((F.silu(gate) * up).to(x.dtype)), w["ffn.shared_experts.w2.weight"])
    return y, mask.flatten(0, -2).sum(0)


def layer(c: Config, w: dict[str, Tensor], x: Tensor, ratio: int, rope, fixed, bias, sparse, simulate: bool):
    """One decoder layer over streams x [B, T, S, D] -> (streams, indexer loss, expert load)."""
    u, post, comb = mix_in(c, w, "attn", x)
    y, extra = attention(c, w, u, ratio, rope, sparse, simulate)
    x = mix_out(x, y, post, comb)
    u, post, comb = mix_in(c, w, "ffn", x)
    y, load = experts(c, w, u, fixed, bias, simulate)
    return mix_out(x, y, post, comb), extra, load


def finish(c: Config, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Streams -> logits in the model's dtype."""
    flat = x.flatten(2).float()
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.eps)
    pre = (flat @ w["hc_head_fn"].float().T) * scale * w["hc_head_scale"].float()
    pre = torch.sigmoid(pre + w["hc_head_base"].float()) + c.hc_eps
    h = (pre[..., None] * x.float()).sum(2).to(x.dtype)
    return F.linear(rms(h, w["norm.weight"], c.eps), w["head.weight"])


def loss_sum(c: Config, w: dict[str, Tensor], x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum of the cross entropies in nats; target and weight [B, T]."""
    logits = finish(c, w, x).flatten(0, 1).float()
    each = F.cross_entropy(logits, target.flatten(), reduction="none")
    return (each * weight.flatten()).sum()


class Pebble:
    """Binds the functions above, compiled or not, to a config, tables and routing buffers."""

    def __init__(self, c: Config, buffers: dict[str, Tensor], length: int, device: str, compiled: bool):
        self.c, self.buffers = c, buffers
        self.tables = tables(c, length, device)
        build = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.layer, self.loss_sum = build(layer), build(loss_sum)
        self.names = [[k for k in shapes(c) if k.startswith(f"layers.{n}.")] for n in range(len(c.ratios))]
        self.tail = [k for k in shapes(c) if not k.startswith("layers.")]

    def streams(self, w: dict[str, Tensor], ids: Tensor, sparse: Tensor, simulate: bool = False):
        """ids [B, T] -> (streams [B, T, S, D], summed indexer loss, loads [layers, E])."""
        c = self.c
        x = F.embedding(ids, w["embed.weight"])
        x = x[:, :, None].expand(-1, -1, c.streams, -1).contiguous()
        extra, loads = x.new_zeros((), dtype=torch.float32), []
        for n, ratio in enumerate(c.ratios):
            kind = "compress" if ratio else "main"
            rope = tuple(self.tables[f"{kind}.{t}"][: ids.shape[1]] for t in ("cos", "sin"))
            part = {k.split(".", 2)[2]: w[k] for k in self.names[n]}
            fixed = self.buffers[f"layers.{n}.ffn.gate.tid2eid"][ids] if n < c.hash_layers else None
            bias = None if n < c.hash_layers else self.buffers[f"layers.{n}.ffn.gate.bias"]
            x, loss, load = self.layer(c, part, x, ratio, rope, fixed, bias, sparse, simulate)
            extra = extra + loss
            loads.append(load)
        return x, extra, torch.stack(loads)

    def losses(self, w, ids, target, weight, sparse, simulate=False):
        x, extra, loads = self.streams(w, ids, sparse, simulate)
        return self.loss_sum(self.c, {k: w[k] for k in self.tail}, x, target, weight), extra, loads

    def logits(self, w, ids, sparse, simulate=False):
        x, _, _ = self.streams(w, ids, sparse, simulate)
        return finish(self.c, w, x)
