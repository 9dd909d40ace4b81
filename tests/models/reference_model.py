"""A second opinion: every architecture in float64, one token at a time, straight from the formulas.

Shares no code with the product. Slow and plain on purpose. `metadata` holds the file's keys without the
architecture's prefix; `tensors` the file's values by name, axes reversed (a projection is (n_out, n_in)).
"""

import math

import numpy as np


class ReferenceModel:
    def __init__(self, architecture, metadata, tensors):
        self.architecture, self.m, self.t = architecture, metadata, tensors
        self.eps = metadata["attention.layer_norm_rms_epsilon"]
        self.n_layers = metadata["block_count"] - metadata.get("nextn_predict_layers", 0)
        self.n_embd = metadata["embedding_length"]

    def logits(self, ids):
        """(n, n_vocab): after each of `ids`."""
        self.keys = [[] for _ in range(self.n_layers)]
        self.values = [[] for _ in range(self.n_layers)]
        self.conv, self.state = {}, {}
        return np.array([self.token(i, position) for position, i in enumerate(ids)])

    def token(self, token, position):
        x = self.t["token_embd.weight"][token].copy()
        if self.architecture == "gemma3":
            x *= math.sqrt(self.n_embd)
        for layer in range(self.n_layers):
            x = self.layer(x, layer, position)
        x = self.rms(x, self.t["output_norm.weight"])
        head = self.t.get("output.weight", self.t["token_embd.weight"])
        out = np.einsum("oi,i->o", head, x) + self.t.get("output.bias", 0.0)
        cap = self.m.get("final_logit_softcapping")
        return cap * np.tanh(out / cap) if cap else out

    def layer(self, x, layer, position):
        hybrid = self.architecture.startswith("qwen35")
        h = self.rms(x, self.w(layer, "attn_norm.weight"))
        mixed = (
            self.delta(h, layer)
            if hybrid and self.is_recurrent(layer)
            else self.attention(h, layer, position)
        )
        if self.architecture == "gemma3":
            mixed = self.rms(mixed, self.w(layer, "post_attention_norm.weight"))
        x = x + mixed
        h = self.rms(x, self.w(layer, "post_attention_norm.weight" if hybrid else "ffn_norm.weight"))
        if f"blk.{layer}.ffn_gate_inp.weight" in self.t:
            y = self.experts(h, layer)
        else:
            y = self.swiglu(h, *(self.w(layer, f"ffn_{p}.weight") for p in ("gate", "up", "down")))
        if self.architecture == "gemma3":
            y = self.rms(y, self.w(layer, "post_ffw_norm.weight"))
        return x + y

    def attention(self, h, layer, position):
        n_heads = self.m["attention.head_count"]
        n_kv = self.per_layer("attention.head_count_kv", layer)
        dk = self.m.get("attention.key_length", self.n_embd // n_heads)
        dv = self.m.get("attention.value_length", self.n_embd // n_heads)
        q, k, v = self.qkv(h, layer, n_heads, n_kv, dk, dv)
        gate = None
        if self.architecture.startswith("qwen35"):
            both = q.reshape(n_heads, 2, dk)
            q, gate = both[:, 0], both[:, 1]
        q, k, v = q.reshape(n_heads, dk), k.reshape(n_kv, dk), v.reshape(n_kv, dv)
        if f"blk.{layer}.attn_q_norm.weight" in self.t:
            q, k = (
                self.rms(q, self.w(layer, "attn_q_norm.weight")),
                self.rms(k, self.w(layer, "attn_k_norm.weight")),
            )
        window = self.window(layer)
        q, k = self.rotate(q, position, window), self.rotate(k, position, window)
        self.keys[layer].append(k)
        self.values[layer].append(v)
        first = 0 if window is None else max(0, position - window + 1)
        scale = self.m.get("attention.scale", 1 / math.sqrt(dk))
        out = np.zeros((n_heads, dv))
        for head in range(n_heads):
            kv = head // (n_heads // n_kv)
            scores = np.array([scale * q[head].dot(key[kv]) for key in self.keys[layer][first:]])
            p = np.exp(scores - scores.max())
            p /= p.sum()
            out[head] = sum(a * value[kv] for a, value in zip(p, self.values[layer][first:], strict=True))
        if gate is not None:
            out *= 1 / (1 + np.exp(-gate))
        return self.w(layer, "attn_output.weight") @ out.reshape(-1) + self.b(layer, "attn_output.bias")

    def qkv(self, h, layer, n_heads, n_kv, dk, dv):
        if f"blk.{layer}.attn_qkv.weight" in self.t:
            fused = self.w(layer, "attn_qkv.weight") @ h + self.b(layer, "attn_qkv.bias")
            parts = np.split(fused, [n_heads * dk, n_heads * dk + n_kv * dk])
        else:
            parts = [self.w(layer, f"attn_{p}.weight") @ h for p in "qkv"]
        return [part + self.b(layer, f"attn_{p}.bias") for part, p in zip(parts, "qkv", strict=True)]

    def window(self, layer):
        n = self.m.get("attention.sliding_window")
        if self.architecture != "gemma3" or not n:
            return None
        period = self.m.get("attention.sliding_window_pattern", 6)
        return n if layer % period < period - 1 else None

    def rotate(self, heads, position, window):
        n_rot = self.m.get("rope.dimension_count", heads.shape[-1])
        base, factor = self.m.get("rope.freq_base", 10000.0), 1.0
        if self.m.get("rope.scaling.type") == "linear":
            factor = self.m["rope.scaling.factor"]
        if window is not None:
            base, factor = self.m.get("rope.freq_base_swa", 10000.0), 1.0
        divide = self.t.get("rope_freqs.weight", np.ones(n_rot // 2))
        out = heads.copy()
        for i in range(n_rot // 2):
            theta = position / factor * base ** (-2 * i / n_rot) / divide[i]
            a, b = (2 * i, 2 * i + 1) if self.architecture == "llama" else (i, i + n_rot // 2)
            out[:, a] = heads[:, a] * math.cos(theta) - heads[:, b] * math.sin(theta)
            out[:, b] = heads[:, a] * math.sin(theta) + heads[:, b] * math.cos(theta)
        return out

    def experts(self, h, layer):
        logits = self.w(layer, "ffn_gate_inp.weight") @ h
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = sorted(range(len(p)), key=lambda e: -p[e])[: self.m["expert_used_count"]]
        total = max(sum(p[e] for e in chosen), 6.1e-5)
        scale = self.m.get("expert_weights_scale") or 1.0
        y = np.zeros_like(h)
        for e in chosen:
            if f"blk.{layer}.ffn_gate_up_exps.weight" in self.t:
                gate, up = np.split(self.w(layer, "ffn_gate_up_exps.weight")[e], 2)
            else:
                gate, up = (self.w(layer, f"ffn_{p}_exps.weight")[e] for p in ("gate", "up"))
            y += scale * p[e] / total * self.swiglu(h, gate, up, self.w(layer, "ffn_down_exps.weight")[e])
        if f"blk.{layer}.ffn_gate_shexp.weight" in self.t:
            share = 1 / (1 + np.exp(-self.w(layer, "ffn_gate_inp_shexp.weight").reshape(-1) @ h))
            y += share * self.swiglu(
                h, *(self.w(layer, f"ffn_{p}_shexp.weight") for p in ("gate", "up", "down"))
            )
        return y

    def swiglu(self, h, gate, up, down):
        g = gate @ h
        if self.architecture == "gemma3":
            act = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        else:
            act = g / (1 + np.exp(-g))
        return down @ (act * (up @ h))

    def is_recurrent(self, layer):
        if "attention.recurrent_layers" in self.m:
            return bool(self.m["attention.recurrent_layers"][layer])
        return (layer + 1) % self.m["full_attention_interval"] != 0

    def delta(self, h, layer):
        n_k, n_v = self.m["ssm.group_count"], self.m["ssm.time_step_rank"]
        dk, dv = self.m["ssm.state_size"], self.m["ssm.inner_size"] // n_v
        u = self.w(layer, "attn_qkv.weight") @ h
        taps = self.w(layer, "ssm_conv1d.weight")  # (channels, width)
        past = self.conv.setdefault(layer, [np.zeros_like(u)] * (taps.shape[1] - 1))
        seen = [*past, u]
        self.conv[layer] = seen[1:]
        c = sum(taps[:, i] * x for i, x in enumerate(seen))
        c = c / (1 + np.exp(-c))
        q, k, v = np.split(c, [n_k * dk, 2 * n_k * dk])
        alpha, beta = self.w(layer, "ssm_alpha.weight") @ h, self.w(layer, "ssm_beta.weight") @ h
        z = (self.w(layer, "attn_gate.weight") @ h).reshape(n_v, dv)
        y = np.zeros((n_v, dv))
        states = self.state.setdefault(layer, np.zeros((n_v, dk, dv)))
        for head in range(n_v):
            kh = head % n_k
            q_, k_ = q[kh * dk : (kh + 1) * dk], k[kh * dk : (kh + 1) * dk]
            q_, k_ = (x / math.sqrt(x @ x + self.eps) for x in (q_, k_))
            v_ = v[head * dv : (head + 1) * dv]
            decay = math.exp(
                self.t[f"blk.{layer}.ssm_a"][head]
                * math.log1p(math.exp(alpha[head] + self.b(layer, "ssm_dt.bias")[head]))
            )
            state = decay * states[head]
            step = (v_ - state.T @ k_) / (1 + math.exp(-beta[head]))
            states[head] = state + np.outer(k_, step)
            y[head] = states[head].T @ q_ / math.sqrt(dk)
        y = self.rms(y, self.w(layer, "ssm_norm.weight")) * z / (1 + np.exp(-z))
        return self.w(layer, "ssm_out.weight") @ y.reshape(-1)

    def rms(self, x, weight):
        return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)

    def per_layer(self, key, layer):
        value = self.m.get(key, self.m["attention.head_count"])
        return value[layer] if isinstance(value, list) else value

    def w(self, layer, name):
        return self.t[f"blk.{layer}.{name}"]

    def b(self, layer, name):
        return self.t.get(f"blk.{layer}.{name}", 0.0)
