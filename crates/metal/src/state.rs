//! What a session keeps on the device, and its copies.

use std::io::{Read, Write};

use lily_backend::export::read;
use lily_backend::{Error, Result, SamplingParams, Ticket};
use lily_model::Shape;
use sha2::{Digest, Sha256};

use crate::device::{Gpu, Slice};
use crate::room::StateBytes;

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDtype {
    /// As computed.
    F32,
    /// Rounded to nearest even: half the memory and half the traffic of long contexts.
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 => 2,
        }
    }
}

/// Bytes of the parts of a state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// One row of one key/value head.
    row: usize,
    kv_heads: usize,
    attention_layers: usize,
    delta_layers: usize,
    /// Convolution inputs of a layer: as many as taps, so that none is moved when the next one comes.
    ring: usize,
    /// Delta state of a layer.
    delta: usize,
}

impl Layout {
    pub(crate) fn new(shape: &Shape, kv: KvDtype) -> Layout {
        Layout {
            row: Shape::HEAD_DIM * kv.bytes(),
            kv_heads: shape.kv_heads,
            attention_layers: shape.attention_layers(),
            delta_layers: shape.delta_layers(),
            ring: Shape::CONV_TAPS * shape.conv_width() * 4,
            delta: shape.delta_state_len() * 4,
        }
    }

    /// Bytes per token of capacity.
    fn per_token(&self) -> usize {
        2 * self.attention_layers * self.kv_heads * self.row
    }

    /// Bytes of a state.
    pub(crate) fn bytes(&self) -> StateBytes {
        StateBytes { per_token: self.per_token(), whatever: self.recurrent() }
    }

    /// Bytes beside the tokens.
    fn recurrent(&self) -> usize {
        self.delta_layers * (self.ring + self.delta)
    }
}

/// Where a state's next input of [`lily_backend::Input::PreviousSample`] is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sampled {
    /// The last step samples none.
    None,
    /// Known to the host.
    Id(u32),
    /// `[1]` u32 on the device, sampled by a step in flight.
    OnDevice(Ticket, Slice),
    /// To be sampled by the host when this step in flight has its logits.
    ByHost(Ticket),
}

/// One session's state.
pub(crate) struct State {
    layout: Layout,
    capacity: usize,
    /// Keys, then values, `[attention layer, kv head, capacity, 256]` each.
    kv: Slice,
    /// Per delta layer the ring and the delta state.
    recurrent: Slice,
    /// Ids of all tokens fed; that of a token which only the device knows yet is missing.
    pub(crate) tokens: Vec<Option<u32>>,
    pub(crate) sampled: Sampled,
    /// The step whose sampling waits for a mask.
    pub(crate) awaits_mask: Option<Ticket>,
    /// Whether a failed step left it undefined.
    pub(crate) lost: bool,
}

/// A copy of a state's recurrent part.
pub(crate) struct Snapshot {
    tokens: Vec<Option<u32>>,
    recurrent: Slice,
}

impl Snapshot {
    pub(crate) fn bytes(&self) -> usize {
        self.recurrent.bytes + 4 * self.tokens.len()
    }

    pub(crate) fn free(self, gpu: &mut dyn Gpu) {
        gpu.free(self.recurrent.buffer);
    }
}

fn new_buffer(gpu: &mut dyn Gpu, bytes: usize, what: &str) -> Result<Slice> {
    Ok(Slice { buffer: gpu.buffer(bytes, what)?, offset: 0, bytes })
}

impl State {
    /// An empty state with room for `capacity` tokens.
    pub(crate) fn new(gpu: &mut dyn Gpu, layout: Layout, capacity: usize) -> Result<State> {
        let kv = new_buffer(gpu, layout.per_token() * capacity, "a KV cache")?;
        let recurrent = match new_buffer(gpu, layout.recurrent(), "a delta state") {
            Ok(recurrent) => recurrent,
            Err(error) => {
                gpu.free(kv.buffer);
                return Err(error);
            }
        };
        gpu.clear(recurrent)?;
        let (tokens, sampled) = (Vec::new(), Sampled::None);
        Ok(State { layout, capacity, kv, recurrent, tokens, sampled, awaits_mask: None, lost: false })
    }

