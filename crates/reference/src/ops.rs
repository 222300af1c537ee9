//! One function per operation, each with its formula. NUMERICS.md says the same in words and binds every backend.
//!
//! Values are f32; sums, exponentials and angles are carried in f64 and rounded once, so that what is left between this
//! crate and a backend is the backend's error. Functions take one token (or one head of it) unless they say otherwise.

use lily_backend::{Error, LogProbs, SampledToken, SamplingParams};
use lily_model::{QuantMatrix, Shape};

/// Added to the sum of squares where delta queries and keys are brought to unit length.
pub const UNIT_EPS: f64 = 1e-6;

/// The formulas that a forward pass is made of. [`Ops::SPEC`] is the model; tests replace single fields by wrong
/// formulas, to show that the goldens would notice.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::type_complexity, reason = "a signature with named arguments says more than an alias for it")]
pub struct Ops {
    /// [`rms_norm`] of the layer, query, key and final norms.
    pub rms_norm: fn(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32>,
    /// [`rope`].
    pub rope: fn(head: &mut [f32], position: usize, theta: f64),
    /// [`shared_head`] for query heads and the key/value heads they read.
    pub kv_head: fn(head: usize, heads: usize, shared: usize) -> usize,
    /// [`attention_gate`].
    pub attention_gate: fn(x: &[f32], gate: &[f32]) -> Vec<f32>,
    /// [`conv_step`].
    pub conv_step: fn(history: &mut [f32], input: &[f32], taps: &[f32]) -> Vec<f32>,
    /// [`delta_query`].
    pub delta_query: fn(q: &[f32]) -> Vec<f32>,
    /// [`delta_key`].
    pub delta_key: fn(k: &[f32]) -> Vec<f32>,
    /// [`shared_head`] for delta value heads and the key heads they use.
    pub key_head: fn(head: usize, heads: usize, shared: usize) -> usize,
    /// [`delta_step`].
    pub delta_step: fn(state: &mut [f32], input: DeltaInput<'_>) -> Vec<f32>,
    /// [`gated_norm`].
    pub gated_norm: fn(o: &[f32], z: &[f32], weight: &[f32], eps: f32) -> Vec<f32>,
    /// [`route`].
    pub route: fn(logits: &[f32], count: usize) -> Vec<(usize, f32)>,
    /// [`sigmoid`] of the shared expert's gate.
    pub shared_gate: fn(gate: f32) -> f32,
}

impl Ops {
    /// The formulas of the model.
    pub const SPEC: Ops = Ops {
        rms_norm,
        rope,
        kv_head: shared_head,
        attention_gate,
        conv_step,
        delta_query,
        delta_key,
        key_head: shared_head,
        delta_step,
        gated_norm,
        route,
        shared_gate: sigmoid,
    };
}

/// `sum_i a_i b_i`. Products of two f32 are exact in f64.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // Eight sums side by side, because one would wait for itself at every step.
    let mut sums = [0f64; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    (sums.iter().sum::<f64>() + rest) as f32
}

/// `y = x W^T` for `x` `[tokens, inputs]`, to `[tokens, outputs]`, where `W[o, i] = scale * code + bias` of the group
/// that column `i` is in.
pub fn linear(x: &[f32], matrix: &QuantMatrix) -> Vec<f32> {
    expert_linear(x, matrix, &vec![0; x.len() / matrix.inputs])
}

/// [`linear`] with a stack of matrices, `experts` saying for each row of `x` which one it meets.
pub fn expert_linear(x: &[f32], matrix: &QuantMatrix, experts: &[usize]) -> Vec<f32> {
    let (inputs, outputs) = (matrix.inputs, matrix.outputs);
    assert_eq!(x.len(), experts.len() * inputs, "{}: one expert per input of width {inputs}", matrix.name);
    let mut y = vec![0.0; experts.len() * outputs];
    let mut row = vec![0.0; inputs];
    for expert in 0..matrix.experts {
        let visitors: Vec<usize> = (0..experts.len()).filter(|i| experts[*i] == expert).collect();
        if visitors.is_empty() {
            continue;
        }
        for output in 0..outputs {
            matrix.dequantize_row(expert * outputs + output, &mut row);
            for i in &visitors {
                y[i * outputs + output] = dot(&x[i * inputs..][..inputs], &row);
            }
        }
    }
    y
}

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `ln(1 + exp(x))`, without a cut-off, in the form that does not overflow: `max(x, 0) + ln(1 + exp(-|x|))`.
pub fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}

/// `exp(x_i - max) / sum_j exp(x_j - max)`.
pub fn softmax(x: &[f32]) -> Vec<f32> {
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let exp: Vec<f64> = x.iter().map(|x| (f64::from(*x) - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|e| (e / sum) as f32).collect()
}

/// `x_i / sqrt(mean(x^2) + eps) * w_i`. The stored weight is the multiplier: nothing is added to it.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let scale = 1.0 / (mean_square(x) + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale * f64::from(*w)) as f32).collect()
}

fn mean_square(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / x.len() as f64
}

/// Rotates the first 64 dimensions of a head in half-split pairs, in place: for `i` in 0..32 and the angle
/// `position * theta^(-i/32)`, `(x_i, x_{i+32}) -> (x_i cos - x_{i+32} sin, x_{i+32} cos + x_i sin)`. Positions are
/// absolute, from 0. Angles are made in f64: in f32 they would be off by 1e-2 rad near position 262,144.
pub fn rope(head: &mut [f32], position: usize, theta: f64) {
    let half = Shape::ROTARY_DIM / 2;
    for i in 0..half {
        let angle = position as f64 * theta.powf(-(i as f64) / half as f64);
        let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = b * cos + a * sin;
    }
}

/// Which of `shared` heads is used by head `head` of `heads`: adjacent heads share one, `head / (heads / shared)`.
pub fn shared_head(head: usize, heads: usize, shared: usize) -> usize {
    head / (heads / shared)
}

/// One query head over all positions that it may see: `sum_p softmax_p(q . k_p / sqrt(256)) v_p`. Causality is that
/// `keys` and `values` end at the token's own position.
pub fn attention(query: &[f32], keys: &[&[f32]], values: &[&[f32]]) -> Vec<f32> {
    let scale = (query.len() as f32).sqrt().recip();
    let scores: Vec<f32> = keys.iter().map(|key| dot(query, key) * scale).collect();
    let mut out = vec![0f64; query.len()];
    for (weight, value) in softmax(&scores).iter().zip(values) {
        for (out, v) in out.iter_mut().zip(*value) {
            *out += f64::from(*weight) * f64::from(*v);
        }
    }
    out.iter().map(|x| *x as f32).collect()
}

/// `x_i * sigmoid(gate_i)`: the output gate of an attention layer.
pub fn attention_gate(x: &[f32], gate: &[f32]) -> Vec<f32> {
    x.iter().zip(gate).map(|(x, g)| x * sigmoid(*g)).collect()
}

/// One token through the causal depthwise convolution and its SiLU:
/// `y[c] = silu( sum_{j=0..3} w[c, j] * u[t - 3 + j, c] )`, tap 3 on the newest input. `history` holds the raw inputs
/// `u[t-3 .. t]` as `[3, channels]`, zeros before the start, and moves on by one; `taps` is `[channels, 4]`.
pub fn conv_step(history: &mut [f32], input: &[f32], taps: &[f32]) -> Vec<f32> {
    let channels = input.len();
    let y = (0..channels).map(|c| {
        let window = [history[c], history[channels + c], history[2 * channels + c], input[c]];
        silu(dot(&window, &taps[c * Shape::CONV_TAPS..][..Shape::CONV_TAPS]))
    });
    let y = y.collect();
    history.copy_within(channels.., 0);
    history[2 * channels..].copy_from_slice(input);
    y
}

/// `q_i / sqrt(sum(q^2) + 1e-6) / sqrt(128)`.
pub fn delta_query(q: &[f32]) -> Vec<f32> {
    unit(q, (q.len() as f64).sqrt().recip())
}

/// `k_i / sqrt(sum(k^2) + 1e-6)`.
pub fn delta_key(k: &[f32]) -> Vec<f32> {
    unit(k, 1.0)
}

fn unit(x: &[f32], length: f64) -> Vec<f32> {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let scale = length / (sum + UNIT_EPS).sqrt();
    x.iter().map(|x| (f64::from(*x) * scale) as f32).collect()
}

/// `exp(-exp(A_log) * softplus(a + dt_bias))`, in (0, 1]: what is left of a value head's state after one token.
pub fn decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    (-f64::from(a_log).exp() * f64::from(softplus(a + dt_bias))).exp() as f32
}

