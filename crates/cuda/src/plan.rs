//! What is decided and made once, at load: that the weights fit the kernels and the memory, weights in blocks on the device, and
//! the memory between kernels.

use lily_backend::{Error, Result};
use lily_model::safetensors::TensorBytes;
use lily_model::{Bits, Checkpoint, LayerWeights, Mixer, Mlp, QuantMatrix, Shape, Weights};

use crate::device::{Buffer, Device, Event, Pinned, Pointer, unavailable};
use crate::kernels::delta::DeltaVectors;
use crate::kernels::moe::MAX_EXPERTS;
use crate::kernels::norm::Embedding;
use crate::kernels::rows::{Meetings, ROWS, RowImage};
use crate::kernels::{BLOCK4_BYTES, BLOCK8_BYTES, FixedRows, Kernels, Pass, Sizes, Source, TILE_ROWS, blocks};

/// Weights on the device.
pub(crate) struct DeviceWeights {
    pub(crate) embedding: Embedding,
    pub(crate) layers: Vec<Layer>,
    /// `[hidden]`.
    pub(crate) norm: Pointer,
    pub(crate) head: Pointer,
    memory: Buffer,
}

impl DeviceWeights {
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Where all of them begin.
    pub(crate) fn start(&self) -> Pointer {
        self.memory.pointer()
    }
}

/// A layer's weights.
pub(crate) struct Layer {
    pub(crate) mixer_norm: Pointer,
    pub(crate) mixer: LayerMixer,
    pub(crate) moe_norm: Pointer,
    /// Router and shared gate, 8 bits.
    pub(crate) router: Pointer,
    /// Gate and up of the shared expert, 8 rows each in a tile.
    pub(crate) shared_up: Pointer,
    pub(crate) shared_down: Pointer,
    /// Gate and up of the experts.
    pub(crate) experts_up: Pointer,
    pub(crate) experts_down: Pointer,
}

/// A mixer's weights; `project` holds all projections of the normed stream, one after the other.
pub(crate) enum LayerMixer {
    Delta { project: Pointer, vectors: DeltaVectors, out: Pointer },
    Attention { project: Pointer, q_norm: Pointer, k_norm: Pointer, out: Pointer },
}

/// Alignment of everything in the memory of weights: what the widest copies need, and a whole DRAM burst.
const ALIGNMENT: usize = 256;

/// One thing to put into the memory of weights.
enum Item<'a> {
    /// Tiles of a matrix, or of two that share tiles.
    Tiles(&'a QuantMatrix, Option<&'a QuantMatrix>),
    /// Bytes as they are.
    Plain(&'a TensorBytes),
    Floats(Vec<f32>),
}

impl Item<'_> {
    fn bytes(&self) -> usize {
        match self {
            Item::Tiles(matrix, second) => tiles(matrix, second.is_some()) * tile_bytes(matrix),
            Item::Plain(bytes) => bytes.len(),
            Item::Floats(floats) => floats.len() * 4,
        }
    }
}

/// Tiles that a matrix makes; a pair of matrices shares tiles of 8 rows each.
fn tiles(matrix: &QuantMatrix, paired: bool) -> usize {
    matrix.rows().div_ceil(if paired { TILE_ROWS / 2 } else { TILE_ROWS })
}

fn tile_bytes(matrix: &QuantMatrix) -> usize {
    blocks(matrix.inputs)
        * match matrix.bits {
            Bits::Four => BLOCK4_BYTES,
            Bits::Eight => BLOCK8_BYTES,
        }
}

/// What goes where, before there is memory: addresses count from 0.
#[derive(Default)]
struct Layout<'a> {
    items: Vec<(Item<'a>, usize)>,
    end: usize,
}

impl<'a> Layout<'a> {
    fn put(&mut self, item: Item<'a>) -> Pointer {
        self.end = self.end.next_multiple_of(ALIGNMENT);
        self.append(item)
    }

    /// Directly behind the one before.
    fn append(&mut self, item: Item<'a>) -> Pointer {
        let at = self.end;
        self.end += item.bytes();
        self.items.push((item, at));
        Pointer(at as u64)
    }