    pub(crate) fn free(self, gpu: &mut dyn Gpu) {
        gpu.free(self.kv.buffer);
        gpu.free(self.recurrent.buffer);
    }

    /// Tokens it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens fed so far.
    pub(crate) fn position(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.kv.bytes + self.recurrent.bytes
    }

    /// Keys and values of the `index`-th attention layer, `[kv head, capacity, 256]` each.
    pub(crate) fn kv(&self, index: usize) -> [Slice; 2] {
        let bytes = self.layout.kv_heads * self.capacity * self.layout.row;
        [index, self.layout.attention_layers + index].map(|plane| self.kv.nth(plane, bytes))
    }

    /// Ring and delta state of the `index`-th delta layer.
    pub(crate) fn recurrent(&self, index: usize) -> (Slice, Slice) {
        let Layout { ring, delta, .. } = self.layout;
        let layer = self.recurrent.nth(index, ring + delta);
        (layer.part(0, ring), layer.part(ring, delta))
    }

    /// Back to position 0. KV rows stay as they are: no one reads them before they are written again.
    pub(crate) fn reset(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        gpu.clear(self.recurrent)?;
        self.tokens.clear();
        self.settle();
        Ok(())
    }

    /// Forgets what the last step left beside the state itself.
    fn settle(&mut self) {
        self.sampled = Sampled::None;
        self.awaits_mask = None;
        self.lost = false;
    }

    pub(crate) fn snapshot(&self, gpu: &mut dyn Gpu) -> Result<Snapshot> {
        let recurrent = new_buffer(gpu, self.recurrent.bytes, "a snapshot")?;
        gpu.copy(self.recurrent, recurrent)?;
        Ok(Snapshot { tokens: self.tokens.clone(), recurrent })
    }

    /// Goes back to a snapshot of this state's past.
    pub(crate) fn restore(&mut self, gpu: &mut dyn Gpu, snapshot: &Snapshot) -> Result<()> {
        let position = snapshot.tokens.len();
        if self.tokens.get(..position) != Some(&snapshot.tokens[..]) {
            return Err(Error::BadStep(format!(
                "the snapshot at position {position} is not of this state's past: the tokens fed before differ"
            )));
        }
        gpu.copy(snapshot.recurrent, self.recurrent)?;
        self.tokens.truncate(position);
        self.settle();
        Ok(())
    }

    /// The rows of the tokens fed, plane by plane.
    fn rows(&self) -> impl Iterator<Item = Slice> {
        let bytes = self.capacity * self.layout.row;
        let planes = 2 * self.layout.attention_layers * self.layout.kv_heads;
        (0..planes).map(move |plane| self.kv.nth(plane, bytes).part(0, self.position() * self.layout.row))
    }

    /// Becomes a copy of `from`, which fits.
    pub(crate) fn copy_from(&mut self, gpu: &mut dyn Gpu, from: &State) -> Result<()> {
        self.tokens.clone_from(&from.tokens);
        for (from, to) in from.rows().zip(self.rows()) {
            gpu.copy(from, to)?;
        }
        gpu.copy(from.recurrent, self.recurrent)?;
        self.settle();
        Ok(())
    }

    /// Advances by `ids`, which fit, with seeded noise for keys and values and the recurrent part as it is. Every plane has the
    /// same noise: what it is does not matter for speed.
    pub(crate) fn feed_noise(&mut self, gpu: &mut dyn Gpu, ids: &[u32], seed: u64) -> Result<()> {
        let Layout { row, .. } = self.layout;
        let (first, element) = (self.position(), row / Shape::HEAD_DIM);
        let places = first * Shape::HEAD_DIM..(first + ids.len()) * Shape::HEAD_DIM;
        let noise = places.map(|place| 3f32.sqrt() * (2.0 * SamplingParams::uniform(seed, place) - 1.0));
        let bytes: Vec<u8> = match element {
            2 => noise.flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            _ => noise.flat_map(f32::to_le_bytes).collect(),
        };
        self.tokens.extend(ids.iter().copied().map(Some));
        for rows in self.rows() {
            gpu.write(rows.part(first * row, bytes.len()), &bytes)?;
        }
        self.sampled = Sampled::None;
        Ok(())
    }

