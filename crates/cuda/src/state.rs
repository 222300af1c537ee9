//! What a session keeps on the device: KV cache, convolution history, delta state, tokens; and its copies.

use std::io::{Read, Write};
use std::sync::Arc;

use lily_backend::export::{CheckSum, read};
use lily_backend::{Error, Result, Ticket};
use lily_model::Shape;

use crate::device::{Buffer, Device, Pinned, Pointer};
use crate::kernels::Run;
use crate::kernels::delta::KEPT_BYTES;

/// Bytes of a key or value of one head.
const ROW_BYTES: usize = Shape::HEAD_DIM * 2;
/// Inputs of the convolution that a state keeps: a ring that a step writes at its own place, while it reads the others.
const HISTORY: usize = Shape::CONV_TAPS;

/// Bytes of convolution history, delta state and updates.
pub(crate) fn recurrent_bytes(shape: &Shape) -> usize {
    conv_bytes(shape) + delta_bytes(shape) + shape.delta_layers() * shape.delta_value_heads * KEPT_BYTES
}

fn delta_bytes(shape: &Shape) -> usize {
    shape.delta_layers() * shape.delta_state_len() * 4
}

fn conv_bytes(shape: &Shape) -> usize {
    shape.delta_layers() * HISTORY * shape.conv_width() * 4
}

/// The token that a state's last step sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sampled {
    /// It sampled none.
    Nothing,
    /// It will stand, or stands, in this slot of the results.
    Slot(usize),
    /// It was waited for.
    Id(u32),
}

/// One session's state.
pub(crate) struct State {
    /// Keys `[attention layer, kv head, capacity, 256]` BF16, then values.
    kv: Buffer,
    /// Convolution history `[delta layer, 4, conv width]`, then delta state `[delta layer, value head, 128, 128]`, then updates
    /// that are kept `[delta layer, value head, 3, 260]`; f32.
    recurrent: Buffer,
    /// Tokens from the first on that are all in the delta state; of those behind them some heads may have updates to apply.
    pub(crate) applied: usize,
    /// Ids `[capacity]`, then the sampled one. A step that waits for its mask keeps it.
    pub(crate) words: Arc<Buffer>,
    capacity: usize,
    planes: usize,
    conv_bytes: usize,
    delta_bytes: usize,
    /// Ids of all tokens fed; those that were sampled and not yet waited for are 0.
    tokens: Vec<u32>,
    /// Indices of such tokens and the slots that have them.
    unresolved: Vec<(usize, usize)>,
    pub(crate) sampled: Sampled,
    /// The step whose sampling waits for a mask.
    pub(crate) awaits_mask: Option<Ticket>,
    /// Whether a failed step left it undefined.
    pub(crate) lost: bool,
}

/// A copy of a state's recurrent part.
pub(crate) struct Snapshot {
    tokens: Vec<u32>,
    recurrent: Buffer,
    applied: usize,
}

impl Snapshot {
    /// Its size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.recurrent.bytes() + 4 * self.tokens.len()
    }
}

impl State {
    /// An empty state with room for `capacity` tokens.
    pub(crate) fn new(device: &Device, shape: &Shape, capacity: usize) -> Result<State> {
        Ok(State {
            kv: device.zeroed("a KV cache", capacity * shape.kv_bytes_per_token(2))?,
            recurrent: device.zeroed("a delta state", recurrent_bytes(shape))?,
            applied: 0,
            words: Arc::new(device.zeroed("the tokens of a state", 4 * (capacity + 1))?),
            capacity,
            planes: 2 * shape.attention_layers() * shape.kv_heads,
            conv_bytes: conv_bytes(shape),
            delta_bytes: delta_bytes(shape),
            tokens: Vec::new(),
            unresolved: Vec::new(),
            sampled: Sampled::Nothing,
            awaits_mask: None,
            lost: false,
        })
    }

    /// Tokens it has room for.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens fed so far.
    pub(crate) fn position(&self) -> usize {
        self.tokens.len()
    }