    fn floats(&mut self, floats: &[f32]) -> Pointer {
        self.put(Item::Floats(floats.to_vec()))
    }

    fn matrix(&mut self, matrix: &'a QuantMatrix) -> Pointer {
        self.put(Item::Tiles(matrix, None))
    }

    /// Tiles of several matrices in a row.
    fn matrices(&mut self, matrices: &[&'a QuantMatrix]) -> Pointer {
        self.end = self.end.next_multiple_of(ALIGNMENT);
        let first = self.end;
        for matrix in matrices {
            self.append(Item::Tiles(matrix, None));
        }
        Pointer(first as u64)
    }

    fn gate_up(&mut self, mlp: &'a Mlp) -> Pointer {
        self.put(Item::Tiles(&mlp.gate, Some(&mlp.up)))
    }

    fn layer(&mut self, w: &'a LayerWeights) -> Layer {
        let mixer = match &w.mixer {
            Mixer::Delta(d) => {
                let rates: Vec<f32> = d.a_log.iter().map(|a| a.exp()).collect();
                LayerMixer::Delta {
                    project: self.matrices(&[&d.qkv, &d.z, &d.b, &d.a]),
                    vectors: DeltaVectors {
                        taps: self.floats(&d.conv),
                        rates: self.floats(&rates),
                        dt_bias: self.floats(&d.dt_bias),
                        norm: self.floats(&d.norm),
                    },
                    out: self.matrix(&d.out),
                }
            }
            Mixer::Attention(a) => LayerMixer::Attention {
                project: self.matrices(&[&a.q, &a.k, &a.v]),
                q_norm: self.floats(&a.q_norm),
                k_norm: self.floats(&a.k_norm),
                out: self.matrix(&a.o),
            },
        };
        let moe = &w.moe;
        Layer {
            mixer_norm: self.floats(&w.mixer_norm),
            mixer,
            moe_norm: self.floats(&w.moe_norm),
            router: self.matrices(&[&moe.router, &moe.shared_gate]),
            shared_up: self.gate_up(&moe.shared),
            shared_down: self.matrix(&moe.shared.down),
            experts_up: self.gate_up(&moe.experts),
            experts_down: self.matrix(&moe.experts.down),
        }
    }

    /// Everything, in the order of the forward pass.
    fn weights(&mut self, w: &'a Weights) -> (Embedding, Vec<Layer>, Pointer, Pointer) {
        let embedding = Embedding {
            codes: self.put(Item::Plain(&w.embedding.codes)),
            scales: self.put(Item::Plain(&w.embedding.scales)),
            biases: self.put(Item::Plain(&w.embedding.biases)),
        };
        let layers = w.layers.iter().map(|layer| self.layer(layer)).collect();
        (embedding, layers, self.floats(&w.norm), self.matrix(&w.head))
    }
}

impl Layer {
    fn shift(&mut self, base: Pointer) {
        let shift = |pointers: &mut [&mut Pointer]| pointers.iter_mut().for_each(|p| p.0 += base.0);
        let Layer { mixer_norm, mixer, moe_norm, router, shared_up, shared_down, experts_up, experts_down } = self;
        shift(&mut [mixer_norm, moe_norm, router, shared_up, shared_down, experts_up, experts_down]);
        match mixer {
            LayerMixer::Delta { project, vectors: v, out } => {
                shift(&mut [project, out, &mut v.taps, &mut v.rates, &mut v.dt_bias, &mut v.norm]);
            }
            LayerMixer::Attention { project, q_norm, k_norm, out } => shift(&mut [project, q_norm, k_norm, out]),
        }
    }
}

/// Bytes that the weights of a checkpoint take on the device.
pub(crate) fn weight_bytes(weights: &Weights) -> usize {
    let mut layout = Layout::default();
    layout.weights(weights);
    layout.end
}

/// Puts all weights on the device.
pub(crate) fn load_weights(device: &Device, kernels: &Kernels, checkpoint: &Checkpoint) -> Result<DeviceWeights> {
    let mut layout = Layout::default();
    let (mut embedding, mut layers, mut norm, mut head) = layout.weights(&checkpoint.weights);
    let memory = device.zeroed("the weights", layout.end)?;
    let base = memory.pointer();
    for pointer in [&mut embedding.codes, &mut embedding.scales, &mut embedding.biases, &mut norm, &mut head] {
        pointer.0 += base.0;
    }
    layers.iter_mut().for_each(|layer| layer.shift(base));
    let mut loader = Loader::new(device, kernels)?;
    for (item, at) in &layout.items {
        loader.load(item, base.at(*at))?;
    }
    device.synchronize()?;
    Ok(DeviceWeights { embedding, layers, norm, head, memory })
}

/// Copies what the file holds to the device and repacks it there. Two halves: while one is on its way, the other is filled from
/// the mapped file by several threads.
struct Loader<'a> {
    device: &'a Device,
    kernels: &'a Kernels,
    halves: [Half; 2],
    turn: usize,
}