    /// Writes the state; `fingerprint` says to which checkpoint and KV dtype it belongs.
    pub(crate) fn export(&self, gpu: &dyn Gpu, fingerprint: &[u8; 32], to: &mut dyn Write) -> Result<()> {
        let mut hash = Sha256::new();
        let mut put = |bytes: &[u8]| -> Result<()> {
            hash.update(bytes);
            Ok(to.write_all(bytes)?)
        };
        put(MAGIC)?;
        put(fingerprint)?;
        put(&(self.position() as u64).to_le_bytes())?;
        for id in &self.tokens {
            let id = id.ok_or_else(|| Error::BadStep("its last token is still on the device".into()))?;
            put(&id.to_le_bytes())?;
        }
        let mut bytes = Vec::new();
        for slice in std::iter::once(self.recurrent).chain(self.rows()) {
            bytes.resize(slice.bytes, 0);
            gpu.read(slice, &mut bytes)?;
            put(&bytes)?;
        }
        to.write_all(&hash.finalize())?;
        Ok(())
    }

    /// Replaces the state by what [`State::export`] wrote; after an error it is at position 0.
    pub(crate) fn import(
        &mut self,
        gpu: &mut dyn Gpu,
        fingerprint: &[u8; 32],
        vocab: usize,
        from: &mut dyn Read,
    ) -> Result<()> {
        self.reset(gpu)?;
        let result = self.read(gpu, fingerprint, vocab, from);
        if result.is_err() {
            self.reset(gpu)?;
        }
        result
    }

    fn read(&mut self, gpu: &mut dyn Gpu, fingerprint: &[u8; 32], vocab: usize, from: &mut dyn Read) -> Result<()> {
        let refuse = |reason: String| Err(Error::BadExport(reason));
        let mut hash = Sha256::new();
        let mut get = |bytes: &mut [u8]| -> Result<()> {
            read(from, bytes)?;
            hash.update(&*bytes);
            Ok(())
        };
        let mut magic = [0; MAGIC.len()];
        get(&mut magic)?;
        if magic != *MAGIC {
            return refuse("it is not a state of this version of the Metal backend".into());
        }
        let mut found = [0; 32];
        get(&mut found)?;
        if found != *fingerprint {
            return refuse("it belongs to another checkpoint or another KV dtype".into());
        }
        let mut position = [0; 8];
        get(&mut position)?;
        let position = u64::from_le_bytes(position);
        let Some(position) = usize::try_from(position).ok().filter(|position| *position <= self.capacity) else {
            return refuse(format!("its {position} tokens do not fit into {}", self.capacity));
        };
        for _ in 0..position {
            let mut id = [0; 4];
            get(&mut id)?;
            let id = u32::from_le_bytes(id);
            if id as usize >= vocab {
                return refuse(format!("token {id} is outside the vocabulary of {vocab}"));
            }
            self.tokens.push(Some(id));
        }
        let mut bytes = Vec::new();
        for slice in std::iter::once(self.recurrent).chain(self.rows()) {
            bytes.resize(slice.bytes, 0);
            get(&mut bytes)?;
            gpu.write(slice, &bytes)?;
        }
        let mut stored = [0; 32];
        read(from, &mut stored)?;
        match stored == <[u8; 32]>::from(hash.finalize()) {
            true => Ok(()),
            false => refuse("its checksum is wrong: the data was damaged".into()),
        }
    }
}

/// First bytes of an export: what it is and the version of its layout.
const MAGIC: &[u8; 18] = b"lily-metal-state 1";
