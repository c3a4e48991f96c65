"""A lean sampler for the Llama-shaped teacher: static caches, CUDA graphs, lockstep batches.

Rotary pairs are interleaved, as GGUF files store the query and key rows.
"""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30
THETA, EPS, END = 1e5, 1e-5, 2


def dequantise(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """GGUF blocks [rows, bytes] -> fp32 [rows, columns] (32 values a block)."""
    if kind == "F32":
        return raw.float()
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    blocks = raw.view(torch.uint8).reshape(raw.shape[0], -1, size)
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return (blocks[..., 2:].contiguous().view(torch.int8).float() * scale).flatten(1)
    low = blocks[..., 2:4].contiguous().view(torch.float16).float()
    codes = blocks[..., 4:]
    return (torch.cat([codes & 15, codes >> 4], -1).float() * scale + low).flatten(1)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, 64], cos and sin [B, 1, T, 32]; pairs (0, 1), (2, 3), ..."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


class Teacher:
    """Weights in `dtype` on `device`; `generate` runs one left-padded batch in lockstep."""

    def __init__(self, folder: str, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        raw = {**load_file(f"{folder}/part0.safetensors"), **load_file(f"{folder}/part1.safetensors")}
        w = {}
        for key, value in raw.items():
            name, kind = key.split("|")
            w[name] = dequantise(value.to(device), kind).to(dtype)
        self.device, self.dtype = device, dtype
        self.embed, self.norm = w["token_embd.weight"], w["output_norm.weight"]
        self.layers = []
        for n in range(LAYERS):
            get = lambda s, n=n: w[f"blk.{n}.{s}.weight"]  # noqa: E731
            qkv = torch.cat([get("attn_q"), get("attn_k"), get("attn_v")])
            up = torch.cat([get("ffn_gate"), get("ffn_up")])
            self.layers.append((get("attn_norm"), qkv, get("attn_output"), get("ffn_norm"), up, get("ffn_down")))
        self.frequency = THETA ** (-torch.arange(0, 64, 2, device=device).float() / 64)
        self.caches: tuple[int, int, torch.Tensor] | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [B, T] -> cos, sin [B, 1, T, 32]."""
        angle = positions.float()[:, None, :, None] * self.frequency
        return angle.cos(), angle.sin()

    def qkv(self, x, layer, cos, sin):
        q, k, v = F.linear(rms(x, layer[0]), layer[1]).split([576, 192, 192], -1)
        shape = lambda t, h: t.unflatten(-1, (h, HEAD_DIM)).transpose(1, 2)  # noqa: E731
        return rotate(shape(q, HEADS), cos, sin), rotate(shape(k, KV_HEADS), cos, sin), shape(v, KV_HEADS)

    def finish(self, x, layer, attended):
        x = x + F.linear(attended, layer[2])
        gate, up = F.linear(rms(x, layer[3]), layer[4]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer[5])

    def prefill(self, ids: torch.Tensor, pad: torch.Tensor, rows: slice) -> torch.Tensor:
        """ids [b, P] left padded by pad [b]; fills the caches of `rows`; returns logits [b, V]."""
        cache = self.caches[2]
        length = ids.shape[1]
        at = torch.arange(length, device=self.device)
        cos, sin = self.angles((at - pad[:, None]).clamp(min=0))
        mask = (at[None, :] <= at[:, None])[None] & (at[None, None, :] >= pad[:, None, None])
        mask = (mask | torch.eye(length, dtype=torch.bool, device=self.device))[:, None]
        x = self.embed[ids]
        for n, layer in enumerate(self.layers):
            q, k, v = self.qkv(x, layer, cos, sin)
            cache[n, 0, rows, :, :length], cache[n, 1, rows, :, :length] = k, v
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = self.finish(x, layer, out.transpose(1, 2).flatten(2))
        return F.linear(rms(x[:, -1], self.norm), self.embed)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Temperature, top 40 and min-p 0.05 by the Gumbel trick; logits [B, V] -> ids [B]."""
        values, ids = (logits.float() / self.temperature).topk(40, -1)
        values = values.masked_fill(values < values[:, :1] - 3.0, float("-inf"))
        noise = -torch.log(-torch.log(torch.rand_like(values).clamp(1e-9, 1 - 1e-7)))
        return ids.gather(1, (values + noise).argmax(-1, keepdim=True))[:, 0]

    def step(self, bound: int) -> None:
        """One token for every row, reading the first `bound` cache slots; state is static."""
        cache = self.caches[2]
        x = self.embed[self.token][:, None]
        cos, sin = self.angles((self.slot - self.pad)[:, None])
        at = torch.arange(bound, device=self.device)
        seen = (at <= self.slot) & (at >= self.pad[:, None])
        bias = torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, float("-inf"))[:, None, None]
        for n, layer in enumerate(self.layers):
            q, k, v = self.qkv(x, layer, cos, sin)
            cache[n, 0].index_copy_(2, self.slot, k)
            cache[n, 1].index_copy_(2, self.slot, v)
            keys, values = cache[n, 0, :, :, :bound], cache[n, 1, :, :, :bound]
            score = torch.matmul(q.unflatten(1, (KV_HEADS, 3))[..., 0, :], keys.transpose(-1, -2))
            weight = torch.softmax(score * HEAD_DIM**-0.5 + bias, -1)
            x = self.finish(x, layer, torch.matmul(weight, values).flatten(1)[:, None])
        self.token.copy_(self.sample(F.linear(rms(x[:, 0], self.norm), self.embed)))
        self.slot.add_(1)

    def start(self, rows: int, slots: int) -> None:
        if self.caches is None or self.caches[:2] != (rows, slots):
            self.graphs.clear()
            self.caches = None
            shape = (LAYERS, 2, rows, KV_HEADS, slots, HEAD_DIM)
            self.caches = (rows, slots, torch.zeros(shape, device=self.device, dtype=self.dtype))
            self.token = torch.zeros(rows, dtype=torch.long, device=self.device)
            self.pad = torch.zeros(rows, dtype=torch.long, device=self.device)
            self.slot = torch.zeros(1, dtype=torch.long, device=self.device)
            self.temperature = torch.ones((), device=self.device)

    def advance(self, bound: int) -> None:
        if self.device == "cpu":
            return self.step(bound)
        if bound not in self.graphs:
            keep = self.token.clone(), self.slot.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(bound)
            torch.cuda.current_stream().wait_stream(stream)
            self.slot.copy_(keep[1])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step(bound)
            self.graphs[bound] = graph
            self.token.copy_(keep[0]), self.slot.copy_(keep[1])
        self.graphs[bound].replay()

    @torch.no_grad()
    def generate(self, prompts, prompt_slots: int, new: int, temperature: float, stop_share=0.02):
        """prompts: token lists (at most prompt_slots long) -> lists of new ids, END cut off."""
        rows = len(prompts)
        self.start(rows, prompt_slots + new)
        self.temperature.fill_(temperature)
        ids = torch.zeros(rows, prompt_slots, dtype=torch.long)
        for n, prompt in enumerate(prompts):
            ids[n, prompt_slots - len(prompt) :] = torch.tensor(prompt)
        pad = torch.tensor([prompt_slots - len(p) for p in prompts])
        ids, pad = ids.to(self.device), pad.to(self.device)
        self.pad.copy_(pad)
        for n in range(0, rows, 512):
            part = slice(n, min(n + 512, rows))
            self.token[part] = self.sample(self.prefill(ids[part], pad[part], part))
        self.slot.fill_(prompt_slots)
        out = torch.full((new, rows), END, dtype=torch.long, device=self.device)
        out[0] = self.token
        for n in range(1, new):
            self.advance(min(prompt_slots + new, -(-(prompt_slots + n) // 64) * 64))
            out[n] = self.token
            if n % 16 == 0:
                alive = (out[: n + 1] != END).all(0).float().mean().item()
                if alive < stop_share:
                    break
        results = []
        for row in out.T.tolist():
            results.append(row[: row.index(END)] if END in row else None)
        return results