struct Half {
    host: Pinned,
    device: Buffer,
    /// That it was used up.
    done: Event,
}

/// Bytes of a half: long copies, and hardly any memory.
const HALF_BYTES: usize = 64 << 20;
/// Threads that read the file. Page faults and copies of one do not keep up with the bus.
const READERS: usize = 8;
/// Below this much, more than one thread does not pay.
const READ_ALONE: usize = 1 << 20;

impl<'a> Loader<'a> {
    fn new(device: &'a Device, kernels: &'a Kernels) -> Result<Loader<'a>> {
        let half = || -> Result<Half> {
            Ok(Half {
                host: device.pinned(HALF_BYTES)?,
                device: device.zeroed("room for loading", HALF_BYTES)?,
                done: device.event()?,
            })
        };
        Ok(Loader { device, kernels, halves: [half()?, half()?], turn: 0 })
    }

    fn load(&mut self, item: &Item<'_>, to: Pointer) -> Result<()> {
        match item {
            Item::Floats(floats) => {
                let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
                self.plain(&bytes, to)
            }
            Item::Plain(bytes) => self.plain(bytes, to),
            Item::Tiles(matrix, second) => self.tiles(matrix, *second, to),
        }
    }

    fn plain(&mut self, bytes: &[u8], to: Pointer) -> Result<()> {
        for (index, part) in bytes.chunks(HALF_BYTES).enumerate() {
            let from = self.stage(&[part])?[0];
            self.device.copy(to.at(index * HALF_BYTES), from, part.len())?;
            self.used()?;
        }
        Ok(())
    }

    fn tiles(&mut self, matrix: &QuantMatrix, second: Option<&QuantMatrix>, to: Pointer) -> Result<()> {
        let tile_rows = if second.is_some() { TILE_ROWS / 2 } else { TILE_ROWS };
        let row_bytes = matrix.row_bytes() + 4 * matrix.groups();
        // Of all parts together, with room to align each of them.
        let rows_at_once = (HALF_BYTES - 6 * ALIGNMENT) / row_bytes / (1 + usize::from(second.is_some()));
        let rows_at_once = rows_at_once / tile_rows * tile_rows;
        for first in (0..matrix.rows()).step_by(rows_at_once) {
            let rows = rows_at_once.min(matrix.rows() - first);
            let slices = |m: &'_ QuantMatrix| -> [std::ops::Range<usize>; 3] {
                let (code, group) = (m.row_bytes(), 2 * m.groups());
                [
                    first * code..(first + rows) * code,
                    first * group..(first + rows) * group,
                    first * group..(first + rows) * group,
                ]
            };
            let mut parts: Vec<&[u8]> = Vec::with_capacity(6);
            for m in [Some(matrix), second].into_iter().flatten() {
                let [codes, scales, biases] = slices(m);
                parts.extend([&m.codes[codes], &m.scales[scales], &m.biases[biases]]);
            }
            let at = self.stage(&parts)?;
            let source = |at: &[Pointer]| Source { codes: at[0], scales: at[1], biases: at[2] };
            let sources = (source(&at), second.map(|_| source(&at[3..])));
            let sizes = (rows, matrix.inputs, rows.div_ceil(tile_rows));
            let pass = Pass { device: self.device, overlap: false };
            let out = to.at(first / tile_rows * tile_bytes(matrix));
            self.kernels.repack(&pass, matrix.bits, sources, sizes, out)?;
            self.used()?;
        }
        Ok(())
    }

    /// Copies parts to the device; where each lies is returned.
    fn stage(&mut self, parts: &[&[u8]]) -> Result<Vec<Pointer>> {
        let half = &mut self.halves[self.turn];
        half.done.wait()?;
        let (mut at, mut end) = (Vec::with_capacity(parts.len()), 0);
        for part in parts {
            at.push(end);
            end = (end + part.len()).next_multiple_of(ALIGNMENT);
        }
        for (part, at) in parts.iter().zip(&at) {
            read(half.host.slice_mut(*at, part.len()), part);
        }
        self.device.upload_pinned(half.device.pointer(), &half.host, 0, end.min(HALF_BYTES))?;
        Ok(at.into_iter().map(|at| half.device.pointer().at(at)).collect())
    }

    /// What was staged is used up when the stream comes here; the other half is next.
    fn used(&mut self) -> Result<()> {
        self.device.record(&self.halves[self.turn].done)?;
        self.turn ^= 1;
        Ok(())
    }
}