    /// Its bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.kv.bytes() + self.recurrent.bytes() + self.words.bytes()
    }

    /// Where a sampled id goes.
    pub(crate) fn sampled_word(&self) -> Pointer {
        self.words.pointer().at(4 * self.capacity)
    }

    /// The part of a run that says where things are; it begins at the state's position.
    pub(crate) fn run(&self) -> Run {
        Run {
            kv: self.kv.pointer(),
            conv: self.recurrent.pointer(),
            delta: self.recurrent.pointer().at(self.conv_bytes),
            tokens: self.words.pointer(),
            sampled: self.sampled_word(),
            capacity: self.capacity as u32,
            position: self.position() as u32,
            token: Run::FROM_STATE,
            slot: 0,
            vocab_limit: 0,
            top_k: 0,
            penalty_start: 0,
            masked: 0,
            temperature: 0.0,
            top_p: 1.0,
            min_p: 0.0,
            repetition: 1.0,
            presence: 0.0,
            frequency: 0.0,
            biases: 0,
            greedy: 0,
            seed: 0,
            updates: self.recurrent.pointer().at(self.conv_bytes + self.delta_bytes),
            applied: self.applied as u64,
        }
    }

    /// Counts tokens that a step feeds: ids, or the sampled one.
    pub(crate) fn advance(&mut self, ids: Option<&[u32]>) {
        match (ids, self.sampled) {
            (Some(ids), _) => self.tokens.extend(ids),
            (None, Sampled::Id(id)) => self.tokens.push(id),
            (None, Sampled::Slot(slot)) => {
                self.unresolved.push((self.tokens.len(), slot));
                self.tokens.push(0);
            }
            (None, Sampled::Nothing) => unreachable!("a checked step has a sampled token to feed"),
        }
        self.sampled = Sampled::Nothing;
    }

    /// Learns the id that stands in a slot.
    pub(crate) fn resolve(&mut self, slot: usize, id: u32) {
        if self.sampled == Sampled::Slot(slot) {
            self.sampled = Sampled::Id(id);
        }
        let tokens = &mut self.tokens;
        self.unresolved.retain(|(index, waits_for)| {
            if *waits_for == slot {
                tokens[*index] = id;
            }
            *waits_for != slot
        });
    }

    /// Learns all ids, once the device has them.
    pub(crate) fn resolve_all(&mut self, results: &Pinned) {
        for (index, slot) in std::mem::take(&mut self.unresolved) {
            self.tokens[index] = results.word(2 * slot);
        }
    }

    fn settle(&mut self) {
        self.sampled = Sampled::Nothing;
        self.awaits_mask = None;
        self.lost = false;
    }

    /// Back to position 0. Old keys and values stay; nothing reads them.
    pub(crate) fn reset(&mut self, device: &Device) -> Result<()> {
        device.clear(self.recurrent.pointer(), self.recurrent.bytes())?;
        self.applied = 0;
        self.tokens.clear();
        self.unresolved.clear();
        self.settle();
        Ok(())
    }

    /// A copy of the recurrent part. All ids are known.
    pub(crate) fn snapshot(&self, device: &Device) -> Result<Snapshot> {
        let recurrent = device.zeroed("a snapshot", self.recurrent.bytes())?;
        device.copy(recurrent.pointer(), self.recurrent.pointer(), self.recurrent.bytes())?;
        Ok(Snapshot { tokens: self.tokens.clone(), recurrent, applied: self.applied })
    }

    /// Goes back to a snapshot of its own past. All ids are known.
    pub(crate) fn restore(&mut self, device: &Device, snapshot: &Snapshot) -> Result<()> {
        let position = snapshot.tokens.len();
        if self.tokens.get(..position) != Some(&snapshot.tokens[..]) {
            return Err(Error::BadStep(format!(
                "the snapshot at position {position} is not of this state's past: the tokens fed before differ"
            )));
        }
        device.copy(self.recurrent.pointer(), snapshot.recurrent.pointer(), self.recurrent.bytes())?;
        self.applied = snapshot.applied;
        self.tokens.truncate(position);
        self.settle();
        Ok(())
    }

    /// Where the rows of a plane of the cache begin: all layers' keys, head by head, then values.
    fn plane(&self, plane: usize) -> Pointer {
        self.kv.pointer().at(plane * self.capacity * ROW_BYTES)
    }

    /// Becomes a copy of `from`, which fits and whose ids are known.
    pub(crate) fn copy_from(&mut self, device: &Device, from: &State) -> Result<()> {
        let position = from.position();
        for plane in 0..self.planes {
            device.copy(self.plane(plane), from.plane(plane), position * ROW_BYTES)?;
        }
        device.copy(self.recurrent.pointer(), from.recurrent.pointer(), from.recurrent.bytes())?;
        device.copy(self.words.pointer(), from.words.pointer(), 4 * position)?;
        self.applied = from.applied;
        self.tokens.clone_from(&from.tokens);
        self.unresolved.clear();
        self.settle();
        Ok(())
    }

    /// Writes ids that no kernel feeds.
    pub(crate) fn upload_tokens(&self, device: &Device, first: usize, ids: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        device.upload(self.words.pointer().at(4 * first), &bytes)
    }

    /// Writes the state; `fingerprint` says to which checkpoint it belongs. All ids are known.
    pub(crate) fn export(&self, device: &Device, fingerprint: u64, to: &mut dyn Write) -> Result<()> {
        to.write_all(MAGIC)?;
        for field in [fingerprint, self.position() as u64] {
            to.write_all(&field.to_le_bytes())?;
        }
        let mut sum = CheckSum::new();
        let mut put = |bytes: &[u8]| -> Result<()> {
            sum.add(bytes);
            Ok(to.write_all(bytes)?)
        };
        put(&(self.applied as u64).to_le_bytes())?;
        put(&self.tokens.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>())?;
        let mut room = vec![0; self.recurrent.bytes()];
        device.download(&mut room, self.recurrent.pointer())?;
        put(&room)?;
        room.resize(self.position() * ROW_BYTES, 0);
        for plane in 0..self.planes {
            device.download(&mut room, self.plane(plane))?;
            put(&room)?;
        }
        to.write_all(&sum.value().to_le_bytes())?;
        Ok(())
    }

    /// Replaces the state by what [`State::export`] wrote; after an error it is at position 0.
    pub(crate) fn import(
        &mut self,
        device: &Device,
        fingerprint: u64,
        vocab: usize,
        from: &mut dyn Read,
    ) -> Result<()> {
        self.reset(device)?;
        let result = self.read(device, fingerprint, vocab, from);
        if result.is_err() {
            self.reset(device)?;
        }
        result
    }

    fn read(&mut self, device: &Device, fingerprint: u64, vocab: usize, from: &mut dyn Read) -> Result<()> {
        let refuse = |reason: String| Err(Error::BadExport(reason));
        let mut magic = [0; MAGIC.len()];
        read(from, &mut magic)?;
        if magic != *MAGIC {
            return refuse("it is not a state of this version of the CUDA backend".into());
        }
        let mut field = || -> Result<u64> {
            let mut bytes = [0; 8];
            read(from, &mut bytes)?;
            Ok(u64::from_le_bytes(bytes))
        };
        if field()? != fingerprint {
            return refuse("it belongs to another checkpoint".into());
        }
        let position = field()?;
        let position = match usize::try_from(position) {
            Ok(position) if position <= self.capacity => position,
            _ => return refuse(format!("its {position} tokens do not fit into {}", self.capacity)),
        };
        let mut sum = CheckSum::new();
        let mut get = |bytes: &mut [u8]| -> Result<()> {
            read(from, bytes)?;
            sum.add(bytes);
            Ok(())
        };
        let mut applied = [0; 8];
        get(&mut applied)?;
        let applied = u64::from_le_bytes(applied);
        let mut room = vec![0; 4 * position];
        get(&mut room)?;
        let tokens: Vec<u32> = room.as_chunks().0.iter().copied().map(u32::from_le_bytes).collect();
        room.resize(self.recurrent.bytes(), 0);
        get(&mut room)?;
        device.upload(self.recurrent.pointer(), &room)?;
        room.resize(position * ROW_BYTES, 0);
        for plane in 0..self.planes {
            get(&mut room)?;
            device.upload(self.plane(plane), &room)?;
        }
        device.synchronize()?;
        let mut stored = [0; 8];
        read(from, &mut stored)?;
        if u64::from_le_bytes(stored) != sum.value() {
            return refuse("its checksum is wrong: the data was damaged".into());
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return refuse(format!("token {id} is outside the vocabulary of {vocab}"));
        }
        self.upload_tokens(device, 0, &tokens)?;
        self.applied = match usize::try_from(applied) {
            Ok(applied) if applied <= position => applied,
            _ => return refuse(format!("of its {position} tokens {applied} are in the delta state")),
        };
        self.tokens = tokens;
        Ok(())
    }
}

/// First bytes of an export: what it is and the version of its layout.
const MAGIC: &[u8; 17] = b"lily-cuda-state 2";