/// What the gated delta rule takes from one token for one value head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInput<'a> {
    /// `[128]`, after [`delta_query`].
    pub query: &'a [f32],
    /// `[128]`, after [`delta_key`].
    pub key: &'a [f32],
    /// `[128]`.
    pub value: &'a [f32],
    /// From [`decay`].
    pub decay: f32,
    /// `sigmoid(b)`.
    pub beta: f32,
}

/// One token of the gated delta rule for one value head, with the state `S` `[128 (value), 128 (key)]`:
///
/// ```text
/// S = decay * S
/// e = beta * (v - S k)
/// S = S + e k^T
/// o = S q
/// ```
pub fn delta_step(state: &mut [f32], input: DeltaInput<'_>) -> Vec<f32> {
    let DeltaInput { query, key, value, decay, beta } = input;
    let rows = state.chunks_exact_mut(key.len()).zip(value);
    rows.map(|(row, v)| {
        row.iter_mut().for_each(|s| *s *= decay);
        let error = beta * (v - dot(row, key));
        row.iter_mut().zip(key).for_each(|(s, k)| *s += error * k);
        dot(row, query)
    })
    .collect()
}

/// The norm of a delta layer's output, per value head: `o_i / sqrt(mean(o^2) + eps) * w_i * silu(z_i)`.
pub fn gated_norm(o: &[f32], z: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    rms_norm(o, weight, eps).iter().zip(z).map(|(x, z)| x * silu(*z)).collect()
}