/// Copies from the mapped file.
fn read(to: &mut [u8], from: &[u8]) {
    if from.len() < READ_ALONE {
        return to.copy_from_slice(from);
    }
    let share = from.len().div_ceil(READERS);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(share).zip(from.chunks(share)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

/// Checks what kernels rely on.
pub(crate) fn check(shape: &Shape, weights: &Weights) -> Result<()> {
    let refuse = |reason: String| Err(unavailable(reason));
    // The norms of one token need a warp per block of 256.
    if shape.hidden == 0 || !shape.hidden.is_multiple_of(256) || shape.hidden > 4096 {
        return refuse(format!("hidden is {}, expected a multiple of 256 up to 4096", shape.hidden));
    }
    for (name, size) in [("expert_width", shape.expert_width), ("shared_width", shape.shared_width)] {
        if size == 0 || !size.is_multiple_of(Shape::GROUP) {
            return refuse(format!("{name} is {size}, expected a multiple of {}", Shape::GROUP));
        }
    }
    if shape.experts_per_token == 0 || shape.experts_per_token > shape.experts.min(32) || shape.experts > MAX_EXPERTS {
        let (top_k, experts) = (shape.experts_per_token, shape.experts);
        return refuse(format!("{top_k} of {experts} experts per token; at most 32 of {MAX_EXPERTS} are possible"));
    }
    for (name, heads, shared) in
        [("attention", shape.query_heads, shape.kv_heads), ("delta", shape.delta_value_heads, shape.delta_key_heads)]
    {
        if shared == 0 || heads == 0 || !heads.is_multiple_of(shared) {
            return refuse(format!("{heads} {name} heads cannot share {shared}"));
        }
    }
    if shape.query_heads / shape.kv_heads > 8 {
        return refuse(format!(
            "{} query heads on {} key/value heads; at most 8 share one",
            shape.query_heads, shape.kv_heads
        ));
    }
    if shape.vocab == 0 || shape.vocab > Kernels::MAX_VOCAB {
        return refuse(format!("a vocabulary of {}; at most {} are possible", shape.vocab, Kernels::MAX_VOCAB));
    }
    if weights.layers.len() != shape.layers {
        return refuse(format!("{} layers of weights, expected {}", weights.layers.len(), shape.layers));
    }
    let routers: Vec<&str> =
        weights.layers.iter().flat_map(|l| [&*l.moe.router.name, &*l.moe.shared_gate.name]).collect();
    for matrix in weights.matrices() {
        let expected = if routers.contains(&&*matrix.name) { Bits::Eight } else { Bits::Four };
        if matrix.bits != expected {
            let (found, expected) = (matrix.bits.count(), expected.count());
            return refuse(format!(
                "{} has codes of {found} bits, expected {expected} as the published checkpoint has",
                matrix.name
            ));
        }
    }
    Ok(())
}

/// Addresses one behind the other.
struct Carver {
    end: usize,
}

impl Carver {
    fn take(&mut self, bytes: usize) -> Pointer {
        let at = self.end;
        self.end = (at + bytes).next_multiple_of(ALIGNMENT);
        Pointer(at as u64)
    }
}

/// Declares a struct of addresses in one buffer, and how many bytes each has.
macro_rules! scratch {
    ($($(#[$doc:meta])* $field:ident: $bytes:expr;)+) => {
        /// Memory between kernels, for `tokens` tokens at a time. All of it is zeros at first; what pads rows stays so.
        pub(crate) struct Scratch {
            $($(#[$doc])* pub(crate) $field: Pointer,)+
            memory: Buffer,
        }

        impl Scratch {
            /// Its bytes for `tokens` tokens, or for one token of every row if those are more.
            pub(crate) fn bytes_for(sizes: &Sizes, tokens: usize, grid: ScratchGrid) -> usize {
                let tokens = tokens.max(ROWS);
                let mut carver = Carver { end: 0 };
                $(carver.take(($bytes)(sizes, tokens, grid));)+
                carver.end
            }

            pub(crate) fn new(device: &Device, sizes: &Sizes, tokens: usize, grid: ScratchGrid) -> Result<Scratch> {
                let memory = device.zeroed("activations", Scratch::bytes_for(sizes, tokens, grid))?;
                let tokens = tokens.max(ROWS);
                let mut carver = Carver { end: memory.pointer().0 as usize };
                $(let $field = carver.take(($bytes)(sizes, tokens, grid));)+
                Ok(Scratch { $($field,)+ memory })
            }
        }
    };
}

/// Numbers of CTAs that results are kept of.
#[derive(Clone, Copy)]
pub(crate) struct ScratchGrid {
    pub(crate) parts: usize,
    pub(crate) head: usize,
}

/// Rows of logits that are computed at a time where all are wanted.
pub(crate) const LOGIT_ROWS: usize = 64;

type S<'a> = &'a Sizes;

scratch! {
    /// Ids to feed.
    ids: |_: S<'_>, tokens, _| 4 * tokens;
    /// Cosine and sine of RoPE `[rows, 32]`.
    turns: |_: S<'_>, _, _| 256 * ROWS;
    /// Residual stream `[tokens, hidden]`.
    h: |s: S<'_>, tokens, _| 4 * tokens * s.hidden;
    /// A mixer's projections `[tokens, rows]`.
    projected: |s: S<'_>, tokens, _| 4 * tokens * s.projected_delta.max(s.projected_attention);
    /// A mixer's output before the output projection, `[tokens, width]`; where rows have one token each, their widths are padded.
    mixed: |s: S<'_>, tokens: usize, _| 4 * tokens * crate::kernels::padded(s.value_width).max(s.query_width);
    /// Sums of squares of delta heads `[value heads, 4]`, and room for a head that padding would have.
    squares: |s: S<'_>, _, _| 16 * (s.value_heads + 1);
    /// Inner values of experts `[rows, blocks, 256]`, each in whole blocks.
    activation: |s: S<'_>, _, _| 4 * 256 * ROWS * s.down_blocks();
    /// Maximum and sum of each part `[rows, query heads, parts]`.
    part_sums: |s: S<'_>, _, grid: ScratchGrid| 8 * ROWS * s.query_heads * grid.parts;
    /// Partial outputs `[rows, parts, query heads, 256]`.
    part_values: |s: S<'_>, _, grid: ScratchGrid| 1024 * ROWS * s.query_heads * grid.parts;
    /// Who meets which expert.
    meetings: |s: S<'_>, _, _| Meetings::BYTES * Meetings::most(s);
    meeting_count: |_: S<'_>, _, _| 4;
    meeting_weights: |s: S<'_>, _, _| 4 * ROWS * (s.top_k + 1);
    /// What experts made, block by block `[rows, blocks, hidden]`.
    parts: |s: S<'_>, _, _| 4 * ROWS * s.down_blocks() * s.hidden;
    /// Router logits `[tokens, router rows]`.
    router: |s: S<'_>, tokens, _| 4 * tokens * s.router_rows;
    /// Fixed-point inputs of the widest linear.
    fixed: |s: S<'_>, tokens, _| {
        let widest = s.hidden.max(s.value_width).max(s.query_width);
        FixedRows::bytes(tokens, widest).max(RowImage::bytes(widest))
    };
    /// Fixed-point inner values of the experts.
    fixed_inner: |s: S<'_>, tokens, _| {
        FixedRows::bytes(tokens * s.top_k, s.expert_width).max(FixedRows::bytes(tokens, s.shared_width))
    };
    /// Delta heads by the chunk, before the recurrence.
    related: |s: S<'_>, tokens, _| crate::kernels::delta::related_bytes(s, tokens);
    /// BF16 queries in two halves.
    queries: |s: S<'_>, tokens, _| 4 * tokens * s.query_width;
    /// Chosen experts `[tokens, top k]`.
    chosen: |s: S<'_>, tokens, _| 4 * tokens * s.top_k;
    /// Their weights.
    chosen_weights: |s: S<'_>, tokens, _| 4 * tokens * s.top_k;
    /// Pairs of each expert `[experts, tokens]`.
    pairs: |s: S<'_>, tokens, _| 4 * tokens * s.experts;
    pair_counts: |s: S<'_>, _, _| 4 * s.experts;
    /// Tiles of pairs; the smallest tile makes the most.
    pair_tiles: |s: S<'_>, tokens, _| 8 * (s.experts + tokens * s.top_k / 16);
    pair_tile_count: |_: S<'_>, _, _| 4;
    /// Inner values of the experts `[pairs, expert width]`, and then of the shared one.
    inner: |s: S<'_>, tokens, _| 4 * tokens * (s.top_k * s.expert_width).max(s.shared_width);
    /// Outputs of the experts `[pairs, hidden]`.
    routed: |s: S<'_>, tokens, _| 4 * tokens * s.top_k * s.hidden;
    /// Output of the shared expert `[tokens, hidden]`.
    shared: |s: S<'_>, tokens, _| 4 * tokens * s.hidden;
    /// Logits `[rows, vocab]`; the first row also that of one token.
    logits: |s: S<'_>, tokens: usize, _| 4 * tokens.min(LOGIT_ROWS) * s.vocab_tiles * 16;
    /// The best logit of every CTA of the head `[rows, CTAs]`.
    bests: |_: S<'_>, _, grid: ScratchGrid| 16 * ROWS * grid.head;
    /// A word for a sampled id that no state waits for any more.
    spare: |_: S<'_>, _, _| 4;
    /// The run on the device.
    run: |_: S<'_>, _, _| size_of::<crate::kernels::Run>();
    /// The runs of rows that share a pass.
    runs: |_: S<'_>, _, _| ROWS * size_of::<crate::kernels::Run>();
    scores: |s: S<'_>, _, _| 4 * s.vocab;
    token_counts: |s: S<'_>, _, _| 4 * s.vocab;
    biases: |s: S<'_>, _, _| 8 * s.vocab;
    mask: |s: S<'_>, _, _| 4 * s.vocab.div_ceil(32);
    sampler: |_: S<'_>, _, _| crate::kernels::sample::SAMPLER_BYTES;
}

impl Scratch {
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes()
    }
}

/// Largest chunk up to `wanted` whose scratch memory takes at most a quarter of what is free.
pub(crate) fn chunk_that_fits(sizes: &Sizes, wanted: usize, grid: ScratchGrid, free: usize) -> Result<usize> {
    let mut tokens = wanted.max(1);
    while tokens > 1 && Scratch::bytes_for(sizes, tokens, grid) > free / 4 {
        tokens /= 2;
    }
    let needed = Scratch::bytes_for(sizes, tokens, grid);
    if needed > free {
        return Err(Error::OutOfMemory { what: format!("activations of {tokens} tokens"), needed, available: free });
    }
    Ok(tokens)
}
