//! Every size of the model, in one place. Kernels and plans take their numbers from here and nowhere else.

/// Which mixer a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet: convolution, recurrent state.
    Delta,
    /// Grouped-query attention with a KV cache.
    Attention,
}

/// The sizes that differ between checkpoints of this architecture. Sizes that the kernels are built for and that all
/// supported checkpoints share are associated constants.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers; every fourth is attention.
    pub layers: usize,
    /// Rows of the embedding and of the head. The tokenizer may know fewer ids.
    pub vocab: usize,
    /// Query heads of an attention layer.
    pub query_heads: usize,
    /// Key/value heads of an attention layer; divides `query_heads`.
    pub kv_heads: usize,
    /// Key (and query) heads of a delta layer.
    pub delta_key_heads: usize,
    /// Value heads of a delta layer; a multiple of `delta_key_heads`.
    pub delta_value_heads: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts chosen per token.
    pub experts_per_token: usize,
    /// Inner width of a routed expert.
    pub expert_width: usize,
    /// Inner width of the shared expert.
    pub shared_width: usize,
    /// Longest context the model was trained for, in tokens.
    pub max_context: usize,
    /// The eps of every RMSNorm.
    pub rms_eps: f32,
    /// Base of the rotary angles.
    pub rope_theta: f64,
}

impl Shape {
    /// Width of one attention head.
    pub const HEAD_DIM: usize = 256;
    /// Leading dimensions of a head that RoPE rotates.
    pub const ROTARY_DIM: usize = 64;
    /// Width of one delta head, key and value alike.
    pub const DELTA_HEAD_DIM: usize = 128;
    /// Taps of the causal convolution.
    pub const CONV_TAPS: usize = 4;
    /// Inputs of the convolution that the state keeps: all taps but the newest.
    pub const CONV_HISTORY: usize = Self::CONV_TAPS - 1;
    /// Inputs that share a scale and a bias in a quantized row.
    pub const GROUP: usize = 64;
    /// Layer `i` is attention when `(i + 1) % ATTENTION_INTERVAL == 0`.
    pub const ATTENTION_INTERVAL: usize = 4;

    /// Qwen3.6-35B-A3B.
    pub const QWEN36: Shape = Shape {
        hidden: 2048,
        layers: 40,
        vocab: 248_320,
        query_heads: 16,
        kv_heads: 2,
        delta_key_heads: 16,
        delta_value_heads: 32,
        experts: 256,
        experts_per_token: 8,
        expert_width: 512,
        shared_width: 512,
        max_context: 262_144,
        rms_eps: 1e-6,
        rope_theta: 1e7,
    };

    /// The small trained checkpoint of the same architecture that the binary carries.
    pub const DEMO: Shape = Shape {
        hidden: 256,
        layers: 8,
        vocab: 4096,
        query_heads: 8,
        kv_heads: 1,
        delta_key_heads: 2,
        delta_value_heads: 4,
        experts: 16,
        experts_per_token: 4,
        expert_width: 64,
        shared_width: 128,
        max_context: 262_144,
        rms_eps: 1e-6,
        rope_theta: 1e7,
    };

    /// The mixer of layer `layer`.
    pub const fn layer_kind(&self, layer: usize) -> LayerKind {
        if (layer + 1).is_multiple_of(Self::ATTENTION_INTERVAL) { LayerKind::Attention } else { LayerKind::Delta }
    }

    /// Number of attention layers.
    pub const fn attention_layers(&self) -> usize {
        self.layers / Self::ATTENTION_INTERVAL
    }

    /// Number of delta layers.
    pub const fn delta_layers(&self) -> usize {
        self.layers - self.attention_layers()
    }

    /// Width of all query heads together (and of the attention gate, and of the attention output).
    pub const fn query_width(&self) -> usize {
        self.query_heads * Self::HEAD_DIM
    }

    /// Width of all key heads together (and of all value heads).
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * Self::HEAD_DIM
    }

    /// Query heads that share one key/value head.
    pub const fn queries_per_kv(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Width of all delta keys together (and of all delta queries).
    pub const fn delta_key_width(&self) -> usize {
        self.delta_key_heads * Self::DELTA_HEAD_DIM
    }

    /// Width of all delta values together (and of the output gate z).
    pub const fn delta_value_width(&self) -> usize {
        self.delta_value_heads * Self::DELTA_HEAD_DIM
    }

    /// Delta value heads that share one key head.
    pub const fn values_per_key(&self) -> usize {
        self.delta_value_heads / self.delta_key_heads
    }

    /// Channels of the convolution: q, k and v end to end.
    pub const fn conv_width(&self) -> usize {
        2 * self.delta_key_width() + self.delta_value_width()
    }

    /// Elements of one delta layer's recurrent state, `[value head, value, key]`, f32.
    pub const fn delta_state_len(&self) -> usize {
        self.delta_value_heads * Self::DELTA_HEAD_DIM * Self::DELTA_HEAD_DIM
    }

    /// Elements of one delta layer's convolution history, `[CONV_HISTORY, conv_width]`.
    pub const fn conv_state_len(&self) -> usize {
        Self::CONV_HISTORY * self.conv_width()
    }

    /// Bytes of KV cache per token of context over all attention layers, for elements of `element_bytes`.
    pub const fn kv_bytes_per_token(&self, element_bytes: usize) -> usize {
        2 * self.attention_layers() * self.kv_width() * element_bytes
    }

    /// Bytes of recurrent state of one session, whatever its context: delta state and convolution history in f32.
    pub const fn recurrent_bytes(&self) -> usize {
        self.delta_layers() * (self.delta_state_len() + self.conv_state_len()) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qwen36_sizes_are_those_of_the_published_tensors() {
        let s = Shape::QWEN36;
        assert_eq!((s.attention_layers(), s.delta_layers()), (10, 30));
        assert_eq!((s.query_width(), s.kv_width(), s.conv_width(), s.delta_value_width()), (4096, 512, 8192, 4096));
        assert_eq!(s.kv_bytes_per_token(2), 20 * 1024);
        // 2 MiB of delta state and 96 KiB of f32 convolution history in each of 30 layers.
        assert_eq!(s.recurrent_bytes(), 30 * (2 * 1024 * 1024 + 96 * 1024));
    }
}