/// The `count` experts of the highest logits, lowest id first on ties, each with its weight: the softmax over the chosen
/// logits, which is the softmax over all of them divided by what the chosen ones sum to. In falling order.
pub fn route(logits: &[f32], count: usize) -> Vec<(usize, f32)> {
    let chosen = falling(logits).into_iter().take(count);
    let (ids, logits): (Vec<usize>, Vec<f32>) = chosen.map(|id| (id, logits[id])).unzip();
    ids.into_iter().zip(softmax(&logits)).collect()
}

/// `silu(gate_i) * up_i`.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(g, u)| silu(*g) * u).collect()
}

/// Indices from the highest value to the lowest, the lower index first where two are equal.
pub fn falling(values: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Adding zero makes -0 equal to 0.
    order.sort_by(|a, b| (values[*b] + 0.0).total_cmp(&(values[*a] + 0.0)).then(a.cmp(b)));
    order
}

/// The index of the highest value, the lowest index on ties.
pub fn greedy(logits: &[f32]) -> usize {
    falling(logits)[0]
}

/// `ln softmax(x)_i`, over the whole vocabulary.
pub fn log_probabilities(logits: &[f32]) -> Vec<f32> {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    logits.iter().map(|x| (f64::from(*x) - max - sum.ln()) as f32).collect()
}

/// Chooses a token as [`SamplingParams`] says, step by step. `tokens` are all tokens of the state, those fed by this
/// step included, so that the sampled token is for position `tokens.len()`. `mask` has bit `id % 32` of word `id / 32`
/// set where a token is allowed. Fails on logits that are not finite and where no token is left to choose.
pub fn sample(
    logits: &[f32],
    params: &SamplingParams,
    tokens: &[u32],
    mask: Option<&[u32]>,
) -> Result<SampledToken, Error> {
    if logits.iter().any(|x| !x.is_finite()) {
        return Err(Error::BadLogits { row: 0, position: tokens.len() - 1 });
    }

    // Biases, then what is excluded.
    let mut scores = logits.to_vec();
    for (id, bias) in params.logit_bias.iter() {
        scores[*id as usize] += bias;
    }
    let in_mask = |id: usize| match mask {
        Some(words) => words.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1),
        None => true,
    };
    let allowed = |id: &usize| *id < params.vocab_limit as usize && in_mask(*id) && scores[*id] > f32::NEG_INFINITY;
    let candidates: Vec<usize> = (0..logits.len()).filter(allowed).collect();

    // Penalties.
    let mut counts = vec![0u32; logits.len()];
    for token in tokens.iter().skip(params.penalty_start) {
        counts[*token as usize] += 1;
    }
    for (score, count) in scores.iter_mut().zip(&counts).filter(|(_, count)| **count > 0) {
        let repeated = params.repetition_penalty;
        *score = if *score > 0.0 { *score / repeated } else { *score * repeated };
        *score -= params.presence_penalty + params.frequency_penalty * *count as f32;
    }

    let scores: Vec<f32> = candidates.iter().map(|id| scores[*id]).collect();
    let order = falling(&scores);
    let best = *order.first().ok_or(Error::EmptyMask(0))?;
    let chosen = if params.temperature == 0.0 {
        best
    } else {
        // The highest is subtracted first, so that no temperature is too small.
        let scaled = order.iter().map(|i| (scores[*i] - scores[best]) / params.temperature).collect();
        order[draw(scaled, params, tokens.len())]
    };
    let chosen = candidates[chosen];
    let logprobs = params.logprobs.map(|top| report(logits, chosen, top as usize));
    Ok(SampledToken { id: chosen as u32, logprobs })
}

/// Draws an index of `scores`, which are divided by the temperature and fall.
fn draw(mut scores: Vec<f32>, params: &SamplingParams, position: usize) -> usize {
    if params.top_k > 0 {
        scores.truncate(params.top_k as usize);
    }
    let mut probabilities = softmax(&scores);
    if params.top_p < 1.0 {
        let mut sum = 0.0;
        let reached = probabilities.iter().position(|p| {
            sum += f64::from(*p);
            sum >= f64::from(params.top_p)
        });
        probabilities.truncate(reached.map_or(probabilities.len(), |last| last + 1));
    }
    let least = params.min_p * probabilities[0];
    probabilities.retain(|p| *p >= least);

    let total: f64 = probabilities.iter().map(|p| f64::from(*p)).sum();
    let target = f64::from(SamplingParams::uniform(params.seed, position)) * total;
    let mut sum = 0.0;
    let reached = probabilities.iter().position(|p| {
        sum += f64::from(*p);
        sum > target
    });
    reached.unwrap_or(probabilities.len() - 1)
}

fn report(logits: &[f32], chosen: usize, top: usize) -> LogProbs {
    let log = log_probabilities(logits);
    let top = falling(logits).into_iter().take(top).map(|id| (id as u32, log[id])).collect();
    LogProbs { chosen: log[chosen], top }
}
